"""The networks of DreamerV3: dense layers with RMS norm, the recurrent state-space model, and the heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from framework.losses import dreamer
from framework.networks.distributions import DiagonalGaussian
from framework.networks.modules import Linear, Module
from framework.networks.torsos import in_float32


def truncated_normal_(weight: torch.Tensor, fan_in: int, scale: float = 1.0) -> None:
    """Normal weights of variance `scale`^2 / `fan_in`, cut at two standard deviations, in place."""
    with torch.no_grad():  # The cut takes variance away.
        nn.init.trunc_normal_(weight, 0.0, 1.0, -2.0, 2.0).mul_(scale * 1.1368 / math.sqrt(fan_in))


def linear(input_size: int, output_size: int, scale: float = 1.0, fan_in: int | None = None) -> Linear:
    """A linear layer with `truncated_normal_` weights and zero biases."""
    layer = Linear(input_size, output_size)
    truncated_normal_(layer.weight, fan_in or input_size, scale)
    nn.init.zeros_(layer.bias)
    return layer


class NormActivation(Module):
    """RMS norm over the last axis, then SiLU: `[..., size]` to `[..., size]` (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(nn.functional.layer_norm(inputs, self.scale.shape, self.scale, None, 1e-4))


class Dense(Module):
    """Layers of linear, RMS norm and SiLU, and perhaps a linear layer at the end, float32 with autocast.

    Args:
      input_size: width of the input.
      sizes: widths of the layers.
      output_size: width of the last layer; None leaves it out.
      scale: scale of its initial weights.
    """

    def __init__(
        self, input_size: int, sizes: Sequence[int], output_size: int | None = None, scale: float = 1.0
    ):
        super().__init__()
        layers: list[nn.Module] = []
        for size in sizes:
            layers += [linear(input_size, size), NormActivation(size)]
            input_size = size
        self.layers = nn.Sequential(*layers)
        self.last = None if output_size is None else linear(input_size, output_size, scale)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers._modules.values():
            assert layer is not None
            inputs = layer(inputs)
        return inputs if self.last is None else in_float32(self.last, inputs)


class TwoHotHead(Module):
    """`[..., input_size]` to logits `[..., K]` of a two-hot distribution; 0 is the first prediction.

    Args:
      input_size: width of the features.
      sizes: widths of the hidden layers.
      count: K, the number of bins.
    """

    bins: torch.Tensor

    def __init__(self, input_size: int, sizes: Sequence[int], count: int = 255):
        super().__init__()
        self.body = Dense(input_size, sizes, count, scale=0.0)
        self.register_buffer("bins", dreamer.symexp_bins(count), persistent=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.body(features)

    def mean(self, features: torch.Tensor) -> torch.Tensor:
        return self.mean_of(self.body(features))

    def mean_of(self, logits: torch.Tensor) -> torch.Tensor:
        return dreamer.two_hot_mean(logits, self.bins)

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return dreamer.two_hot_loss(logits, targets, self.bins)

    def regularized_loss(
        self, features: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, slow: Any, weight: float
    ) -> torch.Tensor:
        """The loss `[...]` to `targets`, and `weight` times that to what `slow`, a slow copy, predicts."""
        with torch.no_grad():
            predicted = slow.mean(features)
        return self.loss(logits, targets) + weight * self.loss(logits, predicted)


class BoundedGaussianHead(Module):
    """`[..., input_size]` to a `DiagonalGaussian`: tanh means, standard deviations from 0.1 to 1."""

    _LEAST = 0.1

    def __init__(self, input_size: int, size: int):
        super().__init__()
        self.both = linear(input_size, 2 * size, scale=0.01)

    def forward(self, features: torch.Tensor) -> DiagonalGaussian:
        mean, raw = in_float32(self.both, features).chunk(2, -1)
        std = (1.0 - self._LEAST) * torch.sigmoid(raw + 2.0) + self._LEAST
        return DiagonalGaussian(mean.tanh(), std.log())


class RSSM(Module):
    """The recurrent state-space model (Hafner et al., 2019), with the block GRU of DreamerV3.

    A state is `(deter [B, D], stoch [B, S * C])`: the GRU's, and S one-hot samples of C classes each, side
    by side. The zeros of `initial_state` precede an episode's first observation. *Posterior* states have seen
    the observation of their step, *prior* ones predict it. The first layer after the inputs is divided: the
    inputs that all blocks share pass through one dense matrix.

    Args:
      embedding_size: width of encoded observations.
      action_size: A, width of the actions' vectors.
      deter_size: D, a multiple of `blocks`.
      hidden_size: width of the hidden layers.
      stoch_size: S.
      classes: C.
      blocks: number of blocks of the GRU.
      uniform: weight of the uniform distribution in each distribution of a class.

    Attributes:
      output_size: width of the features, D + S * C.
    """

    def __init__(
        self,
        embedding_size: int,
        action_size: int,
        deter_size: int = 512,
        hidden_size: int = 64,
        stoch_size: int = 32,
        classes: int = 4,
        blocks: int = 8,
        uniform: float = 0.01,
    ):
        super().__init__()
        self.sizes = deter_size, stoch_size * classes
        self.output_size = sum(self.sizes)
        self._classes, self._blocks, self._uniform = (stoch_size, classes), blocks, uniform
        block, logits = deter_size // blocks, stoch_size * classes
        self.from_deter = Dense(deter_size, [hidden_size])
        self.from_stoch = Dense(logits, [hidden_size])
        self.from_action = Dense(action_size, [hidden_size])
        fan_in = deter_size + 3 * blocks * hidden_size  # That of all blocks, as in the authors' code.
        self.shared = linear(3 * hidden_size, deter_size, fan_in=fan_in)
        self.own = nn.Parameter(torch.empty(blocks, block, block))
        self.hidden = NormActivation(deter_size)
        self.gates = nn.Parameter(torch.empty(blocks, block, 3 * block))
        self.gates_bias = nn.Parameter(torch.zeros(blocks, 1, 3 * block))
        truncated_normal_(self.own.data, fan_in)
        truncated_normal_(self.gates.data, deter_size)
        self.prior_head = Dense(deter_size, [hidden_size] * 2, logits)
        fan_in = deter_size + embedding_size
        self.posterior_deter = linear(deter_size, hidden_size, fan_in=fan_in)
        self.posterior_embedding = linear(embedding_size, hidden_size, fan_in=fan_in)
        self.posterior_norm = NormActivation(hidden_size)
        self.posterior_head = linear(hidden_size, logits)

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        deter, stoch = (self.own.new_zeros(batch_size, size) for size in self.sizes)
        return deter, stoch

    def advance(
        self, deter: torch.Tensor, stoch: torch.Tensor, action_features: torch.Tensor
    ) -> torch.Tensor:
        """The next `deter [B, D]`; `action_features` is `action_vectors` of the action between the two."""
        shared = torch.cat([self.from_deter(deter), self.from_stoch(stoch), action_features], -1)
        old = deter.unflatten(-1, (self._blocks, -1)).transpose(0, 1)
        inputs = self.shared(shared) + torch.bmm(old, self.own).transpose(0, 1).flatten(1)
        hidden = self.hidden(inputs).unflatten(-1, (self._blocks, -1)).transpose(0, 1)
        gates = torch.baddbmm(self.gates_bias, hidden, self.gates).to(old.dtype)
        reset, candidate, update = gates.chunk(3, -1)
        candidate = (reset.sigmoid() * candidate).tanh()
        return torch.lerp(old, candidate, (update - 1.0).sigmoid()).transpose(0, 1).flatten(1)

    def action_vectors(self, actions: torch.Tensor) -> torch.Tensor:
        """Features of actions `[..., A]`, whose numbers beyond +-1 are cut."""
        return self.from_action(actions.clamp(-1.0, 1.0))

    def prior(self, deter: torch.Tensor) -> torch.Tensor:
        """Probabilities `[..., S, C]` of what will be seen."""
        return self._mixed(self.prior_head(deter))

    def posterior(self, deter: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Probabilities `[..., S, C]`; `embedded` is `posterior_embedding` of an encoded observation."""
        hidden = self.posterior_norm(self.posterior_deter(deter) + embedded)
        return self._mixed(in_float32(self.posterior_head, hidden))

    def _mixed(self, logits: torch.Tensor) -> torch.Tensor:
        return dreamer.unimix(logits.unflatten(-1, self._classes), self._uniform)

    def samples_like(self, actions: torch.Tensor) -> torch.Tensor:
        """An empty `[N, T, S, C]` for actions `[N, T, A]`."""
        return actions.new_empty(*actions.shape[:2], *self._classes)

    def sample(self, probabilities: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """A sample `[..., S * C]`, with straight-through gradients."""
        return dreamer.straight_through_sample(probabilities, noise).flatten(-2)

    def observe(
        self,
        embedding: torch.Tensor,
        actions: torch.Tensor,
        starts: torch.Tensor,
        state: tuple[torch.Tensor, torch.Tensor],
        noise: torch.Tensor,
        burn_in: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Posterior states of rows: `deter [N, T, D]`, `stoch [N, T, S * C]`, probabilities `[N, T, S, C]`.

        Args:
          embedding: `[N, burn_in + T, E]` encoded observations.
          actions: `[N, burn_in + T, A]`, the action *before* each observation.
          starts: bool `[N, burn_in + T]`; where True, state and action restart before the row.
          state: the posterior state of the row before the first one.
          noise: noise of the samples, `[N, burn_in + T, S, C]`.
          burn_in: number of rows that only bring the state up to date, without gradients.
        """
        keeps = (~starts.bool()).unsqueeze(-1).to(actions.dtype)
        inputs = self.action_vectors(actions * keeps), self.posterior_embedding(embedding), keeps, noise
        deter, stoch = state
        rows = []
        for t, (action, embedded, keep, noise) in enumerate(
            zip(*[each.unbind(1) for each in inputs], strict=True)
        ):
            with torch.set_grad_enabled(torch.is_grad_enabled() and t >= burn_in):
                deter = self.advance(deter * keep, stoch * keep, action)
                probabilities = self.posterior(deter, embedded)
                stoch = self.sample(probabilities, noise)
            rows.append((deter, stoch, probabilities))
        deters, stochs, all_probabilities = (
            torch.stack(each, 1) for each in zip(*rows[burn_in:], strict=True)
        )
        return deters, stochs, all_probabilities

    @torch.no_grad()
    def imagine(
        self, features: torch.Tensor, policy: Any, actions: Any, noise: torch.Tensor, of_actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Features `[M, H + 1, F]` of prior states, the given ones first, and sampled actions `[M, H, ...]`.

        Args:
          features: `[M, F]`.
          policy: features to a distribution.
          actions: `Actions` of the environment.
          noise: noise of the samples, `[M, H, S, C]`.
          of_actions: noise of the actions, `[M, H, A]`.
        """
        states, drawn = [features], []
        steps = zip(noise.transpose(0, 1).contiguous(), of_actions.unbind(1), strict=True)
        for of_sample, of_action in steps:
            drawn.append(policy(states[-1]).sample(noise=of_action))
            deter, stoch = states[-1].split(self.sizes, -1)
            vectors = self.action_vectors(actions.vectors(drawn[-1]))
            deter = self.advance(deter, stoch, vectors)
            states.append(torch.cat([deter, self.sample(self.prior(deter), of_sample)], -1))
        return torch.stack(states, 1), torch.stack(drawn, 1)


class ReturnRange(nn.Module):
    """The running range of imagined returns."""

    range: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("range", torch.zeros(2))

    def scale(self, returns: torch.Tensor, rate: float) -> torch.Tensor:
        """Adds `returns` of any shape, and returns their size: at least 1, so that small ones stay small."""
        self.range.copy_(dreamer.percentile_range(self.range, returns, rate))
        return (self.range[1] - self.range[0]).clamp(min=1.0)
