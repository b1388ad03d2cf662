"""Learners whose steps are functions of arrays: `(state, batch, numbers) -> (state, output, norm)`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import tree

from framework import core
from framework.backends.functions import Functions
from framework.backends.layers import KerasNetworks, as_numpy, floats, using
from framework.learners import LossOutput, schedules
from framework.learners.context import is_due
from framework.parameters import load_state, state_of
from framework.replay import ReplaySample
from framework.types import Nest, StepResult

_BETAS = 0.9, 0.999  # of Adam


class KerasLearner(core.Learner):
    """Minimizes `loss(networks, data, targets)`, one step of Adam per batch.

    A loss or gradient that is not finite raises a FloatingPointError before the parameters change.

    Args:
      networks: the networks, whose arrays are the initial parameters.
      loss: `(networks, data, targets) -> LossOutput`, of arrays of the back end. `data` is a batch's, and
        `targets` has the target networks as functions, by the name of the layer that they follow.
      config: has the settings of `AgentConfig`, and of target networks if there are `target_names`.
      functions: the back end's.
      target_names: layers that have a target network.
      compiles: whether a step runs as a static graph.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        networks: KerasNetworks,
        loss: Callable[[Any, Any, Any], LossOutput],
        config: Any,
        functions: Functions,
        target_names: Sequence[str] = (),
        compiles: bool = True,
    ):
        self._networks, self._loss, self._config, self._functions = networks, loss, config, functions
        self._variables = networks.variables()
        self._trained = [index for index, each in enumerate(self._variables) if each.trainable]
        self._target_names, self._compiles = tuple(target_names), compiles
        decay, end = config.learning_rate_decay, config.learning_rate_end
        self._schedule = schedules.linear_decay(decay, end)
        leaves = networks.leaves()
        zeros = [np.zeros_like(leaves[index]) for index in self._trained]
        targets = networks.leaves(self._target_names) if self._target_names else []
        state = {"values": leaves, "targets": targets, "means": zeros, "squares": zeros}
        self._state = tree.map_structure(functions.array, state)
        self._update = functions.compiled(self._step) if compiles else self._step
        self.steps = self.optimizer_steps = 0

    def step(self, batch: ReplaySample) -> StepResult:
        output, norm, rate = self.minimize(batch.data)
        self.steps += 1
        return self.result(output, norm, rate)

    def result(self, output: LossOutput, norm: Any, rate: float) -> StepResult:
        """The metrics of the loss, `loss`, `gradient_norm` (before clipping) and `learning_rate`."""
        metrics = {**output.metrics, "loss": output.loss, "gradient_norm": norm, "learning_rate": rate}
        priorities: Any = None if output.priorities is None else as_numpy(output.priorities)
        return StepResult(metrics, priorities)

    def minimize(self, data: Nest) -> tuple[LossOutput, Any, float]:
        """One optimizer step on numpy arrays; the loss's output, the gradient's norm, and the rate."""
        config, steps = self._config, self.steps + 1
        rate = config.learning_rate * self._schedule(self.env_steps)
        due = self._target_names and is_due(steps, config.target_update_period, 0)
        numbers = {
            "rate": rate,
            "target_rate": config.target_update_rate if due else 0.0,
            "count": self.optimizer_steps + 1,
        }
        arrays = tree.map_structure(
            self._functions.array, floats((data, tree.map_structure(np.float64, numbers)))
        )
        state, output, norm = self._update(self._state, *arrays)
        if not np.isfinite(float(output.loss) + float(norm)):
            raise FloatingPointError(
                f"Learner step {self.steps}: got loss {float(output.loss)} and gradient norm {float(norm)}, "
                "expected finite numbers. Look for NaN in observations and rewards, then try a smaller "
                "learning rate or max_gradient_norm."
            )
        self._state = state
        self.optimizer_steps += 1
        return output, norm, rate

    def gradient(self, state: Mapping[str, Any], data: Nest) -> tuple[Any, Sequence[Any]]:
        """`((loss, (output, values of the other variables after it)), gradients of the trained ones)`."""

        def loss(trained: Sequence[Any], state: Mapping[str, Any], data: Any) -> Any:
            values = list(state["values"])
            for index, value in zip(self._trained, trained, strict=True):
                values[index] = value
            with using(self._variables, values) as scope:
                output = self._loss(self._networks, data, self._targets(state["targets"]))
                after = [scope.get_current_value(each) for each in self._variables if not each.trainable]
            return output.loss, (output, after)

        trained = [state["values"][index] for index in self._trained]
        return self._functions.gradient(loss)(trained, state, data)

    def _targets(self, values: Sequence[Any]) -> dict[str, Callable[..., Any]]:
        def follow(name: str) -> Callable[..., Any]:
            def call(*inputs: Any) -> Any:
                with using(self._networks.variables(self._target_names), values):
                    return self._networks.layers[name](*inputs)

            return call

        return {name: follow(name) for name in self._target_names}

    def _step(
        self, state: Mapping[str, Any], data: Nest, numbers: Mapping[str, Any]
    ) -> tuple[Any, LossOutput, Any]:
        """Loss, gradient, clipping, Adam (Kingma and Ba, 2015, algorithm 1), and target networks."""
        from keras import ops

        config, (beta1, beta2), count = self._config, _BETAS, numbers["count"]
        (_, (output, others)), gradients = self.gradient(state, data)
        norm = ops.sqrt(sum(ops.sum(ops.square(each)) for each in gradients))
        if (limit := config.max_gradient_norm) is not None:
            scale = ops.minimum(limit / (norm + 1e-6), 1.0)
            gradients = [each * scale for each in gradients]
        means = [beta1 * m + (1 - beta1) * g for m, g in zip(state["means"], gradients, strict=True)]
        squares = [
            beta2 * s + (1 - beta2) * ops.square(g) for s, g in zip(state["squares"], gradients, strict=True)
        ]
        rate, root = numbers["rate"] / (1 - beta1**count), ops.sqrt(1 - beta2**count)
        left, values = iter(others), list(state["values"])
        for index, variable in enumerate(self._variables):
            if not variable.trainable:
                values[index] = next(left)
        for index, mean, square in zip(self._trained, means, squares, strict=True):
            values[index] = values[index] - rate * mean / (ops.sqrt(square) / root + config.adam_epsilon)
        targets, moved = state["targets"], numbers["target_rate"]
        if self._target_names:
            online = dict(zip(map(id, self._variables), values, strict=True))
            followed = [online[id(each)] for each in self._networks.variables(self._target_names)]
            targets = [moved * new + (1 - moved) * old for new, old in zip(followed, targets, strict=True)]
        return {"values": values, "targets": targets, "means": means, "squares": squares}, output, norm

    def parameters(self) -> dict[str, dict[str, np.ndarray]]:
        return self._networks.named(list(self._networks), self._state["values"])

    def save(self) -> dict[str, Any]:
        names = self._target_names
        state = {
            "networks": state_of(self.parameters()),
            "targets": state_of(self._networks.named(names, self._state["targets"])) if names else {},
            "optimizer": {name: list(map(as_numpy, self._state[name])) for name in ("means", "squares")},
            "optimizer_steps": self.optimizer_steps,
            "steps": self.steps,
            "env_steps": self.env_steps,
        }
        return copy.deepcopy(state)

    def restore(self, state: dict[str, Any]) -> None:
        load_state(self._networks, state["networks"])
        names, saved = self._target_names, state["targets"]
        targets = {name: {key: saved[f"{name}.{key}"] for key in self._networks[name]} for name in names}
        named = {
            "values": self._networks.leaves(),
            "targets": self._networks.leaves(names, targets) if names else [],
            **state["optimizer"],
        }
        for name, own in self._state.items():
            if [leaf.shape for leaf in named[name]] != [tuple(leaf.shape) for leaf in own]:
                raise ValueError(f"{name}: got other shapes than this learner's. Restore its own state.")
        self._state = tree.map_structure(self._functions.array, named)
        self.optimizer_steps, self.steps = int(state["optimizer_steps"]), int(state["steps"])
        self.env_steps = int(state["env_steps"])


class KerasMinibatchLearner(KerasLearner):
    """One step is `config.epochs` passes over one batch, in shuffled minibatches; see `MinibatchLearner`.

    All rows are in minibatches, so that a static graph has one size or two: the loss has to leave masked rows
    out. Metrics of the loss are the last minibatch's.

    Args:
      outputs: `(networks, observation [M, ...])` to a nest of arrays of the back end, `[M, K]`.
      prepare: a batch's data and these outputs, numpy arrays `[N, T, ...]`, to rows `[M, ...]` and metrics.
      seed: seed of the order of rows.
      arguments: as `KerasLearner`'s.
    """

    def __init__(
        self,
        *arguments: Any,
        outputs: Callable[[Any, Any], Nest],
        prepare: Callable[[Any, Nest], tuple[Nest, dict[str, Any]]],
        seed: int,
        **options: Any,
    ):
        super().__init__(*arguments, **options)

        def run(values: Sequence[Any], observation: Any) -> Nest:
            with using(self._variables, values):
                return outputs(self._networks, observation)

        self._outputs = self._functions.compiled(run) if self._compiles else run
        self._prepare, self._random = prepare, np.random.default_rng(seed)

    def step(self, batch: ReplaySample) -> StepResult:
        data = tree.map_structure(np.asarray, batch.data)
        flat = floats(tree.map_structure(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), data.observation))
        outputs = self._outputs(self._state["values"], tree.map_structure(self._functions.array, flat))
        shaped = tree.map_structure(lambda leaf: as_numpy(leaf).reshape(*data.reward.shape, -1), outputs)
        rows, metrics = self._prepare(data, shaped)
        count, size = len(tree.flatten(rows)[0]), self._config.minibatch_size
        for _ in range(self._config.epochs):
            order = np.arange(count) if size is None else self._random.permutation(count)
            for part in np.array_split(order, 1 if size is None else max(1, round(count / size))):
                output, norm, rate = self.minimize(tree.map_structure(lambda leaf: leaf[part], rows))  # noqa: B023
        self.steps += 1
        return self.result(output._replace(metrics={**metrics, **output.metrics}), norm, rate)

    def save(self) -> dict[str, Any]:
        return {**super().save(), "random": dict(self._random.bit_generator.state)}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._random.bit_generator.state = state["random"]
