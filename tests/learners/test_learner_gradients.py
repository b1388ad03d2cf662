"""Step modes: a compiled loss with its gradients does what the loss does as it is written."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import types

import pytest
import torch
import tree
from agent_batches import ENVS, batch_of, flat, learn, make_learner
from agent_cases import SMALL, spec_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from agents.a2c import A2CConfig
from agents.a3c import A3C
from agents.dqn import DQN, DQNConfig
from agents.impala import IMPALA
from agents.ppo import PPO, PPOConfig
from framework.learners import LossOutput, MinibatchLearner, SGDLearner, cuda_graphs, gradient
from framework.learners.cuda_graphs import CapturedGradient
from framework.learners.gradient import CompiledGradient, LossGradient
from framework.networks import as_tensors, frozen
from framework.pickling import ObjectPickler, pickle_module
from framework.programs import RunConfig
from framework.replay import ReplaySample

# One for each kind of loss.
KINDS = ("a2c", "dqn", "impala", "ppo", "r2d2", "rainbow", "sac", "td3")
# A compilation takes seconds: those of others are in `make release`. That no loss reads a tensor is seen on
# the device `meta`, too.
COMPILED = ("a2c", "dqn", "impala", "ppo", "sac")
as_traced = functools.partial(torch.compile, fullgraph=True, backend="aot_eager", isolate_recompiles=True)
STEPS = 20


def pair(name, compiler, **fields):
    """Two equal learners of an agent, of which the second one compiles with `compiler`."""
    agent = type(SMALL[name])(dataclasses.replace(SMALL[name].config, **fields))
    eager, compiled = make_learner(agent, spec_of(name)), make_learner(agent, spec_of(name))
    compiled._gradient = CompiledGradient(compiled._eager, compiled.fixed_sizes, compiler)
    return agent, eager, compiled


def statistics_of(name):
    """Settings with which the loss itself changes buffers."""
    return {"normalize_observations": True} if name in ("r2d2", "td3") else {}


def difference(agent, eager, compiled, name, steps):
    largest = 0.0
    for step in range(steps):
        batch = batch_of(agent, spec_of(name), step % 5)
        for learner in (eager, compiled):
            learner.env_steps = 7 * step
        one, other = learn(eager, batch), learn(compiled, batch)
        if one.priorities is not None:
            largest = max(largest, float((one.priorities - other.priorities).abs().max()))
        largest = max(largest, float((flat(eager.networks) - flat(compiled.networks)).abs().max()))
    for name in one.metrics:
        torch.testing.assert_close(other.metrics[name], one.metrics[name], rtol=1e-4, atol=1e-4)
    return largest


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in COMPILED else pytest.mark.release) for n in SMALL]
)
def test_every_loss_compiles_as_a_whole(name):
    """Any break in the graph is an error. Without the compiler's arithmetic, results are equal bit by bit."""
    fields = {"learning_rate_decay": 100, **statistics_of(name)}
    if name == "ppo":
        fields |= {"clip_end": 0.1, "minibatch_size": 7}  # Of 25 rows or fewer: sizes differ.
    agent, eager, compiled = pair(name, as_traced, **fields)
    assert difference(agent, eager, compiled, name, STEPS) == 0.0


@pytest.mark.release
@pytest.mark.cpu_budget(120)
@pytest.mark.parametrize("name", SMALL)
def test_the_real_compiler_rounds_only(name):
    agent, eager, compiled = pair(name, None, **statistics_of(name))
    # Adam's first steps have the size of the learning rate, however small a gradient is.
    assert difference(agent, eager, compiled, name, 3) < 1e-4


# --- CUDA graphs ---


def rerun(run, device):
    """Stands in for a graph: runs again, and leaves the results in the same tensors."""
    outputs = run()

    def replay():
        for own, new in zip(tree.flatten(outputs), tree.flatten(run()), strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(new)

    return outputs, replay


@pytest.mark.parametrize("name", KINDS)
def test_every_loss_as_graphs(name, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_record", rerun)
    agent, eager, captured = pair(name, None)
    captured._gradient = CapturedGradient(captured._eager)
    assert difference(agent, eager, captured, name, 4) == 0.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", SMALL)
def test_every_loss_as_graphs_of_a_gpu(name):
    agent, eager, captured = pair(name, None, device="cuda")
    captured._gradient = CapturedGradient(captured._eager)
    assert difference(agent, eager, captured, name, STEPS) < 1e-4


TAKE_NUMBERS = (
    "add",
    "sub",
    "rsub",
    "mul",
    "div",
    "pow",
    "where",
    "minimum",
    "maximum",
    "ge",
    "gt",
    "le",
    "lt",
)


class OnlyThere(TorchDispatchMode):
    """Refuses operations that a GPU cannot do, or not in a graph, of tensors on the device `meta`."""

    def __init__(self, in_graph):
        super().__init__()
        self._in_graph = in_graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        places = {
            leaf.device.type for leaf in tree.flatten((args, results)) if isinstance(leaf, torch.Tensor)
        }
        if self._in_graph:
            assert "cpu" not in places and "lift_fresh" not in func.name(), f"{func} has something of the CPU"
        elif len(places) > 1:
            assert func.overloadpacket.__name__ in TAKE_NUMBERS, f"{func} of a GPU takes nothing from the CPU"
        return results


VARIANTS = {name: (name, {}) for name in SMALL}
VARIANTS |= {"prioritized": ("dqn", {"prioritized": True}), "ppo's clip": ("ppo", {"clip_end": 0.1})}


@pytest.mark.parametrize(
    ("variant", "in_graph"),
    [
        *((name, True) for name in VARIANTS),
        *(pytest.param(n, False, marks=() if n in COMPILED else pytest.mark.release) for n in VARIANTS),
    ],
)
def test_a_loss_computes_where_its_tensors_are(variant, in_graph, monkeypatch):
    """A GPU takes counts from the CPU in arithmetic only; a graph takes neither these nor new constants."""
    name, fields = VARIANTS[variant]
    agent, learner, _ = pair(name, None, learning_rate_decay=100, **fields)
    batch, context = batch_of(agent, spec_of(name)), learner._context()
    batch = batch._replace(data=as_tensors(batch.data))
    if isinstance(learner, MinibatchLearner):
        with torch.no_grad():
            batch = learner._prepare_fn(learner.networks, batch, context).data
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # It does not know `meta`.
    move = lambda nest: tree.map_structure(lambda leaf: leaf.to("meta"), nest)  # noqa: E731
    batch, counts = move(gradient._as_tensors(batch, "cpu")), (context.learner_steps, context.env_steps)
    learner.targets.to("meta")
    parameters = list(learner.networks.to("meta").parameters())
    there = types.SimpleNamespace(device=torch.device("meta"))
    asked = types.SimpleNamespace(draw=lambda method, empty: empty, is_due=lambda *question: True)
    counts = dict(zip(("learner_steps", "env_steps"), move(counts) if in_graph else counts, strict=True))
    compute = LossGradient(learner.networks, parameters, learner._loss_fn, contextlib.nullcontext)
    for mode in (contextlib.nullcontext(), OnlyThere(in_graph)):  # The first one makes constants.
        with mode:
            compute(batch, context._replace(generator=there, asked=asked, **counts))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.critic = nn.Linear(3, 1), nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(()))


def ask(network, batch, context):
    """A loss that draws, chooses, counts, masks and changes a buffer."""
    network.seen.add_(1.0)
    inputs = tree.map_structure(lambda leaf: leaf.float(), batch.data)["x"]
    outputs = network.model(inputs)
    loss = (outputs - context.normal_like(outputs)).square().mean()
    loss = loss + (context.env_steps / 100) * network.model(inputs + context.normal(3)).mean()
    with frozen(network.critic):
        loss = loss + network.critic(inputs).mean()
    if context.is_due(3):
        loss = loss + (network.critic(inputs) * context.uniform_like(inputs[:, :1])).mean()
    if context.is_due(2, 0):
        loss = 2 * loss
    return LossOutput(loss, {"seen": network.seen.clone()})


def batches(rows=4):
    for step in range(8):
        yield ReplaySample(None, {"x": torch.randn(rows, 3, generator=torch.Generator().manual_seed(step))})


def ask_learner(compiled, **options):
    learner = SGDLearner(Net(), ask, functools.partial(torch.optim.SGD, lr=0.1), seed=3, **options)
    if compiled:
        learner._gradient = CompiledGradient(learner._eager, compiler=as_traced)
    return learner


def test_a_compiled_loss_asks_its_context():
    eager, compiled = ask_learner(False), ask_learner(True)
    for step, batch in enumerate(batches()):
        eager.env_steps = compiled.env_steps = 10 * step
        for learner in (eager, compiled):
            result = learner.step(batch)
            assert float(result.metrics["seen"]) == step + 1, "a rehearsal must not change buffers"
        assert flat(eager.networks).equal(flat(compiled.networks)), step
        assert eager._generator.get_state().equal(compiled._generator.get_state())
    # Due or not, by both periods: (3, 2) are (no, no), (no, no), (yes, yes), (no, no), (no, yes), (yes, no).
    assert len(compiled._gradient._compiled) == 4


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_graphs_ask_the_context_and_return_what_can_be_kept(dtype, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_record", rerun)
    monkeypatch.setattr(cuda_graphs, "_MOST_SIZES", 1)  # Others are computed as the loss is written.
    eager, captured = (ask_learner(False, autocast_dtype=dtype) for _ in range(2))
    captured._gradient = CapturedGradient(captured._eager)
    kept = []
    for step, batch in enumerate(batches()):
        if step == 5:
            batch = next(batches(rows=3))
        eager.env_steps = captured.env_steps = 10 * step
        eager.step(batch)
        kept.append(captured.step(batch).metrics["seen"])
        assert flat(eager.networks).equal(flat(captured.networks)), step
        assert eager._generator.get_state().equal(captured._generator.get_state())
    assert torch.stack(kept).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


@pytest.mark.parametrize(
    "mode",
    [
        functools.partial(CompiledGradient, compiler=as_traced),
        pytest.param(CapturedGradient, marks=pytest.mark.release),
    ],
)
def test_a_compiled_learner_resumes_exactly(mode, monkeypatch):
    """From a checkpoint, and from its exact state."""
    monkeypatch.setattr(cuda_graphs, "_record", rerun)

    def make():
        learner = ask_learner(False)
        learner._gradient = mode(learner._eager)
        return learner

    straight, restored = make(), make()
    for step, batch in enumerate(itertools.islice(batches(), 5)):
        if step == 2:
            file, module = io.BytesIO(), pickle_module(ObjectPickler)
            torch.save(restored, file, pickle_module=module)
            file.seek(0)
            loaded = torch.load(file, pickle_module=module, weights_only=False)
            state, restored = restored.save(), make()
            restored.restore(state)
        for learner in (straight, restored, *([loaded] if step >= 2 else [])):
            learner.step(batch)
    assert flat(straight.networks).equal(flat(restored.networks))
    assert flat(straight.networks).equal(flat(loaded.networks))


def test_equal_gradients_are_clipped_once():
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)

    def loss(network, batch, context):
        return LossOutput(100.0 * (network.a.bias + network.b.bias + network.a.weight.sum() * 0.0).sum(), {})

    learners = []
    for compiled in (False, True):
        torch.manual_seed(0)
        learner = SGDLearner(Twins(), loss, functools.partial(torch.optim.SGD, lr=1.0), max_gradient_norm=1.0)
        if compiled:
            learner._gradient = CompiledGradient(learner._eager, compiler=as_traced)
        learner.step(ReplaySample(None, torch.zeros(1)))
        learners.append(flat(learner.networks))
    assert learners[0].equal(learners[1])


def test_a_loss_that_reads_a_tensor_is_refused_with_its_line():
    def loss(network, batch, context):
        value = network.model(batch.data["x"]).mean()
        return LossOutput(value if value > 0 else -value, {})

    learner = SGDLearner(Net(), loss, functools.partial(torch.optim.SGD, lr=0.1))
    learner._gradient = CompiledGradient(learner._eager, compiler=as_traced)
    with pytest.raises(ValueError, match=r"step_mode(.|\n)*value if value > 0(.|\n)*use step_mode 'eager'"):
        learner.step(next(batches()))


# --- what a program chooses ---


def decided(agent, recorded=types.MappingProxyType({}), **run):
    agent, lines = agent.decided(RunConfig(**run), recorded)
    return agent.config.step_mode, lines


def test_auto_compiles_a_long_run_and_says_so(monkeypatch):
    monkeypatch.setattr(gradient.shutil, "which", lambda name: name)
    agent = DQN(DQNConfig(step_mode="auto", samples_per_insert=128.0))
    said = ["step_mode auto: compile, for about 1,000,000 optimizer steps"]
    assert decided(agent, max_env_steps=1_000_000) == ("compile", said)
    assert decided(agent, max_env_steps=10_000)[0] == "eager"
    assert decided(agent)[0] == "eager", "a run without a limit may be short"
    assert decided(agent, num_learners=2, max_env_steps=1_000_000)[0] == "eager"
    for recorded in ("eager", "cuda_graph"):  # Which this device has not.
        assert decided(agent, {"step_mode": recorded}, max_env_steps=1_000_000)[0] == "eager"
    assert len(decided(DQN(DQNConfig(step_mode="compile")), num_learners=2)[1]) == 1


@pytest.mark.parametrize(
    "agent, steps",
    [
        (DQN(DQNConfig(samples_per_insert=8.0, batch_size=32)), 250),
        (PPO(PPOConfig(unroll_length=10, epochs=4, minibatch_size=20)), 200),
        (PPO(PPOConfig(unroll_length=10, epochs=4, minibatch_size=None)), 80),
        (IMPALA(dataclasses.replace(SMALL["impala"].config, unroll_length=10, batch_size=2)), 50),
    ],
)
def test_the_number_of_optimizer_steps_is_known(agent, steps):
    assert agent.for_program(ENVS).optimizer_steps(1_000) == steps


def test_a_worker_on_the_cpu_has_no_graphs():
    worker = A3C(A2CConfig(device="cuda", step_mode="cuda_graph")).for_worker(2)
    assert (worker.config.device, worker.config.step_mode) == ("cpu", "eager")


@pytest.mark.parametrize("mode", ["compile", "cuda_graph"])
def test_a_mode_that_this_machine_has_not_is_refused_before_nodes_start(mode, monkeypatch):
    monkeypatch.setattr(gradient.shutil, "which", lambda name: None)
    agent = DQN(DQNConfig(step_mode=mode))
    with pytest.raises(ValueError, match=rf"step_mode: got '{mode}' (without a C\+\+|which needs a GPU)"):
        decided(agent)
    assert decided(DQN(DQNConfig(step_mode="auto")), max_env_steps=10**9)[0] == "eager"
