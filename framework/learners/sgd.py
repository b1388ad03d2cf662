"""The learner of gradient-based agents: a loss function, an optimizer and target networks."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import tree
from torch import nn

from framework import core
from framework.config_checks import whole_number
from framework.devices import restore_generator
from framework.learners.distributed import LearnerGroup
from framework.losses import importance_weights
from framework.replay.types import ReplaySample, SampleInfo
from framework.types import Gradients, StepResult

# Up to this number of elements, one copy of all gradients is faster than one operation per gradient.
_SMALL = 1 << 16


class LossOutput(NamedTuple):
    """The result of a loss function.

    Attributes:
      loss: scalar to minimize.
      metrics: name to scalar tensor, for the logs. They stay on the device until a row is logged.
      priorities: `[N]` new priorities of the items of the batch, or None.
      weight: number of elements of which the loss is the mean, if it may differ between the shards of several
        learners. None if it is equal for all of them.
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]
    priorities: torch.Tensor | None = None
    weight: torch.Tensor | None = None


class LossContext(NamedTuple):
    """Inputs of a loss function in addition to the networks and the batch.

    Counts are 0-d int64 tensors on the CPU: they work in arithmetic with tensors on any device, reading them
    does not synchronize a device, and a compiled loss is not compiled again when they change.

    Attributes:
      targets: the target networks, by the name of the child that they follow.
      learner_steps: number of learner steps before this one.
      env_steps: env steps of the program so far, for schedules.
      generator: random generator on the learner's device; part of the checkpoint. It is equal in all
        learners, so use `normal_like` and `uniform_like` for numbers that differ between items.
      wants_metrics: whether the metrics of this loss are logged. If not, the loss may omit them.
      group: the group of learners that share the batch; None with one learner.
    """

    targets: nn.ModuleDict
    learner_steps: torch.Tensor
    env_steps: torch.Tensor
    generator: torch.Generator
    wants_metrics: bool = True
    group: LearnerGroup | None = None

    @property
    def total(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """A function that sums a tensor over all learners, which must all call it; None with one learner."""
        return None if self.group is None else self.group.total

    @property
    def largest(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """A function for the elementwise maximum over all learners, which must all call it; None with one."""
        return None if self.group is None else self.group.largest

    def is_due(self, period: int) -> bool:
        """Whether this step is the last one of `period` learner steps, as those that move the targets are."""
        return period == 1 or (int(self.learner_steps) + 1) % period == 0

    def normal_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Standard normals of the shape `[N, ...]`, dtype and device of `tensor`, whose rows are items.

        Each of several learners draws the noise of the whole batch and takes its shard, so that together they
        use the noise of a single learner.
        """
        return self._shard(self._whole_like(tensor).normal_(generator=self.generator))

    def uniform_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Uniform numbers in [0, 1) for items; otherwise like `normal_like`."""
        return self._shard(self._whole_like(tensor).uniform_(generator=self.generator))

    def _whole_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """An empty tensor for the items of all learners, where `tensor` is for this one's."""
        if self.group is None:
            return torch.empty_like(tensor)
        return tensor.new_empty((self.group.size * len(tensor), *tensor.shape[1:]))

    def _shard(self, whole: torch.Tensor) -> torch.Tensor:
        """The rows of this learner."""
        if self.group is None:
            return whole
        rank, count = self.group.rank, len(whole) // self.group.size
        return whole[rank * count : (rank + 1) * count]

    def importance_weights(self, info: SampleInfo, exponent: torch.Tensor | float) -> torch.Tensor:
        """`losses.importance_weights` of the items of a batch, float32`[N]` on the learner's device."""
        probability, size = (
            torch.as_tensor(each, device=self.generator.device)
            for each in (info.probability, info.table_size)
        )
        return importance_weights(probability, size, exponent, self.largest)


# Networks, batch, context. The batch is a `ReplaySample`, or a minibatch of one.
LossFn = Callable[[Any, Any, LossContext], LossOutput]


class SGDLearner(core.Learner):
    """Minimizes `loss_fn(networks, batch, context)`, one optimizer step per batch.

    A loss or gradient that is not finite raises a FloatingPointError with the step and the metrics. On the
    CPU the error comes before the parameters change. On a GPU the check would stall the device, so it runs in
    the next `parameters` or `save`, or after `check_period` steps: bad parameters are never published or
    saved.

    Args:
      networks: module with all parameters, moved to `device`. Each child is a variable of that name.
      loss_fn: `(networks, batch, context) -> LossOutput`. The batch is the argument of `step`.
      optimizer_fn: parameters to optimizer, such as `functools.partial(Adam, lr=1e-3)`.
      learning_rate_schedule: env steps of the program to a factor on the optimizer's learning rates.
      max_gradient_norm: larger global gradient norms are scaled down to this. None does not clip.
      target_names: children of `networks` that have a target network.
      target_update_period: learner steps between two updates of the target networks.
      target_update_rate: step size of an update: 1 copies (DQN), less averages (Polyak; SAC's 0.005).
      device: "cpu", "cuda", "cuda:1" …
      seed: seed of `context.generator`.
      autocast_dtype: mixed precision of the loss: `torch.bfloat16`. None: the precision of the parameters.
      compile_loss: compiles the loss function with `torch.compile`. The first steps are slow.
      check_period: steps between checks for non-finite values on a GPU.
      partial_gradients: whether the loss leaves out some parameters at some steps; for several learners.

    Raises:
      ValueError: A setting has an invalid value. The text names it.
      KeyError: `target_names` has a name that is not a child of `networks`.
    """

    def __init__(
        self,
        networks: nn.Module,
        loss_fn: LossFn,
        optimizer_fn: Callable[[Any], torch.optim.Optimizer],
        *,
        learning_rate_schedule: Callable[[int], float] | None = None,
        max_gradient_norm: float | None = None,
        target_names: Sequence[str] = (),
        target_update_period: int = 1,
        target_update_rate: float = 1.0,
        device: str | torch.device = "cpu",
        seed: int = 0,
        autocast_dtype: torch.dtype | None = None,
        compile_loss: bool = False,
        check_period: int = 100,
        partial_gradients: bool = False,
    ):
        if not 0.0 < target_update_rate <= 1.0:
            raise ValueError(
                f"target_update_rate: got {target_update_rate}, expected more than 0, at most 1."
            )
        if max_gradient_norm is not None and not max_gradient_norm > 0:
            raise ValueError(f"max_gradient_norm: got {max_gradient_norm}, expected more than 0, or None.")
        self.device = torch.device(device)
        if autocast_dtype not in (None, torch.bfloat16):
            raise ValueError(f"autocast_dtype: got {autocast_dtype}, expected torch.bfloat16 or None.")
        self.networks = networks.to(self.device)
        children = dict(networks.named_children())
        unknown = sorted(set(target_names) - set(children))
        if unknown:
            raise KeyError(f"target_names: got {unknown}, expected children of networks: {sorted(children)}.")
        self.targets = nn.ModuleDict({name: copy.deepcopy(children[name]) for name in target_names})
        self.targets.requires_grad_(False)
        followed = nn.ModuleDict({name: children[name] for name in target_names})
        self._online: list[torch.Tensor] = list(followed.parameters())
        self._target: list[torch.Tensor] = list(self.targets.parameters())
        self._buffers = list(zip(self.targets.buffers(), followed.buffers(), strict=True))
        self._target_update_period = whole_number("target_update_period", target_update_period, 1)
        self._target_update_rate = target_update_rate

        self._parameters = [p for p in networks.parameters() if p.requires_grad]
        self._small = sum(p.numel() for p in self._parameters) <= _SMALL
        self.optimizer = optimizer_fn(self._parameters)
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        if left := [name for name, p in networks.named_parameters() if p.requires_grad and id(p) not in held]:
            raise ValueError(
                f"optimizer: got one without {', '.join(left)}. Add them in make_optimizer, or give them "
                "requires_grad=False."
            )
        self._optimizer_settings = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        self._schedule, self._max_gradient_norm = learning_rate_schedule, max_gradient_norm
        self._precision: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        if autocast_dtype is not None:
            self._precision = functools.partial(torch.autocast, self.device.type, dtype=autocast_dtype)
        self._loss_fn = self._own_loss_fn = torch.compile(loss_fn) if compile_loss else loss_fn
        self._partial_gradients = partial_gradients
        self._check_period = check_period
        self._unchecked: list[tuple[int, torch.Tensor]] = []

        self.steps = 0
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self._group: LearnerGroup | None = None

    def step(self, batch: ReplaySample) -> StepResult:
        """One optimizer step on `batch`, whose data are tensors on the learner's device.

        Metrics are the loss function's, `loss`, `gradient_norm` (before clipping) and `learning_rate`.
        They stay on the device, so that a step does not synchronize. Priorities are copied to the CPU.
        """
        self._set_learning_rate()
        return self._finish_step(*self._minimize(batch, self._context()))

    def gradients(self, batch: ReplaySample) -> Gradients:
        """The gradients of the loss on `batch`. Changes no parameters."""
        output = self._backward(batch, self._context())
        values = [() if p.grad is None else p.grad for p in self._parameters]
        metrics = {name: value.detach() for name, value in output.metrics.items()}
        return Gradients(values, output.loss.detach(), metrics, torch.tensor(self.steps))

    def apply(self, gradients: Gradients) -> StepResult:
        """One optimizer step with the gradients of another learner's batch, on this learner's device.

        Metrics are `step`'s, and `gradient_age`: the learner steps since the gradients' parameters.
        """
        for parameter, value in zip(self._parameters, gradients.values, strict=True):
            parameter.grad = value if isinstance(value, torch.Tensor) else None
        self._set_learning_rate()
        age = self.steps - gradients.learner_steps
        output = LossOutput(gradients.loss, {**gradients.metrics, "gradient_age": age})
        return self._finish_step(output, self._descend(output))

    def _set_learning_rate(self) -> None:
        if self._schedule is not None:
            factor = self._schedule(self.env_steps)
            for group, settings in zip(self.optimizer.param_groups, self._optimizer_settings, strict=True):
                group["lr"] = settings["lr"] * factor

    def _context(self) -> LossContext:
        steps, env_steps = torch.tensor(self.steps), torch.tensor(self.env_steps)
        return LossContext(self.targets, steps, env_steps, self._generator, group=self._group)

    def _finish_step(self, output: LossOutput, norm: torch.Tensor) -> StepResult:
        """Counts the step, moves the target networks, and returns the result."""
        self.steps += 1
        if self._target and self.steps % self._target_update_period == 0:
            with torch.no_grad():
                if self._target_update_rate == 1.0:
                    torch._foreach_copy_(self._target, self._online)
                else:
                    torch._foreach_lerp_(self._target, self._online, self._target_update_rate)
                for target, online in self._buffers:
                    target.copy_(online)
        metrics = {name: value.detach() for name, value in output.metrics.items()}
        metrics["loss"], metrics["gradient_norm"] = output.loss.detach(), norm
        metrics["learning_rate"] = torch.tensor(self.optimizer.param_groups[0]["lr"])
        # Replay takes priorities on the host, so the caller would have to wait for them anyway.
        priorities = None if output.priorities is None else output.priorities.detach().cpu()
        return StepResult(metrics, priorities)

    def _minimize(self, batch: Any, context: LossContext) -> tuple[LossOutput, torch.Tensor]:
        """One optimizer step on `batch`. Returns the loss output, and the gradient's norm before clipping."""
        output = self._backward(batch, context)
        return output, self._descend(output)

    def _backward(self, batch: Any, context: LossContext) -> LossOutput:
        """Computes the loss and its gradients."""
        with self._precision():
            output = self._loss_fn(self.networks, batch, context)
        for parameter in self._parameters:
            parameter.grad = None  # As optimizer.zero_grad, without its hooks for profilers.
        output.loss.backward()
        return output

    def _descend(self, output: LossOutput) -> torch.Tensor:
        """One optimizer step with the gradients. Returns their norm before clipping."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        # As nn.utils.get_total_norm, for tensors on one device.
        if not gradients:
            norm = torch.zeros(())
        elif self._small:  # One copy costs less than one call per gradient.
            norm = torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients]))
        else:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        limit = self._max_gradient_norm
        if self.device.type == "cpu":
            length = norm.item()
            if not math.isfinite(length + output.loss.item()):
                self._raise_unsound(self.steps, output.metrics)
            # Most gradients need no clipping. On a GPU this check would synchronize, so always multiply
            # there.
            if limit is not None and length + 1e-6 > limit:
                # A tensor, because torch would convert a Python number to a tensor for each gradient.
                torch._foreach_mul_(gradients, torch.tensor(limit / (length + 1e-6)))
        else:
            self._unchecked.append((self.steps, (output.loss + norm).detach()))
            if len(self._unchecked) >= self._check_period:
                self._check()
            if limit is not None and gradients:
                # As nn.utils.clip_grads_with_norm_, for tensors on one device.
                torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        return norm

    def parameters(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors of each child of the networks. Raises FloatingPointError after a non-finite step."""
        if self._unchecked:
            self._check()
        return {name: child.state_dict() for name, child in self.networks.named_children()}

    def save(self) -> dict[str, Any]:
        """The complete state of the learner, as tensors on the CPU and plain Python values."""
        if self._unchecked:
            self._check()
        state: dict[str, Any] = {
            "networks": self.networks.state_dict(),
            "targets": self.targets.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_kind": type(self.optimizer).__name__,
            "generator": self._generator.get_state(),
            "steps": self.steps,
            "env_steps": self.env_steps,
        }
        return tree.map_structure(
            lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf, state
        )

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from the state. Learning rates and the like stay as this learner's optimizer has them.

        Raises:
          ValueError: Another kind of optimizer saved the state.
        """
        kind = type(self.optimizer).__name__
        if (saved := state["optimizer_kind"]) != kind:
            raise ValueError(f"optimizer: got the state of {saved}, expected {kind}'s.")
        self.networks.load_state_dict(state["networks"])
        self.targets.load_state_dict(state["targets"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        for group, settings in zip(self.optimizer.param_groups, self._optimizer_settings, strict=True):
            group.update(settings)
        restore_generator(self._generator, state["generator"])
        self.steps, self.env_steps = int(state["steps"]), int(state["env_steps"])
        self._unchecked.clear()

    def distribute(self, group: LearnerGroup) -> None:
        """Averages the gradient of each later step with the other learners' of `group`.

        All learners must have the same state and make the same steps, each on its shard of the batch and with
        the same `env_steps`. The loss must be a mean over items, so that the mean over the shards is that
        over the batch. Where shards differ in the number of elements, `LossOutput.weight` gives that number.
        Buffers of the networks (statistics of data) are rank 0's. A later call replaces the group.
        """
        self._group = group
        self._loss_fn = group.averaged(self.networks, self._own_loss_fn, self._partial_gradients)

    def _check(self) -> None:
        """Raises FloatingPointError if a step since the last check was not finite."""
        sound = torch.stack([value for _, value in self._unchecked]).isfinite().tolist()
        if not all(sound):
            # The steps stay unchecked, so that nothing is published or saved after the error, either.
            self._raise_unsound(self._unchecked[sound.index(False)][0], {})
        self._unchecked.clear()

    def _raise_unsound(self, step: int, metrics: dict[str, torch.Tensor]) -> None:
        seen = ", ".join(f"{name}={float(value.detach()):.6g}" for name, value in metrics.items())
        seen = f" ({seen})" if seen else ""
        raise FloatingPointError(
            f"Learner step {step}: the loss or its gradient is not finite{seen}. Look for NaN in "
            "observations and rewards, then try a smaller learning rate or max_gradient_norm."
        )
