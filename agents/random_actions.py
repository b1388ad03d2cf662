"""Random actions: the smallest agent, a baseline for scores and a test of everything around the agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tree
from dm_env import specs as dm_specs
from torch import nn

from framework import adders, core, replay, specs
from framework import config_checks as check
from framework.datasets import Dataset
from framework.networks import check_action_mask
from framework.replay.contracts import ReplayClient
from framework.runs.presets import Preset
from framework.types import Nest, StepResult


@dataclass(frozen=True)
class RandomActionsConfig(check.NamedFields):
    """Settings of the agent that acts at random and learns nothing."""

    batch_size: int = 32  # Items per learner step, which only counts them.
    max_replay_size: int = 10_000  # Items kept.
    samples_per_insert: float = 1.0  # Times an item is drawn on average.

    def __post_init__(self) -> None:
        check.types(self)
        check.at_least(self, 1, "batch_size", "max_replay_size")
        check.ordered(self, "batch_size", "max_replay_size")
        check.above(self, 0, "samples_per_insert")


class RandomPolicy(core.Policy):
    """Uniform over the action spec: integers and floats between their bounds, and bools.

    Floats without a bound are drawn as if it were -1 or 1, or 1 from their other bound if that lies beyond.
    """

    def __init__(self, action_spec: Nest):
        self._spec = action_spec
        self._random = np.random.default_rng(0)

    def initial_state(self, batch_size: int) -> tuple[()]:
        return ()

    def step(self, observation: Any, state: Any) -> tuple[Any, tuple[()], Any]:
        envs = len(tree.flatten(observation)[0])
        return tree.map_structure(lambda spec: self._draw(spec, envs), self._spec), (), state

    def _draw(self, spec: Any, envs: int) -> np.ndarray:
        shape = (envs, *spec.shape)
        low: Any = -1
        high: Any = 1
        if isinstance(spec, dm_specs.BoundedArray):
            low, high = spec.minimum, spec.maximum
        if np.issubdtype(spec.dtype, np.integer):
            return self._random.integers(low, high, shape, endpoint=True).astype(spec.dtype)
        if np.issubdtype(spec.dtype, np.bool_):
            return self._random.random(shape) < 0.5
        low, high = specs.bounds(spec)
        least = np.where(np.isfinite(low), low, np.minimum(-1.0, high - 1.0))
        most = np.where(np.isfinite(high), high, np.maximum(1.0, low + 1.0))
        return self._random.uniform(least, most, shape).astype(spec.dtype)

    def seed(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def save(self) -> dict[str, Any]:
        return dict(self._random.bit_generator.state)

    def restore(self, state: dict[str, Any]) -> None:
        self._random.bit_generator.state = state


class CountingLearner(core.Learner):
    """Counts its steps as a learner does, without learning."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, batch: replay.ReplaySample) -> StepResult:
        self.steps += 1
        return StepResult({"reward": float(np.mean(np.asarray(batch.data.reward)))})

    def parameters(self) -> dict[str, dict[str, Any]]:
        return {}

    def save(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def restore(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])


class RandomNetworks(nn.Module):
    """Holds the action spec for the policy. It has no parameters."""

    def __init__(self, action_spec: Nest):
        super().__init__()
        self.action_spec = action_spec


class RandomActions(core.Agent):
    """Acts at random in any environment, and learns nothing."""

    def __init__(self, config: RandomActionsConfig | None = None):
        self.config = config or RandomActionsConfig()

    def make_networks(self, spec: specs.EnvironmentSpec) -> RandomNetworks:
        check_action_mask(spec, "RandomActions", takes_masks=False)
        return RandomNetworks(spec.actions)

    def make_policy(self, networks: RandomNetworks, evaluation: bool = False) -> RandomPolicy:
        return RandomPolicy(networks.action_spec)

    def make_tables(self, spec: specs.EnvironmentSpec) -> list[replay.Table]:
        config = self.config
        ratio, size = config.samples_per_insert, config.batch_size
        limiter = replay.rate_limiters.SampleToInsertRatio(ratio, size, 2.0 * size * ratio + 512)
        sampler, remover = replay.selectors.Uniform(), replay.selectors.Fifo()
        return [replay.Table(adders.REPLAY_TABLE, sampler, remover, config.max_replay_size, limiter)]

    def make_adder(self, client: ReplayClient, spec: specs.EnvironmentSpec) -> adders.Adder:
        return adders.NStepTransitionAdder(client, 1, 1.0, frame_stack=specs.frame_stack(spec.observations))

    def make_dataset(self, client: ReplayClient) -> Dataset:
        return Dataset(client, adders.REPLAY_TABLE, self.config.batch_size)

    def make_learner(self, networks: RandomNetworks, spec: specs.EnvironmentSpec) -> CountingLearner:
        return CountingLearner()


PRESETS: Mapping[str, Preset] = {
    "gymnasium:CartPole-v1": Preset(run={"max_env_steps": 10_000}),
}
