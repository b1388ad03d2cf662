"""LaProp with adaptive clipping, against NumPy."""

import io

import numpy as np
import pytest
import torch

from framework.learners import LaProp


@pytest.mark.parametrize(("clip", "warmup"), [(None, 0), (0.3, 4)])
def test_steps_against_numpy(clip, warmup):
    random = np.random.default_rng(0)
    values = [random.normal(size=shape) for shape in [(3, 2), (4,)]] + [np.zeros(2)]
    parameters = [torch.tensor(value, requires_grad=True) for value in values]
    optimizer = LaProp(
        [{"params": parameters}], lr=0.1, betas=(0.8, 0.9), eps=1e-12, clip=clip, warmup=warmup
    )
    means, squares = [[np.zeros_like(value) for value in values] for _ in range(2)]
    for step in range(1, 7):
        scale = 10.0 if step % 2 else 0.01  # Clipped or not.
        for i, parameter in enumerate(parameters):
            gradient = scale * random.normal(size=values[i].shape)
            parameter.grad = torch.tensor(gradient)
            if clip is not None:
                limit = clip * max(1e-3, np.linalg.norm(values[i]))
                gradient = gradient / max(1.0, np.linalg.norm(gradient) / limit)
            squares[i] = 0.9 * squares[i] + 0.1 * gradient**2
            normal = gradient / (np.sqrt(squares[i] / (1 - 0.9**step)) + 1e-12)
            means[i] = 0.8 * means[i] + 0.2 * normal
            rate = 0.1 * (min(1.0, (step - 1) / warmup) if warmup else 1.0)
            values[i] = values[i] - rate * means[i] / (1 - 0.8**step)
        optimizer.step()
        if step == 3:  # What is saved goes on in another optimizer.
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer = LaProp([{"params": parameters}], lr=0.1, betas=(0.8, 0.9), clip=clip, warmup=warmup)
            optimizer.load_state_dict(torch.load(file, weights_only=True))
        for parameter, value in zip(parameters, values, strict=True):
            np.testing.assert_allclose(parameter.detach().numpy(), value, rtol=1e-5, atol=1e-9)


def test_a_parameter_without_a_gradient_stays():
    used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = LaProp([used, unused])
    used.grad = torch.ones(2)
    optimizer.step()
    assert (used < 1).all() and (unused == 1).all()
