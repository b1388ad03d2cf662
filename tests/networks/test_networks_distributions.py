"""Distributions and policy heads against torch.distributions and their own samples."""

import numpy as np
import pytest
import torch
from dm_env import specs as dm_specs
from torch import distributions as td

from framework import networks

DRAWS = 40_000


CPU = torch.device("cpu")


def seeded():
    return torch.Generator().manual_seed(5)


def blocks():
    return networks.BlockGenerator().manual_seed(5)


def test_categorical_against_torch_and_its_own_samples():
    logits = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, 0.5]])
    ours, theirs = networks.Categorical(logits), td.Categorical(logits=logits)
    actions = torch.tensor([2, 0])
    torch.testing.assert_close(ours.log_prob(actions), theirs.log_prob(actions))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    assert ours.mode().tolist() == [1, 0]
    drawn = networks.Categorical(logits.expand(DRAWS, 2, 3)).sample(seeded())
    share = torch.nn.functional.one_hot(drawn, 3).float().mean(0)
    torch.testing.assert_close(share, theirs.probs, atol=0.01, rtol=0)


def test_categorical_log_probabilities_of_rows_and_of_sequences_are_the_same():
    logits = torch.randn(3, 4, 5, generator=seeded(), requires_grad=True)
    actions = torch.randint(5, (3, 4), generator=seeded())
    picked = logits.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    (slope,) = torch.autograd.grad((picked**2).sum(), logits)
    for shape in [(3, 4), (12,)]:
        ours = networks.Categorical(logits.reshape(*shape, 5)).log_prob(actions.reshape(shape))
        torch.testing.assert_close(ours, picked.reshape(shape))
        torch.testing.assert_close(torch.autograd.grad((ours**2).sum(), logits)[0], slope)


def test_illegal_actions_are_never_drawn():
    legal = torch.tensor([True, False, True, False])
    # The illegal ones have by far the largest logits.
    policy = networks.Categorical(torch.tensor([0.0, 50.0, 0.0, 90.0]).expand(5000, 4), legal)
    drawn = policy.sample(seeded())
    assert set(drawn.tolist()) == {0, 2}
    assert policy.mode().unique().tolist() in ([0], [2])
    assert policy.log_prob(torch.tensor([0] * 5000))[0].item() == pytest.approx(np.log(0.5), abs=1e-6)


def test_numbers_of_blocks_choose_with_the_exact_probabilities():
    logits, generator = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, 0.5]]), blocks()
    rows = networks.Categorical(logits.repeat(200, 1))
    drawn = torch.cat([rows.sample(generator).view(200, 2) for _ in range(DRAWS // 200)])
    share = torch.nn.functional.one_hot(drawn, 3).float().mean(0)
    torch.testing.assert_close(share, logits.softmax(-1), atol=0.01, rtol=0)
    # A second formulation: the inverse of the distribution function, at uniform numbers.
    uniform = torch.cat([networks.draw("uniform", (200, 2), CPU, generator) for _ in range(DRAWS // 200)])
    inverse = torch.searchsorted(logits.softmax(-1).cumsum(-1), uniform.T.contiguous()).clamp(max=2)
    torch.testing.assert_close(
        torch.nn.functional.one_hot(inverse.T, 3).float().mean(0), share, atol=0.01, rtol=0
    )
    # Steps and rows are independent of each other.
    first, second = networks.Categorical(logits).sample(generator), drawn.float()
    assert first.shape == (2,) and abs(torch.corrcoef(second.T)[0, 1]) < 0.02
    assert abs(torch.corrcoef(torch.stack([second[1:, 0], second[:-1, 0]]))[0, 1]) < 0.02


@pytest.mark.parametrize(
    "kind, mean, std", [("normal", 0, 1), ("uniform", 0.5, 12**-0.5), (4, 1.5, 1.25**0.5)]
)
def test_numbers_of_blocks_have_their_moments(kind, mean, std):
    generator = blocks()
    drawn = torch.stack([networks.draw(kind, (7,), CPU, generator) for _ in range(DRAWS // 8)])
    assert drawn.dtype == (torch.int64 if kind == 4 else torch.float32)
    torch.testing.assert_close(
        drawn.double().mean(0), torch.full((7,), float(mean)).double(), atol=0.06, rtol=0
    )
    torch.testing.assert_close(drawn.double().std(0), torch.full((7,), std).double(), atol=0.06, rtol=0)
    assert len(drawn.unique(dim=0)) > 4000  # No step gets the numbers of another.


def test_blocks_go_on_from_the_number_where_they_were_saved():
    def some(generator, count):
        kinds = [("gumbel", (3, 2)), ("uniform", (3,)), (5, (3,)), ("gumbel", (1, 2)), ("normal", (9, 9999))]
        drawn = [networks.draw(k, shape, CPU, generator).sum() for _ in range(count) for k, shape in kinds]
        return torch.stack([*drawn, torch.rand((), generator=generator)])

    first, second, straight = blocks(), blocks().manual_seed(9), blocks()
    expected = torch.stack([some(straight, 5), some(straight, 5)])
    drawn = [some(first, 5)]
    second.restore(first.save())
    drawn += [some(first, 5), some(second, 5)]  # Saving changes nothing.
    assert torch.equal(torch.stack(drawn), expected[[0, 1, 1]])
    assert torch.equal(some(first.manual_seed(5), 5), expected[0])  # No number of before is left.


def test_numbers_of_a_block_that_began_without_gradients_take_part_in_gradients():
    mean, generator = torch.zeros(3, requires_grad=True), blocks()
    log_std = torch.zeros(3, requires_grad=True)
    with torch.inference_mode():
        networks.DiagonalGaussian(mean, log_std).sample(generator)
    networks.DiagonalGaussian(mean, log_std).rsample(generator).sum().backward()
    assert log_std.grad.abs().min() > 0


def test_multi_categorical_is_independent_choices():
    logits = torch.randn(4, 5, generator=seeded())
    ours = networks.MultiCategorical(logits, (2, 3))
    parts = [td.Categorical(logits=logits[:, :2]), td.Categorical(logits=logits[:, 2:])]
    actions = torch.tensor([[0, 2], [1, 1], [1, 0], [0, 0]])
    expected = parts[0].log_prob(actions[:, 0]) + parts[1].log_prob(actions[:, 1])
    torch.testing.assert_close(ours.log_prob(actions), expected)
    torch.testing.assert_close(ours.entropy(), parts[0].entropy() + parts[1].entropy())
    other = networks.MultiCategorical(torch.zeros(4, 5), (2, 3))
    uniform = [td.Categorical(logits=torch.zeros(4, n)) for n in (2, 3)]
    expected = sum(td.kl_divergence(p, q) for p, q in zip(parts, uniform, strict=True))
    torch.testing.assert_close(ours.kl(other), expected)
    assert ours.sample(seeded()).shape == ours.mode().shape == (4, 2)
    with pytest.raises(ValueError, match="expected 6"):
        networks.MultiCategorical(logits, (3, 3))


def test_diagonal_gaussian_against_torch():
    mean, log_std = torch.randn(2, 4, 3, generator=seeded())
    ours = networks.DiagonalGaussian(mean, log_std)
    theirs = td.Independent(td.Normal(mean, log_std.exp()), 1)
    actions = torch.randn(4, 3)
    torch.testing.assert_close(ours.log_prob(actions), theirs.log_prob(actions))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    torch.testing.assert_close(ours.mode(), mean)
    drawn = networks.DiagonalGaussian(mean.expand(DRAWS, 4, 3), log_std).sample(seeded())
    torch.testing.assert_close(drawn.mean(0), mean, atol=0.1, rtol=0)
    torch.testing.assert_close(drawn.std(0), log_std.exp(), atol=0.1, rtol=0)


def test_squashed_gaussian_against_torch():
    mean, log_std = torch.tensor([0.3, -0.5]).double(), torch.tensor([-0.7, 0.2]).double()
    ours = networks.SquashedGaussian(mean, log_std)
    base = td.TransformedDistribution(td.Normal(mean, log_std.exp()), [td.TanhTransform()])
    theirs = td.Independent(base, 1)
    many = networks.SquashedGaussian(mean.expand(DRAWS, 2), log_std)
    actions, log_probs = many.rsample_with_log_prob(seeded())
    assert (actions.abs() < 1).all()
    inside = actions.abs().amax(-1) < 0.9998
    torch.testing.assert_close(log_probs[inside], theirs.log_prob(actions[inside]), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(ours.log_prob(actions[inside]), log_probs[inside], atol=1e-6, rtol=1e-6)
    assert ours.entropy().item() == pytest.approx(-log_probs.mean().item(), abs=0.03)
    assert ours.log_prob(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]).double()).isfinite().all()
    torch.testing.assert_close(ours.mode(), torch.tanh(mean))


def test_squashed_kl_is_the_mean_log_ratio_of_its_samples():
    def make(mean, log_std):
        return networks.SquashedGaussian(torch.full((DRAWS, 1), mean), torch.full((1,), log_std))

    this, other = make(0.2, -0.5), make(-0.1, 0.0)
    actions, log_probs = this.rsample_with_log_prob(seeded())
    estimate = (log_probs - other.log_prob(actions)).mean().item()
    assert this.kl(other)[0].item() == pytest.approx(estimate, abs=0.02)


def test_samples_pass_gradients_on_only_when_asked():
    mean = torch.zeros(3, requires_grad=True)
    for policy in (
        networks.DiagonalGaussian(mean, torch.zeros(3)),
        networks.SquashedGaussian(mean, torch.zeros(3)),
    ):
        assert policy.rsample(seeded()).requires_grad
        assert not policy.sample(seeded()).requires_grad
        assert torch.equal(policy.sample(seeded()), policy.sample(seeded()))


@pytest.mark.parametrize(
    "spec, squash, distribution, shape",
    [
        (dm_specs.DiscreteArray(4), False, networks.Categorical, ()),
        (dm_specs.BoundedArray((2,), np.int64, 0, [2, 4]), False, networks.MultiCategorical, (2,)),
        (dm_specs.BoundedArray((3,), np.float32, -1, 1), False, networks.DiagonalGaussian, (3,)),
        (dm_specs.Array((3,), np.float32), False, networks.DiagonalGaussian, (3,)),
        (dm_specs.BoundedArray((3,), np.float32, -1, 1), True, networks.SquashedGaussian, (3,)),
    ],
    ids=["discrete", "multi-discrete", "bounded", "unbounded", "squashed"],
)
def test_the_head_fits_the_spec(spec, squash, distribution, shape):
    policy = networks.make_policy_head(6, spec, squash)(torch.randn(5, 2, 6))
    assert isinstance(policy, distribution)
    actions = policy.sample(seeded())
    assert actions.shape == (5, 2, *shape)
    assert policy.log_prob(actions).shape == policy.entropy().shape == (5, 2)
    for action in actions.reshape(10, *shape).numpy():
        if distribution is not networks.DiagonalGaussian:
            spec.validate(action.astype(spec.dtype))


@pytest.mark.parametrize(
    "spec, squash",
    [
        (dm_specs.BoundedArray((2, 2), np.float32, -1, 1), False),
        (dm_specs.BoundedArray((2,), np.int64, 1, 3), False),
        (dm_specs.Array((2,), np.float32), True),
        ({"a": dm_specs.DiscreteArray(2)}, False),
    ],
    ids=["two axes", "integers from 1", "squash without bounds", "nest"],
)
def test_a_spec_without_a_head_is_named(spec, squash):
    with pytest.raises(ValueError, match=r"action spec: got .* expected a DiscreteArray"):
        networks.make_policy_head(6, spec, squash)
