"""The optimizer of DreamerV3."""

from __future__ import annotations

from typing import Any

import torch

from framework.learners.optimizers import Adam, by_device


class LaProp(Adam):
    """LaProp (Ziyin et al., 2020) with adaptive gradient clipping (Brock et al., 2021).

    The gradient is divided by its running root mean square before it enters the momentum, where Adam divides
    afterwards; a small epsilon is then safe. Before that, the gradient of each tensor is scaled down to
    `clip` times the tensor's norm. The state has Adam's names.

    Args:
      parameters: as in `Adam`.
      lr: as in `Adam`.
      betas: as in `Adam`.
      eps: as in `Adam`.
      clip: the largest norm of a tensor's gradient, as a fraction of the norm of the tensor, which counts as
        1e-3 at least. None clips nothing.
      warmup: steps over which the learning rate rises from 0.
    """

    def __init__(
        self,
        parameters: Any,
        lr: float = 4e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-20,
        clip: float | None = 0.3,
        warmup: int = 0,
    ):
        super().__init__(parameters, lr=lr, betas=betas, eps=eps)
        self._clip, self._warmup = clip, warmup

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all parameters that have a gradient."""
        for group in by_device(self.param_groups):
            parameters, gradients, means, squares, steps = self.parts(group)
            if not parameters:
                continue
            torch._foreach_add_(steps, 1)
            step = steps[0]
            if self._clip is not None:
                limits: Any = torch._foreach_norm(parameters)
                torch._foreach_clamp_min_(limits, 1e-3)
                torch._foreach_mul_(limits, self._clip)
                factors: Any = torch._foreach_norm(gradients)
                torch._foreach_div_(factors, limits)
                torch._foreach_clamp_min_(factors, 1.0)
                gradients = list(torch._foreach_div(gradients, factors))
            beta1, beta2 = group["betas"]
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - beta2)
            roots: Any = torch._foreach_div(squares, 1.0 - beta2**step)
            torch._foreach_sqrt_(roots)
            torch._foreach_add_(roots, group["eps"])
            torch._foreach_lerp_(means, torch._foreach_div(gradients, roots), 1.0 - beta1)
            rate = group["lr"] / (1.0 - beta1**step)
            if self._warmup:
                rate = rate * ((step - 1.0) / self._warmup).clamp(max=1.0)
            torch._foreach_sub_(parameters, torch._foreach_mul(means, rate))

    step.hooked = True  # type: ignore[attr-defined]  # See `Adam`.
