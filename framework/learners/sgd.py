"""The learner of gradient-based agents: a loss function, an optimizer and target networks."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import tree
from torch import nn

from framework import core
from framework.config_checks import flat_names, whole_number
from framework.devices import restore_generator
from framework.learners.context import LossContext, LossFn, LossOutput, is_due
from framework.learners.cuda_graphs import CapturedGradient
from framework.learners.device_map import place
from framework.learners.distributed import LearnerGroup
from framework.learners.gradient import STEP_MODES, CompiledGradient, LossGradient, why_not
from framework.networks.constraints import Constrained
from framework.own_settings import OwnSettings, in_own_settings
from framework.parameters import arrays_of
from framework.replay.types import ReplaySample
from framework.types import Gradients, StepResult


class SGDLearner(core.Learner):
    """Minimizes `loss_fn(networks, batch, context)`, one optimizer step per batch.

    A loss or gradient that is not finite raises a FloatingPointError with the step and the metrics. On the
    CPU the error comes before the parameters change. On a GPU the check would stall the device, so it runs in
    the next `parameters` or `save`, after `check_period` steps, or with priorities that are not finite: bad
    parameters are never published or saved.

    Args:
      networks: module with all parameters, moved to `device`. Each child is a variable of that name. After
        each optimizer step, its `networks.Constrained` modules restore their constraints.
      loss_fn: `(networks, batch, context) -> LossOutput`. The batch is the argument of `step`.
      optimizer_fn: parameters to optimizer, such as `functools.partial(Adam, lr=1e-3)`.
      learning_rate_schedule: env steps of the program to a factor on the optimizer's learning rates.
      max_gradient_norm: larger global gradient norms are scaled down to this. None does not clip.
      target_names: children of `networks` that have a target network.
      target_update_period: learner steps between two updates of the target networks.
      target_update_rate: step size of an update: 1 copies (DQN), less averages (Polyak; SAC's 0.005).
      device: "cpu", "cuda", "cuda:1" …
      devices: parts of `networks` on other devices, by the beginnings of their names; see `device_map`.
        Metrics then have `crossed_bytes`. Needs step_mode "eager".
      seed: seed of `context.generator`.
      autocast_dtype: mixed precision of the loss: `torch.bfloat16`. None: the precision of the parameters.
      step_mode: how the loss, its gradients and their norm are computed. "eager": as they are written;
        "compile": as one function by `torch.compile`, whose first steps take a minute; "cuda_graph": as a
        captured graph of a GPU. The results are equal up to rounding. Several learners use "eager".
      check_period: steps between checks for non-finite values on a GPU.
      partial_gradients: whether the loss leaves out some parameters at some steps; for several learners.

    Raises:
      ValueError: A setting has an invalid value. The text names it.
      KeyError: `target_names` has a name that is not a child of `networks`.
    """

    fixed_sizes: ClassVar[bool] = True  # Whether all batches of the loss function have the same sizes.
    settings = OwnSettings()

    @in_own_settings
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
        devices: Mapping[str, Any] | None = None,
        seed: int = 0,
        autocast_dtype: torch.dtype | None = None,
        step_mode: str = "eager",
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
        if step_mode not in STEP_MODES:
            raise ValueError(f"step_mode: got {step_mode!r}, expected one of {', '.join(STEP_MODES)}.")
        if reason := why_not(step_mode, self.device, devices):
            raise ValueError(f"step_mode: got {step_mode!r} {reason}")
        if autocast_dtype not in (None, torch.bfloat16):
            raise ValueError(f"autocast_dtype: got {autocast_dtype}, expected torch.bfloat16 or None.")
        self.networks = networks.to(self.device)
        self._crossings = place(networks, self.device, devices) if devices else None
        self.settings = OwnSettings(networks.parameters())
        children = dict(networks.named_children())
        unknown = sorted(set(target_names) - set(children))
        if unknown:
            raise KeyError(f"target_names: got {unknown}, expected children of networks: {sorted(children)}.")
        followed = nn.ModuleDict({name: children[name] for name in target_names})
        self.targets = copy.deepcopy(followed)  # What children share, their targets share.
        self.targets.requires_grad_(False)
        self._online: list[torch.Tensor] = list(followed.parameters())
        self._target: list[torch.Tensor] = list(self.targets.parameters())
        self._buffers = list(zip(self.targets.buffers(), followed.buffers(), strict=True))
        self._target_update_period = whole_number("target_update_period", target_update_period, 1)
        self._target_update_rate = target_update_rate

        self._parameters = [p for p in networks.parameters() if p.requires_grad]
        self.optimizer = optimizer_fn(self._parameters)
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        if left := [name for name, p in networks.named_parameters() if p.requires_grad and id(p) not in held]:
            raise ValueError(
                f"optimizer: got one without {', '.join(left)}. Add them in make_optimizer, or give them "
                "requires_grad=False."
            )
        self._constrained = [module for module in networks.modules() if isinstance(module, Constrained)]
        self._optimizer_settings = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        self._schedule, self._max_gradient_norm = learning_rate_schedule, max_gradient_norm
        precision: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        if autocast_dtype is not None:
            kinds = {torch.device(each).type for each in (self.device, *flat_names(devices or {}).values())}
            precision = functools.partial(_autocast, sorted(kinds), autocast_dtype)
        self._loss_fn = loss_fn
        norm_device = None if self._crossings is None else self.device
        self._eager = LossGradient(networks, self._parameters, loss_fn, precision, norm_device)
        self._gradient = self._make_gradient(step_mode)
        self._partial_gradients = partial_gradients
        self._check_period = check_period
        self._unchecked: list[tuple[int, torch.Tensor]] = []

        self.steps = 0
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self._group: LearnerGroup | None = None

    @in_own_settings
    def step(self, batch: ReplaySample) -> StepResult:
        """One optimizer step on `batch`, whose data are tensors on the learner's device.

        Metrics are the loss function's, `loss`, `gradient_norm` (before clipping) and `learning_rate`.
        They stay on the device, so that a step does not synchronize. Priorities are copied to the CPU.
        """
        self._set_learning_rate()
        return self._finish_step(*self._minimize(batch, self._context()))

    @in_own_settings
    def gradients(self, batch: ReplaySample) -> Gradients:
        """The gradients of the loss on `batch`. Changes no parameters."""
        output, gradients, _ = self._gradient(batch, self._context())
        if isinstance(self._gradient, CapturedGradient):  # The next call would change them.
            gradients = [None if gradient is None else gradient.clone() for gradient in gradients]
        values = [() if gradient is None else gradient for gradient in gradients]
        return Gradients(values, output.loss, output.metrics, torch.tensor(self.steps))

    @in_own_settings
    def apply(self, gradients: Gradients) -> StepResult:
        """One optimizer step with the gradients of another learner's batch, on this learner's device.

        Metrics are `step`'s, and `gradient_age`: the learner steps since the gradients' parameters.
        """
        values = [
            value.to(parameter.device) if isinstance(value, torch.Tensor) else None
            for value, parameter in zip(gradients.values, self._parameters, strict=True)
        ]
        norm = self._eager.norm([value for value in values if value is not None])
        self._set_learning_rate()
        age = self.steps - gradients.learner_steps
        output = LossOutput(gradients.loss, {**gradients.metrics, "gradient_age": age})
        self._descend(output, values, norm)
        return self._finish_step(output, norm)

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
        if self._target and is_due(self.steps, self._target_update_period, 0):
            with torch.no_grad():
                if self._target_update_rate == 1.0:
                    torch._foreach_copy_(self._target, self._online)
                else:
                    torch._foreach_lerp_(self._target, self._online, self._target_update_rate)
                for target, online in self._buffers:
                    target.copy_(online)
        metrics = {**output.metrics, "loss": output.loss, "gradient_norm": norm}
        metrics["learning_rate"] = torch.tensor(self.optimizer.param_groups[0]["lr"])
        if self._crossings is not None:
            metrics["crossed_bytes"] = torch.tensor(self._crossings.crossed)
            self._crossings.crossed = 0
        # Replay takes priorities on the host, so the caller would have to wait for them anyway.
        priorities = None if output.priorities is None else output.priorities.cpu()
        if self._unchecked and priorities is not None and not priorities.isfinite().all():
            self._check()  # Replay would refuse them without the reason.
        return StepResult(metrics, priorities)

    def _minimize(self, batch: Any, context: LossContext) -> tuple[LossOutput, torch.Tensor]:
        """One optimizer step on `batch`. Returns the loss output, and the gradient's norm before clipping."""
        output, gradients, norm = self._gradient(batch, context)
        self._descend(output, gradients, norm)
        return output, norm

    def _make_gradient(self, step_mode: str) -> Callable[..., Any]:
        """The gradient in this mode."""
        if step_mode == "compile":
            return CompiledGradient(self._eager, self.fixed_sizes)
        if step_mode == "cuda_graph":
            return CapturedGradient(self._eager)
        return self._eager

    def _descend(self, output: LossOutput, values: Sequence[torch.Tensor | None], norm: torch.Tensor) -> None:
        """One optimizer step with the gradients `values`, whose norm is given."""
        limit, scale = self._max_gradient_norm, None
        if self.device.type == "cpu":
            length = norm.item()
            if not math.isfinite(length + output.loss.item()):
                # The loss may have added what is not a number to statistics.
                if any(
                    buffer.isnan().any() for buffer in (*self.networks.buffers(), *self.targets.buffers())
                ):
                    self._unchecked.append((self.steps, norm * math.nan))
                self._raise_unsound(self.steps, output.metrics)
            # Most gradients need no clipping. On a GPU this check would synchronize, so always multiply
            # there.
            if limit is not None and length + 1e-6 > limit:
                # A tensor, because torch would convert a Python number to a tensor for each gradient.
                scale = torch.tensor(limit / (length + 1e-6))
        else:
            self._unchecked.append((self.steps, output.loss + norm))
            if len(self._unchecked) >= self._check_period:
                self._check()
            if limit is not None:  # nn.utils.clip_grads_with_norm_ does the same on any devices.
                scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        gradients: Any = [value for value in values if value is not None]
        if scale is not None and gradients:
            # Two parameters with equal gradients, such as an LSTM's biases, may share a compiled one.
            if self._crossings is None:
                gradients = torch._foreach_mul(gradients, scale)
            else:
                gradients = [gradient * scale.to(gradient.device) for gradient in gradients]
        scaled = iter(gradients)
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.grad = None if value is None else next(scaled)
        self.optimizer.step()
        with torch.no_grad():
            for module in self._constrained:
                module.constrain()

    def parameters(self) -> dict[str, dict[str, np.ndarray]]:
        """The arrays of each child of the networks. Raises FloatingPointError after a non-finite step."""
        if self._unchecked:
            self._check()
        return arrays_of({name: child.state_dict() for name, child in self.networks.named_children()})

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
        self._eager.loss_fn = group.averaged(self.networks, self._loss_fn, self._partial_gradients)
        self._gradient = self._eager

    def _check(self) -> None:
        """Raises FloatingPointError if a step since the last check was not finite."""
        # A loss may have the shape [1].
        sound = torch.stack([value.squeeze() for _, value in self._unchecked]).isfinite().tolist()
        if not all(sound):
            # The steps stay unchecked, so that nothing is published or saved after the error, either.
            self._raise_unsound(self._unchecked[sound.index(False)][0], {})
        self._unchecked.clear()

    def _raise_unsound(self, step: int, metrics: dict[str, torch.Tensor]) -> None:
        seen = ", ".join(f"{name}={float(value):.6g}" for name, value in metrics.items())
        seen = f" ({seen})" if seen else ""
        raise FloatingPointError(
            f"Learner step {step}: the loss or its gradient is not finite{seen}. Look for NaN in "
            "observations and rewards, then try a smaller learning rate or max_gradient_norm."
        )


@contextlib.contextmanager
def _autocast(kinds: Sequence[str], dtype: torch.dtype) -> Iterator[None]:
    """Mixed precision on all these kinds of devices."""
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, dtype))
        yield
