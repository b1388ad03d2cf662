"""The learner of every gradient-based agent here: a loss function, an optimizer and target networks."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import tree
from torch import nn

from framework import core
from framework.learners.distributed import LearnerGroup
from framework.types import StepResult

# Elements of all gradients together that are cheaper to copy than to look at one gradient after the other.
_SMALL = 1 << 16


class LossOutput(NamedTuple):
    """What a loss function gives.

    Attributes:
      loss: scalar to minimise.
      metrics: name to scalar tensor, for the logs. Kept on the device until somebody reads them.
      priorities: ``[N]`` new priorities of the items of the batch, or None.
      weight: how many elements the loss is the mean of, where parts of the batch that several learners
        have may differ in that; None if it is the same for all of them.
    """

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]
    priorities: torch.Tensor | None = None
    weight: torch.Tensor | None = None


class LossContext(NamedTuple):
    """What a loss function may use beside the networks and the batch.

    Attributes:
      targets: the target networks by the name of the child that they follow.
      steps: 0-d int64 tensor on the learner's device, how many steps came before this one. A tensor, so
        that a compiled loss is not compiled again at each step.
      generator: random numbers on the learner's device; part of the checkpoint. Several learners have the
        same ones, so that what differs from item to item is drawn by ``normal_like``.
      rank, num_learners: which of how many learners this is, each with an equal part of the batch.
      largest: the elementwise maximum of a tensor over the learners, all of which must call it; None if
        there is one.
    """

    targets: nn.ModuleDict
    steps: torch.Tensor
    generator: torch.Generator
    rank: int = 0
    num_learners: int = 1
    largest: Callable[[torch.Tensor], torch.Tensor] | None = None

    def normal_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Standard normals in the shape ``[N, ...]``, dtype and device of ``tensor``, whose rows are items.

        Each of several learners draws those of the whole batch and takes its part, so that together they have
        what one would draw.
        """
        if self.num_learners == 1:
            return torch.empty_like(tensor).normal_(generator=self.generator)
        count = len(tensor)
        whole = tensor.new_empty((self.num_learners * count, *tensor.shape[1:]))
        return whole.normal_(generator=self.generator)[self.rank * count : (self.rank + 1) * count]


# The context is a ``LossContext``; learners that make more of a batch give more.
LossFn = Callable[[Any, Any, Any], LossOutput]


class SGDLearner(core.Learner):
    """Minimises ``loss_fn(networks, batch, context)``, one optimizer step per batch.

    A variable is a child of ``networks`` by name, its value that child's state dict in numpy, its version
    the number of steps done. ``get_variables`` may be called from any thread and never waits for a step: it
    takes a fresh snapshot when no step is under way, and else hands out the latest one and has a newer one
    made when the step ends.

    A loss or gradient that is not finite is a FloatingPointError that names the step and the metrics. On the
    CPU it comes before the parameters are touched. On a GPU looking would stall the device, so it is noticed
    at the next snapshot or checkpoint, or after ``check_period`` steps: nothing broken is published or saved.

    Args:
      networks: holds all parameters; moved to ``device``.
      loss_fn: ``(networks, batch, context) -> LossOutput``. The batch is the ``ReplaySample`` given to
        ``step`` with its leaves as tensors on ``device``, but for ``info.key``.
      optimizer_fn: parameters to optimizer, as ``functools.partial(Adam, lr=1e-3)``.
      learning_rate_schedule: steps done to a factor on the optimizer's learning rates.
      max_gradient_norm: gradients whose global norm is larger are scaled down to it; None leaves them.
      target_names: children of ``networks`` that have a target network.
      target_update_period: targets move at every so many steps.
      target_update_rate: how far they move: 1 copies (DQN), less averages (Polyak; SAC's 0.005).
      after_step: ``(networks, steps done)``, called after each step under ``no_grad``; sets what follows the
        count of steps, such as how much actors explore.
      device: "cpu", "cuda", "cuda:1" …
      seed: of ``context.generator``.
      autocast_dtype: runs the loss in mixed precision: ``torch.bfloat16``, or ``torch.float16`` (GPU only;
        with a gradient scaler). None computes in the parameters' precision.
      compile_loss: compiles the loss function with ``torch.compile``; the first steps take long.
      check_period: steps between looks for non-finite values on a GPU.
      partial_gradients: the loss leaves some parameters out at some steps. Several learners must know.
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
        after_step: Callable[[Any, int], None] | None = None,
        device: str | torch.device = "cpu",
        seed: int = 0,
        autocast_dtype: torch.dtype | None = None,
        compile_loss: bool = False,
        check_period: int = 100,
        partial_gradients: bool = False,
    ):
        if target_update_period < 1:
            raise ValueError(f"target_update_period is {target_update_period}; expected at least 1 step.")
        if not 0.0 < target_update_rate <= 1.0:
            raise ValueError(f"target_update_rate is {target_update_rate}; expected more than 0, at most 1.")
        if max_gradient_norm is not None and not max_gradient_norm > 0:
            raise ValueError(f"max_gradient_norm is {max_gradient_norm}; expected more than 0, or None.")
        self.device = torch.device(device)
        if autocast_dtype is torch.float16 and self.device.type != "cuda":
            raise ValueError(f"autocast_dtype is float16 on {self.device}; use bfloat16, or a GPU.")
        self.networks = networks.to(self.device)
        self._children = dict(networks.named_children())
        unknown = sorted(set(target_names) - set(self._children))
        if unknown:
            raise KeyError(
                f"target_names has {unknown}; the networks' children are {sorted(self._children)}."
            )
        self.targets = nn.ModuleDict({name: copy.deepcopy(self._children[name]) for name in target_names})
        self.targets.requires_grad_(False)
        self._online: list[torch.Tensor] = [
            p for name in target_names for p in self._children[name].parameters()
        ]
        self._target: list[torch.Tensor] = list(self.targets.parameters())
        self._online_buffers = [b for name in target_names for b in self._children[name].buffers()]
        self._target_buffers = list(self.targets.buffers())
        self._target_update_period = target_update_period
        self._target_update_rate = target_update_rate

        self._parameters = [p for p in networks.parameters() if p.requires_grad]
        self._small = sum(p.numel() for p in self._parameters) <= _SMALL
        self.optimizer = optimizer_fn(self._parameters)
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._schedule = learning_rate_schedule
        self._max_gradient_norm = max_gradient_norm
        self._after_step = after_step
        self._autocast_dtype = autocast_dtype
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=autocast_dtype is torch.float16)
        self._loss_fn = torch.compile(loss_fn) if compile_loss else loss_fn
        self._group: LearnerGroup | None = None
        self._partial_gradients = partial_gradients
        self._check_period = check_period
        self._unchecked: list[tuple[int, torch.Tensor]] = []

        self.steps = 0
        self._step_tensor = torch.zeros((), dtype=torch.int64, device=self.device)
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self._lock = threading.Lock()  # Held by whoever changes or reads the parameters.
        self._wanted = False
        self._version_offset = 0
        self._snapshot_steps = -1
        self._snapshot: tuple[int, dict[str, Any]] = (-1, {})
        if after_step is not None:
            with torch.no_grad():
                after_step(self.networks, 0)
        self.publish()

    def step(self, batch: Any) -> StepResult:
        """One optimizer step on ``batch``, a ``ReplaySample``.

        Metrics hold what the loss function gave, and ``loss``, ``gradient_norm`` (before clipping) and
        ``learning_rate``. They stay on the device, so that a step waits for nothing; priorities come to the
        CPU.
        """
        with self._lock:
            batch = self._on_device(batch)
            self._set_learning_rates(self.steps)
            output = self._loss(batch)
            norm = self._descend(output)
            self._finish_step()
            metrics = {name: value.detach() for name, value in output.metrics.items()}
            metrics["loss"] = output.loss.detach()
            metrics["gradient_norm"] = norm
            metrics["learning_rate"] = torch.tensor(self.optimizer.param_groups[0]["lr"])
        # Replay takes them on the host, so whoever called would have to wait for them there and then.
        priorities = None if output.priorities is None else output.priorities.detach().cpu()
        return StepResult(metrics, priorities)

    def parameters(self) -> dict[str, dict[str, torch.Tensor]]:
        with self._lock:
            self._raise_if_unsound()
            return {name: dict(child.state_dict()) for name, child in self._children.items()}

    def publish(self) -> None:
        """Makes the parameters of now what ``get_variables`` hands out."""
        with self._lock:
            self._publish_locked()

    def get_variables(
        self, names: Sequence[str] = (), newer_than: int = -1
    ) -> tuple[int, dict[str, Any]] | None:
        unknown = sorted(set(names) - set(self._children))
        if unknown:
            raise KeyError(f"names has {unknown}; this learner has {sorted(self._children)}.")
        if self._lock.acquire(blocking=False):
            try:
                if newer_than > self.steps + self._version_offset:
                    # The caller met a former life of this learner, since restored to an earlier step.
                    # Versions only grow, so this life's begin above what the caller has.
                    self._version_offset = newer_than + 1 - self.steps
                    self._snapshot_steps = -1
                if self._snapshot_steps != self.steps:
                    self._publish_locked()
            finally:
                self._lock.release()
        else:
            self._wanted = True
        version, variables = self._snapshot
        if version <= newer_than:
            return None
        return version, {name: variables[name] for name in names or self._children}

    def save(self) -> dict[str, Any]:
        """Everything that the next step depends on: tensors on the CPU and plain Python values only."""
        with self._lock:
            self._raise_if_unsound()
            state = {
                "networks": self.networks.state_dict(),
                "targets": self.targets.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self._scaler.state_dict(),
                "generator": self._generator.get_state(),
                "steps": self.steps,
                "version_offset": self._version_offset,
            }
            return _to_cpu(state)

    def restore(self, state: dict[str, Any]) -> None:
        with self._lock:
            self.networks.load_state_dict(state["networks"])
            self.targets.load_state_dict(state["targets"])
            self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
            self._scaler.load_state_dict(state["scaler"])
            self._generator.set_state(state["generator"].cpu())
            self.steps = int(state["steps"])
            self._step_tensor.fill_(self.steps)
            self._version_offset = max(self._version_offset, int(state["version_offset"]))
            self._unchecked.clear()
            self._publish_locked()

    def distribute(self, group: LearnerGroup) -> None:
        """From now on each step averages its gradient with those of the other learners of ``group``.

        All must be in the same state, and then make the same steps, each on its shard of the batch. The
        loss must be a mean over the items, so that the mean over the shards is that over the batch; where
        shards differ in what counts, ``LossOutput.weight`` says how much each has. All draw the same random
        numbers; see ``LossContext.normal_like``. Buffers of the networks (statistics of data) are rank 0's.
        """
        with self._lock:
            self._group = group
            self._average(group)

    def _average(self, group: LearnerGroup) -> None:
        """Makes the loss functions those of the whole group."""
        self._loss_fn = group.averaged(self.networks, self._loss_fn, self._partial_gradients)

    def _set_learning_rates(self, progress: int) -> None:
        """Sets the rates of the schedule at ``progress``, in the schedule's unit."""
        if self._schedule is not None:
            factor = self._schedule(progress)
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor

    def _descend(self, output: LossOutput) -> torch.Tensor:
        """One optimizer step against ``output.loss``; returns the norm of the gradient before clipping."""
        for parameter in self._parameters:
            parameter.grad = None  # optimizer.zero_grad, without its hooks for profilers.
        self._scaler.scale(output.loss).backward()
        self._scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = _global_norm(gradients, self._small)
        limit = self._max_gradient_norm
        # A scaler skips steps whose gradients overflowed, and tries again with a smaller scale.
        if self.device.type == "cpu":
            length = norm.item()
            if not math.isfinite(length + output.loss.item()):
                self._raise_unsound(self.steps, output.metrics)
            # Most gradients are short enough to be left alone. A GPU would have to be waited for to know.
            if limit is not None and length + 1e-6 > limit:
                # By a tensor: a number of Python's would be made one anew for each gradient.
                torch._foreach_mul_(gradients, torch.tensor(limit / (length + 1e-6)))
        else:
            self._check(output.loss if self._scaler.is_enabled() else output.loss + norm)
            if limit is not None and gradients:
                # As nn.utils.clip_grads_with_norm_, all being on one device.
                torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
        self._scaler.step(self.optimizer)
        self._scaler.update()
        return norm

    @torch.no_grad()
    def _finish_step(self) -> None:
        """Counts the step and does what follows from the count."""
        self.steps += 1
        self._step_tensor += 1
        if self.steps % self._target_update_period == 0:
            self._update_targets()
        if self._after_step is not None:
            self._after_step(self.networks, self.steps)
        if self._wanted:
            self._publish_locked()

    def _on_device(self, batch: Any) -> Any:
        """Leaves as tensors on the device. The items' keys stay behind: only the host needs them."""
        device = self.device

        def convert(leaf: Any) -> Any:
            if isinstance(leaf, np.ndarray):
                # torch has few operations for uint64, and keys are the only leaves of that kind.
                if leaf.dtype == np.uint64:
                    return leaf
                leaf = torch.from_numpy(leaf)
            if isinstance(leaf, torch.Tensor):
                return leaf.to(device, non_blocking=True) if leaf.device != device else leaf
            return torch.as_tensor(leaf, device=device)

        info = type(batch.info)(*(convert(leaf) for leaf in batch.info))
        return batch._replace(info=info, data=tree.map_structure(convert, batch.data))

    def _loss(self, batch: Any) -> LossOutput:
        context = LossContext(self.targets, self._step_tensor, self._generator)
        if self._group is not None:
            group = self._group
            context = context._replace(rank=group.rank, num_learners=group.size, largest=group.largest)
        if self._autocast_dtype is None:
            return self._loss_fn(self.networks, batch, context)
        with torch.autocast(self.device.type, dtype=self._autocast_dtype):
            return self._loss_fn(self.networks, batch, context)

    @torch.no_grad()
    def _check(self, value: torch.Tensor) -> None:
        """Raises some time later if ``value`` is not finite: to look now would stall a GPU."""
        self._unchecked.append((self.steps, value.detach()))
        if len(self._unchecked) >= self._check_period:
            self._raise_if_unsound()

    def _raise_if_unsound(self) -> None:
        if not self._unchecked:
            return
        sound = torch.stack([value for _, value in self._unchecked]).isfinite().tolist()
        steps = [step for step, _ in self._unchecked]
        self._unchecked.clear()
        if not all(sound):
            self._raise_unsound(steps[sound.index(False)], {})

    def _raise_unsound(self, step: int, metrics: dict[str, torch.Tensor]) -> None:
        seen = ", ".join(f"{name}={float(value):.6g}" for name, value in metrics.items())
        seen = f" ({seen})" if seen else ""
        raise FloatingPointError(
            f"Learner step {step}: the loss or its gradient is not finite{seen}. Look for NaN in "
            "observations and rewards, then try a smaller learning rate or max_gradient_norm."
        )

    def _update_targets(self) -> None:
        if not self._target:
            return
        if self._target_update_rate == 1.0:
            torch._foreach_copy_(self._target, self._online)
        else:
            torch._foreach_lerp_(self._target, self._online, self._target_update_rate)
        for target, online in zip(self._target_buffers, self._online_buffers, strict=True):
            target.copy_(online)

    def _publish_locked(self) -> None:
        self._raise_if_unsound()
        variables = {
            name: {key: _snapshot(tensor) for key, tensor in child.state_dict().items()}
            for name, child in self._children.items()
        }
        self._wanted = False
        self._snapshot_steps = self.steps
        self._snapshot = (self.steps + self._version_offset, variables)


def _global_norm(gradients: list[torch.Tensor], small: bool) -> torch.Tensor:
    """The norm of all of them as one vector; as ``nn.utils.get_total_norm``, all being on one device."""
    if not gradients:
        return torch.zeros(())
    if small:  # a copy costs less than a call for each
        return torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients]))
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


def _snapshot(tensor: torch.Tensor) -> np.ndarray:
    """A copy in numpy that later steps do not touch."""
    return tensor.detach().to("cpu", copy=True).numpy()


def _to_cpu(value: Any) -> Any:
    """Copies nested dicts and lists with all tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _to_cpu(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_cpu(entry) for entry in value)
    return value
