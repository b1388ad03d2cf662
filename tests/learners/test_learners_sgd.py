"""The SGD learner: steps against torch by hand, targets, schedules, snapshots, errors, exact resume."""

import collections
import io
import math

import numpy as np
import pytest
import torch
from torch import nn

from framework import learners
from framework.learners import LossOutput, SGDLearner, schedules

Info = collections.namedtuple("Info", "key probability")
Sample = collections.namedtuple("Sample", "info data")


def make_batch(seed=0, size=8, scale=1.0):
    random = np.random.default_rng(seed)
    info = Info(np.arange(size, dtype=np.uint64), np.full(size, 1 / size))
    return Sample(info, {"x": torch.as_tensor(scale * random.normal(size=(size, 3)), dtype=torch.float32)})


class Networks(nn.Module):
    """A child that learns and one that does not."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.model = nn.Linear(3, 1)
        self.frozen = nn.Linear(2, 2)
        self.frozen.requires_grad_(False)


def squared_loss(networks, batch, context):
    error = networks.model(batch.data["x"]).squeeze(-1) - 1.0
    return LossOutput((error**2).mean(), {"bias": networks.model.bias.mean()}, error.abs())


def noisy_loss(networks, batch, context):
    """Depends on everything a resume has to bring back: targets, steps and random numbers."""
    noise = torch.randn(len(batch.data["x"]), generator=context.generator)
    target = context.targets["model"](batch.data["x"]).squeeze(-1) + noise + context.learner_steps
    return LossOutput(((networks.model(batch.data["x"]).squeeze(-1) - target) ** 2).mean(), {})


def make_learner(loss=squared_loss, optimizer=None, networks=None, **kwargs):
    optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=0.1))
    return SGDLearner(networks or Networks(), loss, optimizer, **kwargs)


def weights(learner, name="model"):
    return learner.parameters()[name]["weight"].copy()


def test_a_step_is_one_step_of_the_optimizer():
    learner, by_hand = make_learner(), Networks()
    optimizer = torch.optim.SGD(by_hand.model.parameters(), lr=0.1)
    for seed in range(3):
        batch = make_batch(seed)
        result = learner.step(batch)
        optimizer.zero_grad()
        error = by_hand.model(batch.data["x"]).squeeze(-1) - 1.0
        (error**2).mean().backward()
        norm = torch.cat([p.grad.flatten() for p in by_hand.model.parameters()]).norm()
        optimizer.step()
        assert result.metrics["loss"].item() == pytest.approx((error**2).mean().item())
        assert result.metrics["gradient_norm"].item() == pytest.approx(norm.item())
        np.testing.assert_allclose(result.priorities.numpy(), error.abs().detach().numpy(), rtol=1e-6)
    np.testing.assert_allclose(weights(learner), by_hand.model.weight.detach().numpy(), rtol=1e-6)
    assert learner.steps == 3


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("limit, scaled", [(1e-3, True), (0.8, True), (1.25, False)])
def test_gradients_are_clipped_by_their_global_norm(limit, scaled, small, monkeypatch):
    if not small:
        monkeypatch.setattr("framework.learners.gradient._SMALL", 0)
    free, batch = make_learner(), make_batch(scale=10.0)
    before = weights(free).copy()
    limit *= free.step(batch).metrics["gradient_norm"].item()
    learner = make_learner(max_gradient_norm=limit)
    norm = learner.step(batch).metrics["gradient_norm"].item()
    gradients = [p.grad for p in free.networks.parameters() if p.grad is not None]
    assert norm == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), rel=1e-5)
    factor = limit / norm if scaled else 1.0
    moved = (weights(learner) - before) / (weights(free) - before)
    np.testing.assert_allclose(moved, factor, rtol=1e-2)


def test_an_optimizer_without_some_parameters_is_refused():
    with pytest.raises(ValueError, match=r"got one without model\.bias\. Add them"):
        make_learner(optimizer=lambda parameters: torch.optim.SGD(parameters[:1], lr=0.1))


def test_target_networks_are_copied_at_each_period():
    learner = make_learner(target_names=["model"], target_update_period=3)
    history = []
    for seed in range(7):
        learner.step(make_batch(seed))
        history.append(learner.networks.model.weight.detach().clone())
        target = learner.targets["model"].weight
        expected = (
            Networks().model.weight if seed < 2 else history[seed // 3 * 3 - 1 if seed % 3 != 2 else seed]
        )
        torch.testing.assert_close(target, expected, rtol=0, atol=0)


def test_target_networks_are_polyak_averages():
    learner = make_learner(target_names=["model"], target_update_rate=0.2)
    expected = Networks().model.weight.detach().clone()
    for seed in range(5):
        learner.step(make_batch(seed))
        expected = 0.8 * expected + 0.2 * learner.networks.model.weight.detach()
        torch.testing.assert_close(learner.targets["model"].weight, expected)
    assert not learner.targets["model"].weight.requires_grad


@pytest.mark.parametrize("names", [["model"], ["model", "other"]])
def test_buffers_of_target_networks_follow_also_what_two_networks_share(names):
    class Buffered(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.BatchNorm1d(3)
            self.other = nn.Sequential(self.model, nn.Linear(3, 1))

    def loss(networks, batch, context):
        return LossOutput(networks.other(batch.data["x"]).square().sum(), {})

    learner = make_learner(loss, networks=Buffered(), target_names=names, target_update_rate=0.1)
    learner.step(make_batch())
    assert learner.networks.model.running_mean.abs().sum() > 0
    for name in names:
        online, target = learner.networks.get_submodule(name), learner.targets[name]
        torch.testing.assert_close(dict(target.named_buffers()), dict(online.named_buffers()))


@pytest.mark.parametrize(
    "schedule, factors",
    [
        (schedules.linear_decay(8), [1, 0.75, 0.5, 0.25, 0, 0]),
        (schedules.linear_decay(4, end=0.5), [1, 0.75, 0.5, 0.5, 0.5, 0.5]),
        (schedules.linear_decay(None), [1] * 6),
        (None, [1] * 6),
    ],
    ids=["to zero", "to a half", "no steps", "none"],
)
def test_the_learning_rate_follows_its_schedule(schedule, factors):
    learner = make_learner(learning_rate_schedule=schedule)
    rates = []
    for env_steps in range(0, 12, 2):
        learner.env_steps = env_steps
        rates.append(learner.step(make_batch()).metrics["learning_rate"].item())
    assert rates == pytest.approx([0.1 * factor for factor in factors])


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_is_an_error_before_the_parameters_change(where):
    def loss(networks, batch, context):
        value = networks.model(batch.data["x"]).sum()
        if context.learner_steps == 2:
            # The square root has an infinite slope at 0.
            value = value * math.nan if where == "loss" else (value - value.detach()).abs().sqrt()
        return LossOutput(value, {"value": value})

    learner = make_learner(loss)
    learner.step(make_batch())
    learner.step(make_batch())
    before = weights(learner).copy()
    with pytest.raises(FloatingPointError, match=r"Learner step 2: .*value="):
        learner.step(make_batch())
    np.testing.assert_array_equal(weights(learner), before)
    assert learner.steps == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda output: output.loss, "returned Tensor, expected LossOutput"),
        (lambda output: output._replace(loss=output.priorities), r"loss in .* got shape \(8,\)"),
        (lambda output: output._replace(metrics={"bias": 0.5}), "bias in .* got 0.5, expected a scalar"),
    ],
)
def test_a_loss_that_returns_something_else_is_named(change, message):
    with pytest.raises(TypeError, match=message):
        make_learner(lambda *inputs: change(squared_loss(*inputs))).step(make_batch())


@pytest.mark.parametrize("shape", [(), (1,)])
def test_what_a_gpu_finds_late_is_never_published_or_saved(shape):
    def loss(networks, batch, context):
        value = networks.model(batch.data["x"]).sum().reshape(shape)
        return LossOutput(value * math.nan if context.learner_steps == 1 else value, {})

    learner = make_learner(loss)
    good = learner.save()
    learner.device = torch.device("cuda")  # Checks as on a GPU; the tensors are on the CPU.
    learner.step(make_batch())
    learner.step(make_batch())
    for read in (learner.parameters, learner.save, learner.save):
        with pytest.raises(FloatingPointError, match="Learner step 1"):
            read()
    learner.restore(good)
    learner.save()


def test_a_gpu_finds_a_step_with_priorities_that_are_not_numbers_at_once():
    learner = make_learner()
    learner.device = torch.device("cuda")  # As above.
    learner.step(make_batch())
    with pytest.raises(FloatingPointError, match="Learner step 1"):
        learner.step(make_batch(scale=math.nan))


def test_statistics_that_are_not_numbers_are_never_published_or_saved():
    networks = Networks()
    networks.frozen.register_buffer("seen", torch.zeros(()))

    def loss(networks, batch, context):
        networks.frozen.seen += batch.data["x"].sum()
        return squared_loss(networks, batch, context)

    learner = make_learner(loss, networks=networks)
    for read in (lambda: learner.step(make_batch(scale=math.nan)), learner.parameters, learner.save):
        with pytest.raises(FloatingPointError, match="Learner step 0"):
            read()


def test_parameters_are_those_of_the_children_without_a_copy():
    learner = make_learner()
    parameters = learner.parameters()
    assert sorted(parameters) == ["frozen", "model"]
    learner.step(make_batch())
    np.testing.assert_array_equal(parameters["model"]["weight"], learner.networks.model.weight.detach())


def make_resumable():
    return make_learner(
        noisy_loss,
        lambda p: torch.optim.Adam(p, lr=0.05),
        target_names=["model"],
        target_update_period=3,
        learning_rate_schedule=schedules.linear_decay(20),
        max_gradient_norm=1.0,
        seed=4,
    )


def test_a_restored_learner_goes_on_exactly_where_it_was():
    straight = make_resumable()
    for seed in range(5):
        straight.env_steps = 3 * seed
        straight.step(make_batch(seed))
    file = io.BytesIO()
    torch.save(straight.save(), file)
    file.seek(0)
    resumed = make_resumable()
    resumed.step(make_batch(99))  # Anything: restoring takes it all back.
    resumed.restore(torch.load(file, weights_only=True))
    for seed in range(5, 10):
        first, second = straight.step(make_batch(seed)), resumed.step(make_batch(seed))
        metrics = [{k: v.item() for k, v in each.metrics.items()} for each in (first, second)]
        assert metrics[0] == metrics[1]
    np.testing.assert_array_equal(weights(straight), weights(resumed))
    assert resumed.steps == 10


def test_a_saved_state_does_not_change_with_later_steps():
    learner = make_resumable()
    learner.step(make_batch())
    state = learner.save()
    kept = state["networks"]["model.weight"].clone()
    moment = state["optimizer"]["state"][0]["exp_avg"].clone()
    learner.step(make_batch(1))
    assert torch.equal(state["networks"]["model.weight"], kept)
    assert torch.equal(state["optimizer"]["state"][0]["exp_avg"], moment)


def test_a_restored_learner_keeps_the_settings_of_its_own_optimizer():
    first = make_learner(optimizer=lambda p: torch.optim.Adam(p, lr=0.05, eps=1e-8))
    first.step(make_batch())
    second = make_learner(optimizer=lambda p: torch.optim.Adam(p, lr=0.5, eps=1e-3))
    second.restore(first.save())
    assert second.step(make_batch(1)).metrics["learning_rate"].item() == pytest.approx(0.5)
    (group,) = second.optimizer.param_groups
    assert (group["lr"], group["eps"]) == (0.5, 1e-3)


def test_the_state_of_another_optimizer_is_refused():
    first = make_learner(optimizer=lambda p: torch.optim.RMSprop(p, lr=0.05))
    first.step(make_batch())
    with pytest.raises(ValueError, match="optimizer: got the state of RMSprop, expected Adam's"):
        make_resumable().restore(first.save())


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"target_update_period": 0}, "target_update_period: got 0"),
        ({"target_update_rate": 0.0}, "target_update_rate: got 0.0"),
        ({"max_gradient_norm": -1.0}, "max_gradient_norm: got -1.0"),
        ({"autocast_dtype": torch.float16}, "float16"),
        ({"target_names": ["critic"]}, "critic"),
    ],
)
def test_bad_arguments_are_named(kwargs, message):
    with pytest.raises((ValueError, KeyError), match=message):
        make_learner(**kwargs)


def test_bfloat16_computes_the_loss_in_low_precision_and_keeps_the_parameters_in_high():
    seen = []

    def loss(networks, batch, context):
        output = networks.model(batch.data["x"])
        seen.append(output.dtype)
        return LossOutput(output.float().square().mean(), {})

    learner = make_learner(loss, autocast_dtype=torch.bfloat16)
    learner.step(make_batch())
    assert seen == [torch.bfloat16]
    assert learner.networks.model.weight.dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("step_mode", ["eager", "cuda_graph"])
def test_on_a_gpu_a_step_does_not_wait_for_the_device_and_nothing_broken_is_published(step_mode):
    def loss(networks, batch, context):
        value = networks.model(batch.data["x"]).square().mean()
        return LossOutput(value + torch.where(context.learner_steps == 3, math.nan, 0.0), {})

    settings = {"max_gradient_norm": 1.0, "target_names": ["model"], "step_mode": step_mode}
    learner = make_learner(loss, device="cuda", **settings)
    batch = make_batch()
    on_device = Sample(
        Info(batch.info.key, torch.as_tensor(batch.info.probability).cuda()),
        {"x": torch.as_tensor(batch.data["x"]).cuda()},
    )
    for _ in range(2):
        learner.step(on_device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        learner.step(on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    learner.parameters()
    learner.step(on_device)
    with pytest.raises(FloatingPointError, match="Learner step 3"):
        learner.parameters()


def test_schedules():
    ramp = schedules.linear(1.0, 0.2, 4)
    assert [ramp(step) for step in (0, 1, 2, 4, 9)] == pytest.approx([1.0, 0.8, 0.6, 0.2, 0.2])
    assert learners.linear_decay(None)(10**9) == 1.0
    with pytest.raises(ValueError, match="steps: got 0"):
        schedules.linear(1.0, 0.0, 0)
