"""Agents whose networks are Keras layers and whose losses are `keras.ops`, on torch, TensorFlow or JAX.

An agent is a config, layers, a policy and a loss, as in `framework.torch_agents`. It inherits the rest from
`OffPolicyAgent` or `OnPolicyAgent`:

```python
class MyAgent(KerasAgent, OffPolicyAgent):
    def make_layers(self, spec): ...                # the name of each variable to a built layer
    def make_policy(self, networks, evaluation=False): ...
    def loss(self, networks, data, targets): ...    # `self.ops` of arrays to a `LossOutput`
```

Batches, parameters and states are numpy arrays: nothing outside of this package knows the back end. A learner
step is one function of arrays, `(state, batch, numbers) -> (state, output)`, which runs as written or as a
static graph.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import tree
from typing_extensions import Self

from framework import config_checks as check
from framework import core, specs
from framework.agent_configs import AgentConfig
from framework.backends.functions import BACKENDS, Functions, load
from framework.backends.keras_learners import KerasLearner as KerasLearner
from framework.backends.keras_learners import KerasMinibatchLearner as KerasMinibatchLearner
from framework.backends.layers import KerasNetworks as KerasNetworks
from framework.backends.layers import as_numpy, floats, using
from framework.backends.layers import mlp as mlp
from framework.networks import check_action_mask
from framework.torch_agents import TorchAgent
from framework.types import Nest, Progress

_ONLY = {
    "device": "cpu",
    "devices": {},
    "autocast": False,
    "inputs": (),
    "normalize_observations": False,
}


@dataclasses.dataclass(frozen=True)
class KerasConfig(AgentConfig):
    """Settings of agents on Keras, which compute on the CPU in Keras's `floatx`."""

    backend: str = "torch"  # What Keras computes with: torch, tensorflow or jax.
    # How functions run: eager (as written, Keras's run_eagerly), compile (torch.compile, tf.function,
    # jax.jit), or auto: compile on tensorflow and jax, and on torch if the run is long enough for it to pay.
    step_mode: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of(self, BACKENDS, "backend")
        check.one_of(self, ("auto", "compile", "eager"), "step_mode")
        for field, only in _ONLY.items():
            if getattr(self, field, only) != only:
                check.refuse(self, field, f", expected {only!r}: agents on Keras know nothing else.")


class KerasPolicy(core.Policy):
    """A policy whose outputs are a function of layers, and whose choices are numpy's.

    Args:
      networks: the networks.
      names: the variables that `outputs` uses.
      outputs: a batch of observations `[B, ...]` as an array of the back end to a nest of arrays `[B, ...]`.
      functions: the back end's.
      compiles: whether `outputs` runs as a static graph.

    Attributes:
      outputs: as given.
    """

    def __init__(
        self,
        networks: KerasNetworks,
        names: tuple[str, ...],
        outputs: Callable[[Any], Nest],
        functions: Functions,
        compiles: bool,
    ):
        self.networks, self.variables, self._functions = networks, names, functions
        self.outputs = outputs
        self.random = np.random.default_rng(0)
        variables = networks.variables(names)

        def run(values: Sequence[Any], observation: Any) -> Nest:
            with using(variables, values):
                return outputs(observation)

        self._run = functions.compiled(run) if compiles and functions.compiles_policies else run
        self.loaded(Progress())

    @abc.abstractmethod
    def choose(self, outputs: Nest) -> tuple[np.ndarray, Nest]:
        """Actions `[B]` and extras for the outputs, which are numpy arrays."""

    def loaded(self, progress: Progress) -> None:
        super().loaded(progress)
        self._values = [self._functions.array(leaf) for leaf in self.networks.leaves(self.variables)]

    def initial_state(self, batch_size: int) -> Nest:
        return ()

    def step(self, observation: Nest, state: Nest) -> tuple[Nest, Nest, Nest]:
        outputs = self._run(self._values, tree.map_structure(self._functions.array, floats(observation)))
        action, extras = self.choose(tree.map_structure(as_numpy, outputs))
        return action.astype(self.networks.spec.actions.dtype), extras, state

    def seed(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def save(self) -> dict[str, Any]:
        return dict(self.random.bit_generator.state)

    def restore(self, state: dict[str, Any]) -> None:
        self.random.bit_generator.state = state


class KerasAgent(TorchAgent):
    """Common base of agents on Keras, before `OffPolicyAgent` or `OnPolicyAgent` among the base classes.

    `networks_fn` makes `{name: layer}` in place of `make_layers`. A process uses one back end.
    """

    config: Any
    target_names: tuple[str, ...] = ()

    @abc.abstractmethod
    def make_layers(self, spec: specs.EnvironmentSpec) -> Mapping[str, Any]:
        """The name of each variable to a built Keras layer or model."""

    @property
    def functions(self) -> Functions:
        """The functions of the back end, with which this process imports Keras."""
        return load(self.config.backend)

    @property
    def ops(self) -> Any:
        """`keras.ops`, for the loss."""
        from keras import ops

        return ops

    @property
    def compiles(self) -> bool:
        return self.config.step_mode == "compile" or (
            self.config.step_mode == "auto" and self.config.backend != "torch"
        )

    def make_networks(self, spec: specs.EnvironmentSpec) -> KerasNetworks:
        check_action_mask(spec, type(self).__name__, self.takes_action_masks)
        specs.check_sizes(spec)
        self.functions  # noqa: B018
        with _seeded_by_torch():
            made = self.make_layers(spec) if self.networks_fn is None else self.networks_fn(self.config, spec)
            return KerasNetworks(made, spec)

    def make_learner(self, networks: Any, spec: specs.EnvironmentSpec) -> core.Learner:
        return KerasLearner(
            networks, self.loss, self.config, self.functions, self.target_names, self.compiles
        )

    def describe_inputs(self, spec: specs.EnvironmentSpec) -> list[str]:
        return []

    def check_shards(self) -> None:
        core.Agent.check_shards(self)

    def decided(self, config: Any, recorded: Mapping[str, Any]) -> tuple[Self, list[str]]:
        if self.config.step_mode == "auto" and self.config.backend != "torch":
            agent = copy.copy(self)
            agent.config = dataclasses.replace(self.config, step_mode="compile")
            return agent, [f"step_mode auto: compile, on {self.config.backend}"]
        return super().decided(config, recorded)


@contextlib.contextmanager
def _seeded_by_torch() -> Iterator[None]:
    """Keras seeds initial values with Python's generator; torch's, which programs seed, seeds that here."""
    before = random.getstate()
    random.seed(int(torch.randint(2**31, (), device="cpu")))
    try:
        yield
    finally:
        random.setstate(before)
