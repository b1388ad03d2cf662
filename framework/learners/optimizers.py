"""Adam without torch's overhead, RMSprop, and learning rates by the names of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_ONE = torch.tensor(1.0)


class Adam(torch.optim.Adam):
    """`torch.optim.Adam(..., fused=True)` with less overhead and equal results (Kingma and Ba, 2015).

    ```python
    optimizer_fn = functools.partial(Adam, lr=1e-3, eps=1e-5)
    ```

    The first of torch's optimizers in a process loads torch's compiler (two CPU seconds and 100 MB), and each
    step checks whether it is being compiled: on CartPole, 4 % of a serial program of DQN or PPO. This
    optimizer cannot be compiled. Its state is the same, so checkpoints fit both. It supports neither closures
    nor hooks.

    Args:
      parameters: tensors, or groups of them, as in `torch.optim`. A group may also have a `minimum`: smaller
        values are set to it after each step.
      lr: learning rate.
      betas: decay rates of the running means of the gradient and its square.
      eps: term added to the denominator.
      weight_decay: weight of the L2 penalty. In a group with `decoupled_weight_decay`, the share of the
        learning rate by which parameters shrink (AdamW; Loshchilov and Hutter, 2019).
    """

    def __init__(
        self,
        parameters: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _plain(torch.optim.Optimizer.add_param_group)(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        return _plain(torch.optim.Optimizer.state_dict)(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        _plain(torch.optim.Optimizer.load_state_dict)(self, state_dict)

    def parts(self, group: dict[str, Any]) -> list[list[torch.Tensor]]:
        """The parameters of a group that have a gradient, then for each its gradient, mean, square and step.

        Their state begins at the first call.
        """
        parameters, gradients, means, squares, steps = made = [list[torch.Tensor]() for _ in range(5)]
        self._init_group(group, parameters, gradients, means, squares, [], steps)
        return made

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        if closure is not None:
            raise ValueError(
                "closure: got a function, expected None. Compute the loss and its gradients before step()."
            )
        for group in by_device(self.param_groups):
            parameters, gradients, means, squares, steps = self.parts(group)
            if not parameters:
                continue
            if steps[0].is_cpu:
                # torch would convert a Python number to a tensor for each parameter.
                torch._foreach_add_(steps, _ONE, alpha=1.0)
            else:
                torch._foreach_add_(steps, 1)
            beta1, beta2 = group["betas"]
            decoupled = group.get("decoupled_weight_decay", False)
            update = torch._fused_adamw_ if decoupled else torch._fused_adam_
            update(
                parameters,
                gradients,
                means,
                squares,
                [],
                steps,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
            if (minimum := group.get("minimum")) is not None:
                torch._foreach_clamp_min_(parameters, minimum)

    # If this is not set, the first optimizer wraps `step` in a range for torch's profiler, which takes as
    # long as the step.
    step.hooked = True  # type: ignore[attr-defined]


def by_device(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups, each divided into one for each device that its parameters are on."""
    parts = []
    for group in groups:
        held = group["params"]
        devices = dict.fromkeys([parameter.device for parameter in held])
        several = [{**group, "params": [p for p in held if p.device == each]} for each in devices]
        parts += several if len(devices) > 1 else [group]
    return parts


def _plain(method: Any) -> Any:
    """`method` without the wrapper that loads the compiler on the first call."""
    return getattr(method, "__wrapped__", method)


def with_rates(rates: Mapping[nn.Module, float]) -> list[dict[str, Any]]:
    """Groups for an optimizer, one for each module that has parameters which need a gradient."""
    learned = {module: [p for p in module.parameters() if p.requires_grad] for module in rates}
    return [{"params": learned[module], "lr": rate} for module, rate in rates.items() if learned[module]]


def with_own_rate(networks: nn.Module, prefix: str, rate: float | None, field: str) -> list[dict[str, Any]]:
    """Groups of parameters for an optimizer: those whose names begin with `prefix` learn at `rate`.

    Args:
      networks: module whose parameters are optimized. Those that need no gradient are left out.
      prefix: beginning of the names.
      rate: their initial learning rate; None means the others' rate.
      field: name of the config field that holds `rate`, for the error.

    Raises:
      ValueError: No name begins with `prefix`, and there is a rate.
    """
    others: list[torch.Tensor] = []
    own: list[torch.Tensor] = []
    for name, parameter in networks.named_parameters():
        if parameter.requires_grad:
            (own if rate is not None and name.startswith(prefix) else others).append(parameter)
    if rate is None:
        return [{"params": others}]
    if not own:
        raise ValueError(
            f"{field}: got {rate}, expected None for networks without children whose names begin with "
            f"{prefix!r}. Rename the value's."
        )
    return [{"params": others}, {"params": own, "lr": rate}]


def rmsprop(networks: nn.Module, config: Any) -> torch.optim.Optimizer:
    """RMSprop (Tieleman and Hinton, 2012), with the fields of a config that are named after it."""
    return torch.optim.RMSprop(
        networks.parameters(),
        lr=config.learning_rate,
        alpha=config.rmsprop_decay,
        eps=config.adam_epsilon,
        momentum=config.rmsprop_momentum,
        foreach=True,
    )
