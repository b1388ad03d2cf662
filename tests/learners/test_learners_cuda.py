"""A learner on a GPU learns what it learns on the CPU."""

import copy
import dataclasses
import itertools

import numpy as np
import pytest
import torch
from shared_batches import AGENTS, BATCH, make_batch, make_learner, make_spec

from framework.learners import LossContext
from framework.networks import as_tensors

# The others draw an order of minibatches or the noise of layers on the device.
NAMES = [name for name in AGENTS if name != "rainbow" and "minibatches" not in name]
STEPS = 10
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def equal_noise(monkeypatch):
    """Each learner's n-th draw is the same, whatever its device. Returns a function that starts again."""
    counts = [itertools.count()]

    def draw(fill):
        def like(context, tensor):
            values = torch.empty(tensor.shape)
            getattr(values, fill)(generator=torch.Generator().manual_seed(next(counts[0])))
            return values.to(tensor.device)

        return like

    monkeypatch.setattr(LossContext, "normal_like", draw("normal_"))
    monkeypatch.setattr(LossContext, "uniform_like", draw("uniform_"))
    return lambda: counts.__setitem__(0, itertools.count())


def learn_on(device, name, state):
    """What a learner on the device is after STEPS steps from `state`, as arrays by name."""
    agent, actions = AGENTS[name]
    agent = type(agent)(dataclasses.replace(agent.config, device=device)).for_program(BATCH)
    learner = agent.make_learner(agent.make_networks(make_spec(actions)), make_spec(actions))
    learner.restore(copy.deepcopy(state))
    assert {p.device.type for p in learner.networks.parameters()} == {torch.device(device).type}
    for step in range(STEPS):
        batch = make_batch(step, name)
        learner.env_steps = step
        result = learner.step(batch._replace(data=as_tensors(batch.data, device)))
    saved = learner.save()
    found = {f"{part} {key}": value for part in ("networks", "targets") for key, value in saved[part].items()}
    found |= {f"metric {key}": value.cpu() for key, value in result.metrics.items()}
    found["priorities"] = torch.zeros(0) if result.priorities is None else result.priorities
    return {key: value.numpy() for key, value in found.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_learner_on_a_gpu_learns_what_it_learns_on_the_cpu(name, monkeypatch):
    learner = make_learner(name)
    state, start_again = learner.save(), equal_noise(monkeypatch)
    on_cpu = learn_on("cpu", name, state)
    start_again()
    there = learn_on("cuda", name, state)
    assert on_cpu.keys() == there.keys()
    for key in on_cpu:
        np.testing.assert_allclose(there[key], on_cpu[key], rtol=2e-3, atol=2e-3, err_msg=key)
    moved = [
        np.abs(on_cpu[f"networks {k}"] - v.numpy(force=True)).max()
        for k, v in learner.networks.named_parameters()
    ]
    assert max(moved) > 2.5e-3
