"""Distributions over actions, as the heads of policies give them.

Those of `torch.distributions` take no generator and validate at every construction. These take a generator,
so that a run repeats exactly, and use the formulas of `framework.losses.entropy`. All have:

```text
sample(generator=None) -> actions           log_prob(actions) -> [...]
mode() -> actions                           entropy() -> [...]       kl(other) -> [...]
```

Distributions over real numbers also have `rsample(generator)`, which passes gradients on to the parameters.

A policy's generator is a `BlockGenerator`: the numbers of a step are then from a block of many steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from framework.devices import restore_generator
from framework.losses import entropy as entropies

_STEPS = 64  # Steps whose numbers are drawn at once,
_MOST = 1 << 14  # if they are not more numbers than this: others gain nothing.


class BlockGenerator(torch.Generator):
    """A generator that also draws the numbers of many steps at once; torch's functions take it, too.

    It is not thread-safe.
    """

    def __init__(self, device: str | torch.device = "cpu"):  # The device is an argument of torch's `__new__`.
        super().__init__()
        # By kind and shape, the numbers left for `draw`.
        self.left: dict[tuple[str | int, torch.Size], list[torch.Tensor]] = {}

    def manual_seed(self, seed: int) -> BlockGenerator:
        self.left.clear()
        super().manual_seed(seed)
        return self

    def save(self) -> dict[str, Any]:
        """The state, with the numbers that are left."""
        left = {(kind, tuple(shape)): torch.stack(each) for (kind, shape), each in self.left.items() if each}
        return {"generator": self.get_state(), "left": left}

    def restore(self, state: Any) -> None:
        """Continues from what `save` returned, here or on another device."""
        if isinstance(state, torch.Tensor):  # Earlier versions drew nothing ahead.
            state = {"generator": state, "left": {}}
        restore_generator(self, state["generator"])
        rows = state["left"].items()
        self.left = {(kind, torch.Size(shape)): list(each.to(self.device)) for (kind, shape), each in rows}

    def __reduce__(self) -> Any:  # That of torch makes a `torch.Generator`.
        return _restored, (self.device.type, self.device.index, self.save())


def _restored(device: str, index: int | None, state: dict[str, Any]) -> BlockGenerator:
    generator = BlockGenerator(torch.device(device) if index is None else torch.device(device, index))
    generator.restore(state)
    return generator


def draw(
    kind: str | int, shape: torch.Size, device: torch.device, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Random numbers of `shape` on `device`.

    Args:
      kind: "normal" or "gumbel", both standard, or "uniform" between 0 and 1: float32. n: int64 below n.
      shape: the shape.
      device: the device, which is the generator's.
      generator: draws them. None is torch's own.
    """
    if not isinstance(generator, BlockGenerator):
        return _numbers(kind, shape, device, generator)
    left = generator.left.get((kind, shape))
    if not left:
        steps = max(1, min(_STEPS, _MOST // max(1, math.prod(shape))))
        with torch.inference_mode(False):  # The next step may record gradients.
            left = list(_numbers(kind, (steps, *shape), device, generator))
        generator.left[kind, shape] = left
    return left.pop()


def _numbers(
    kind: str | int, shape: Sequence[int], device: torch.device, generator: torch.Generator | None
) -> torch.Tensor:
    if isinstance(kind, int):
        return torch.randint(kind, shape, generator=generator, device=device)
    numbers = torch.empty(shape, dtype=torch.float32, device=device)
    if kind == "gumbel":
        return numbers.exponential_(generator=generator).log_().neg_()
    return (numbers.normal_ if kind == "normal" else numbers.uniform_)(generator=generator)


class Categorical:
    """One of A actions: `logits [..., A]`, actions int64 `[...]`.

    Args:
      logits: unnormalized log probabilities.
      legal: `[..., A]` 1 where the action may be taken; None allows all. Illegal actions are never drawn.
    """

    def __init__(self, logits: torch.Tensor, legal: torch.Tensor | None = None):
        self.logits = logits if legal is None else entropies.mask_logits(logits, legal)
        self._normalized: torch.Tensor | None = None

    def sample(
        self, generator: torch.Generator | None = None, noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        """An action; `noise`, standard Gumbel, is in place of a generator."""
        # The largest of the logits with Gumbel noise: one pass, and no [..., A] cumulative sums.
        logits = self.logits
        noise = draw("gumbel", logits.shape, logits.device, generator) if noise is None else noise
        return (logits + noise).argmax(-1)

    def mode(self) -> torch.Tensor:
        return self.logits.argmax(-1)

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        log_probs, actions = self._log_probs(), actions.long()
        if log_probs.dim() == 2 and actions.dim() == 1:
            # Picks as gather() does, without its views and their gradients: half the time on a minibatch.
            return -torch.nn.functional.nll_loss(log_probs, actions, reduction="none")
        return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> torch.Tensor:
        log_probs = self._log_probs()
        return -entropies.expectation(log_probs, log_probs)

    def kl(self, other: Categorical) -> torch.Tensor:
        return entropies.categorical_kl(self.logits, other.logits)

    def _log_probs(self) -> torch.Tensor:
        """Normalized logits. With gradients, they are kept: a loss needs them more than once."""
        if self._normalized is not None:
            return self._normalized
        log_probs = self.logits.log_softmax(-1)
        if torch.is_grad_enabled():
            self._normalized = log_probs
        return log_probs


class Joint:
    """Independent distributions over the parts of a joint action: `log_prob`, `entropy` and `kl` are sums.

    Args:
      parts: the distributions.
      sizes: for each, the number of entries of its actions; None for one number without an axis.
    """

    def __init__(self, parts: Sequence[Any], sizes: Sequence[int | None]):
        self.parts, self._sizes = list(parts), list(sizes)

    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        return join([part.sample(generator) for part in self.parts], self._sizes)

    def mode(self) -> torch.Tensor:
        return join([part.mode() for part in self.parts], self._sizes)

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        pieces = split_joint(actions, self._sizes)
        each = [part.log_prob(piece) for part, piece in zip(self.parts, pieces, strict=True)]
        return torch.stack(each).sum(0)

    def entropy(self) -> torch.Tensor:
        return torch.stack([part.entropy() for part in self.parts]).sum(0)

    def kl(self, other: Joint) -> torch.Tensor:
        return torch.stack([p.kl(q) for p, q in zip(self.parts, other.parts, strict=True)]).sum(0)


def join(pieces: Sequence[torch.Tensor], sizes: Sequence[int | None]) -> torch.Tensor:
    """The actions of the parts as joint actions `[..., D]`."""
    each = [p.unsqueeze(-1) if size is None else p for p, size in zip(pieces, sizes, strict=True)]
    return torch.cat(each, -1)  # float32, unless all are choices.


def split_joint(actions: Any, sizes: Sequence[int | None]) -> list[Any]:
    """The inverse of `join`, for tensors or arrays."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(actions[..., at] if size is None else actions[..., at : at + size])
        at += size or 1
    return pieces


class MultiCategorical(Joint):
    """Independent choices: `logits [..., sum(sizes)]`, actions int64 `[..., len(sizes)]`."""

    def __init__(self, logits: torch.Tensor, sizes: Sequence[int], legal: torch.Tensor | None = None):
        if logits.shape[-1] != sum(sizes):
            raise ValueError(
                f"logits: got {logits.shape[-1]} entries, expected {sum(sizes)} for sizes {tuple(sizes)}."
            )
        self._logit_sizes = list(sizes)
        parts = entropies.mask_logits(logits, legal).split(self._logit_sizes, -1)
        super().__init__([Categorical(part) for part in parts], [None] * len(sizes))

    def sample(
        self, generator: torch.Generator | None = None, noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        if noise is None:
            return super().sample(generator)
        pairs = zip(self.parts, noise.split(self._logit_sizes, -1), strict=True)
        return torch.stack([part.sample(noise=own) for part, own in pairs], -1)


class DiagonalGaussian:
    """Independent normals: mean and log standard deviation `[..., D]`, actions `[..., D]`."""

    def __init__(self, mean: torch.Tensor, log_std: torch.Tensor):
        self.mean = mean
        is_whole = log_std.dim() == mean.dim() and log_std.shape == mean.shape
        self.log_std = log_std if is_whole else log_std.expand_as(mean)

    def rsample(
        self, generator: torch.Generator | None = None, noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Actions with a gradient, made of the standard normals `noise [..., D]`; None draws them."""
        if noise is None:
            mean = self.mean
            noise = draw("normal", mean.shape, mean.device, generator).to(mean.dtype)
        return torch.addcmul(self.mean, self.log_std.exp(), noise)

    def sample(
        self, generator: torch.Generator | None = None, noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.rsample(generator, noise).detach()

    def mode(self) -> torch.Tensor:
        return self.mean

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        z = (actions - self.mean) / self.log_std.exp()
        return (-0.5 * z**2 - self.log_std - 0.5 * math.log(2.0 * math.pi)).sum(-1)

    def entropy(self) -> torch.Tensor:
        return entropies.gaussian_entropy(self.log_std)

    def kl(self, other: DiagonalGaussian) -> torch.Tensor:
        return entropies.gaussian_kl(self.mean, self.log_std, other.mean, other.log_std)


class SquashedGaussian:
    """tanh of a diagonal Gaussian: actions `[..., D]` between -1 and 1.

    Args:
      mean: `[..., D]`, of the Gaussian before tanh.
      log_std: `[..., D]`, of the Gaussian before tanh.
    """

    # Actions at the bounds have no finite preimage. They are moved inward by this before atanh.
    _EDGE = 1e-6

    def __init__(self, mean: torch.Tensor, log_std: torch.Tensor):
        self.base = DiagonalGaussian(mean, log_std)

    def rsample_with_log_prob(
        self, generator: torch.Generator | None = None, noise: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """An action and its log density, exact near the bounds, where `log_prob` must invert tanh.

        `noise` as in `DiagonalGaussian.rsample`.
        """
        x = self.base.rsample(generator, noise)
        return torch.tanh(x), self._log_prob_of_preimage(x)

    def rsample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        return torch.tanh(self.base.rsample(generator))

    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        return self.rsample(generator).detach()

    def mode(self) -> torch.Tensor:
        """The squashed mean, which greedy policies use."""
        return torch.tanh(self.base.mean)

    def log_prob(self, actions: torch.Tensor) -> torch.Tensor:
        inside = actions.clamp(-1.0 + self._EDGE, 1.0 - self._EDGE)
        return self._log_prob_of_preimage(torch.atanh(inside))

    def entropy(self) -> torch.Tensor:
        return entropies.squashed_gaussian_entropy(self.base.mean, self.base.log_std)

    def kl(self, other: SquashedGaussian) -> torch.Tensor:
        """The divergence of the Gaussians: an invertible map does not change it."""
        return self.base.kl(other.base)

    def _log_prob_of_preimage(self, x: torch.Tensor) -> torch.Tensor:
        volume = entropies.log_one_minus_tanh_squared(x)
        return self.base.log_prob(x) - volume.sum(-1)
