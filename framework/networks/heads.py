"""From features to what an environment takes: heads of policies and of values, and conversions.

`Actions` converts between sampled actions and the environment's. `as_tensors` and `as_numpy` convert
nests of arrays and nests of tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import tree
from dm_env import specs as dm_specs
from torch import nn

from framework import specs
from framework.networks import distributions
from framework.networks.bodies import MakeBody
from framework.networks.modules import Linear, Module
from framework.networks.noisy import NoisyLinear
from framework.networks.torsos import MLP, ObservationEncoder, in_float32, make_torso, orthogonal_
from framework.types import Nest

# A small last layer makes the first policy nearly uniform, whatever the features are.
_GAIN = 0.01
_NESTS = (dict, tuple, list)


class CategoricalHead(Module):
    """`[..., input_size]` to a `Categorical` over `num_actions`."""

    def __init__(self, input_size: int, num_actions: int):
        super().__init__()
        self.logits = Linear(input_size, num_actions)
        orthogonal_(self.logits, _GAIN)

    def forward(self, features: torch.Tensor, legal: torch.Tensor | None = None) -> distributions.Categorical:
        return distributions.Categorical(in_float32(self.logits, features), legal)


class MultiCategoricalHead(Module):
    """`[..., input_size]` to a `MultiCategorical` over choices of `sizes`."""

    def __init__(self, input_size: int, sizes: tuple[int, ...]):
        super().__init__()
        self.sizes = sizes
        self.logits = Linear(input_size, sum(sizes))
        orthogonal_(self.logits, _GAIN)

    def forward(
        self, features: torch.Tensor, legal: torch.Tensor | None = None
    ) -> distributions.MultiCategorical:
        return distributions.MultiCategorical(in_float32(self.logits, features), self.sizes, legal)


class GaussianHead(Module):
    """`[..., input_size]` to a `DiagonalGaussian` whose standard deviation is a parameter.

    Args:
      input_size: width of the features.
      size: D, the number of action dimensions.
      initial_std: initial standard deviation, in the units of the sampled actions.
      tanh_mean: whether a tanh keeps the mean between -1 and 1.
    """

    def __init__(self, input_size: int, size: int, initial_std: float = 1.0, tanh_mean: bool = False):
        super().__init__()
        self.tanh_mean = tanh_mean
        self.mean = Linear(input_size, size)
        orthogonal_(self.mean, _GAIN)
        self.log_std = nn.Parameter(torch.full((size,), float(np.log(initial_std))))

    def forward(self, features: torch.Tensor) -> distributions.DiagonalGaussian:
        mean = in_float32(self.mean, features)
        return distributions.DiagonalGaussian(mean.tanh() if self.tanh_mean else mean, self.log_std)


class SquashedGaussianHead(Module):
    """`[..., input_size]` to a `SquashedGaussian` of D dimensions (Haarnoja et al., 2018).

    Mean and log standard deviation both depend on the features. A tanh keeps the latter between -5 and 2.
    Unlike a clamp, it passes gradients everywhere.
    """

    _MIDDLE, _HALF = -1.5, 3.5

    def __init__(self, input_size: int, size: int):
        super().__init__()
        self.both = Linear(input_size, 2 * size)

    def forward(self, features: torch.Tensor) -> distributions.SquashedGaussian:
        mean, log_std = in_float32(self.both, features).chunk(2, -1)
        return distributions.SquashedGaussian(mean, torch.tanh(log_std) * self._HALF + self._MIDDLE)


def make_policy_head(input_size: int, action_spec: Any, squash: bool = False) -> nn.Module:
    """The head that fits one action spec of one env.

    DiscreteArray: `CategoricalHead`. Bounded integers that start at 0: `MultiCategoricalHead`. Floats with
    one axis: `GaussianHead`, or, if they have bounds and `squash`, `SquashedGaussianHead`, whose actions are
    between -1 and 1. `Actions.to_environment` scales and clips them.
    """
    if isinstance(action_spec, dm_specs.DiscreteArray):
        return CategoricalHead(input_size, int(action_spec.num_values))
    shape: tuple[int, ...] = getattr(action_spec, "shape", ())
    bounded = isinstance(action_spec, dm_specs.BoundedArray)
    if len(shape) == 1 and np.issubdtype(action_spec.dtype, np.floating) and (bounded or not squash):
        return (SquashedGaussianHead if squash else GaussianHead)(input_size, shape[0])
    if len(shape) == 1 and bounded and action_spec.dtype.kind in "iu" and not np.any(action_spec.minimum):
        most = np.broadcast_to(action_spec.maximum, shape)
        return MultiCategoricalHead(input_size, tuple(int(each) + 1 for each in most))
    raise ValueError(
        f"action spec: got {action_spec!r}, expected a DiscreteArray, "
        "integers that start at 0, or floats with one axis (bounded ones to squash)."
    )


class QNetwork(Module):
    """Values of all discrete actions: observation `[..., *]` to `[..., num_actions]`.

    With `outputs_per_action` K above 1, `[..., num_actions, K]`: the parameters of a distribution of the
    return of each action.

    With `dueling`, Q = V + A - mean(A) with two streams of equal hidden sizes (Wang et al., 2016, equation
    9), for each of the K outputs (Hessel et al., 2018). An encoder precedes the hidden layers; it passes a
    single vector on unchanged. The last layer computes in float32, also with autocast.

    Args:
      observation_spec: nest of dm_env specs of one env.
      num_actions: A, the number of actions.
      hidden_sizes: widths of the hidden layers. With `dueling`, each stream has its own last one.
      dueling: whether the value and the advantages have separate streams.
      layer_norm: normalizes each hidden layer before its activation.
      outputs_per_action: K, the number of outputs for each action.
      noise: initial noise of the layers after the encoder, as in `MLP`.
      torso: network for images, as in `make_torso`.
      torso_size: its size, as in `make_torso`.
    """

    def __init__(
        self,
        observation_spec: Nest,
        num_actions: int,
        hidden_sizes: Sequence[int] = (256, 256),
        dueling: bool = False,
        layer_norm: bool = False,
        outputs_per_action: int = 1,
        noise: float = 0.0,
        torso: str = "nature",
        torso_size: int | None = None,
    ):
        super().__init__()
        self.encoder = ObservationEncoder(observation_spec, make_convolution=make_torso(torso, torso_size))
        width, outputs = self.encoder.output_size, num_actions * outputs_per_action
        self._shape = (num_actions, outputs_per_action)[: 1 if outputs_per_action == 1 else 2]
        mlp = functools.partial(MLP, layer_norm=layer_norm, noise=noise)
        if dueling:
            self.body = mlp(width, hidden_sizes[:-1])
            width = self.body.output_size
            self.head: nn.Module = mlp(width, hidden_sizes[-1:], outputs)
            self.value: nn.Module | None = mlp(width, hidden_sizes[-1:], outputs_per_action)
        else:
            self.body = mlp(width, hidden_sizes)
            width = self.body.output_size
            self.head = NoisyLinear(width, outputs, noise) if noise else Linear(width, outputs)
            self.value = None

    def forward(self, observation: Nest) -> torch.Tensor:
        features = self.body(self.encoder(observation))
        advantages = in_float32(self.head, features) if self.value is None else self.head(features)
        if len(self._shape) == 2:
            advantages = advantages.unflatten(-1, self._shape)
        if self.value is None:
            return advantages
        value, axis = self.value(features), -len(self._shape)
        value = value if axis == -1 else value.unsqueeze(-2)
        return value + advantages - advantages.mean(axis, keepdim=True)


class Critics(Module):
    """Several estimates of the value of an action: observation and action to `[count, ...]`.

    With `num_actions`, values of all discrete actions: observation to `[count, ..., num_actions]`. With
    `outputs_per_action` K above 1, `[count, ..., K]`: the parameters of a distribution of the return (D4PG,
    Barth-Maron et al., 2018). The action is `[..., D]`, or `[..., S, D]` for S actions of each observation.

    SAC and TD3 use the smaller value of two critics (Fujimoto et al., 2018). Each critic has its own
    parameters and its own encoder.

    Args:
      observation_spec: nest of dm_env specs of one env.
      action_size: D, width of the action `[..., D]`.
      hidden_sizes: widths of the hidden layers of each critic.
      count: number of critics.
      make_body: makes the hidden layers and the output of each, such as `networks.make_body`.
      num_actions: number of discrete actions; `action_size` is then 0.
      outputs_per_action: K, the number of outputs for each continuous action.
    """

    def __init__(
        self,
        observation_spec: Nest,
        action_size: int,
        hidden_sizes: Sequence[int] = (256, 256),
        count: int = 2,
        make_body: MakeBody = MLP,
        num_actions: int | None = None,
        outputs_per_action: int = 1,
    ):
        super().__init__()
        encoders = [ObservationEncoder(observation_spec) for _ in range(count)]
        width = encoders[0].output_size + action_size
        self.encoders = nn.ModuleList(encoders)
        outputs = num_actions or outputs_per_action
        self.heads = nn.ModuleList(make_body(width, hidden_sizes, outputs) for _ in range(count))
        self._scalar = num_actions is None and outputs == 1

    def forward(self, observation: Nest, action: torch.Tensor | None = None) -> torch.Tensor:
        features = [encoder(observation) for encoder in self.encoders]
        if action is not None:
            if action.dim() > features[0].dim():  # Each observation is encoded once for all its actions.
                features = [each.unsqueeze(-2).expand(*action.shape[:-1], -1) for each in features]
            features = [torch.cat([each, action], -1) for each in features]
        values = torch.stack([head(each) for head, each in zip(self.heads, features, strict=True)])
        return values.squeeze(-1) if self._scalar else values

    def slopes(self, observation: Nest, action: torch.Tensor) -> torch.Tensor:
        """The gradient `[count, ..., D]` of each critic's value by the action `[..., D]`; it has one, too."""
        features = [encoder(observation) for encoder in self.encoders]

        def total(actions: torch.Tensor) -> torch.Tensor:  # Each critic has an action of its own.
            inputs = [torch.cat(pair, -1) for pair in zip(features, actions.unbind(), strict=True)]
            values = [head(each).sum() for head, each in zip(self.heads, inputs, strict=True)]
            return torch.stack(values).sum()

        found: torch.Tensor = torch.func.grad(total)(action.expand(len(self.heads), *action.shape))
        return found


class Actions:
    """Converts between the environment's actions and the sampled actions of the policy's distribution.

    Discrete sampled actions count from 0. Continuous ones are in half-widths around the middle of their
    range, or in the environment's units without a range. They may exceed the range: the environment gets them
    clipped, and the learner gets them as sampled.

    Args:
      spec: the action spec of one env.
      squash: whether continuous actions are sampled between -1 and 1, by a `SquashedGaussian`, and so stay in
        their range. Dimensions whose bounds are equal are not sampled.

    Attributes:
      continuous: whether actions are real numbers.
      head_spec: the spec to pass to `make_policy_head`.

    Raises:
      ValueError: The spec is not one array, or it lacks bounds that the conversion needs.
    """

    def __init__(self, spec: Any, squash: bool = False):
        if tree.is_nested(spec) or not hasattr(spec, "shape"):
            raise ValueError(f"action spec: got {spec!r}, expected one array of actions.")
        self._shape, self._dtype = tuple(spec.shape), np.dtype(spec.dtype)
        size = int(np.prod(spec.shape, dtype=np.int64))
        self.continuous = np.issubdtype(self._dtype, np.floating)
        self._single = isinstance(spec, dm_specs.DiscreteArray)
        bounded = isinstance(spec, dm_specs.BoundedArray)
        if not self.continuous and not bounded:
            raise ValueError(
                f"action spec: got {spec!r}, expected bounds, which say how many choices there are."
            )
        low = np.broadcast_to(spec.minimum if bounded else -np.inf, spec.shape).reshape(size)
        high = np.broadcast_to(spec.maximum if bounded else np.inf, spec.shape).reshape(size)
        ranged = np.isfinite(specs.bounds(spec)).all(0).reshape(size)
        self._squash, free = self.continuous and squash, np.arange(size)
        self._torch_dtype = torch.from_numpy(np.zeros(0, self._dtype)).dtype
        self._on: dict[torch.device, list[torch.Tensor]] = {}  # `_numbers`, by device.
        if self._squash:
            free = np.flatnonzero(low < high)
            if not ranged.all() or not len(free):
                raise ValueError(
                    f"action spec: got {spec!r}, expected finite bounds, some of them not equal. Wrap the "
                    "environment, or use an agent for such actions."
                )
            self.head_spec: Any = dm_specs.BoundedArray((len(free),), np.float32, -1.0, 1.0)
        elif self.continuous:
            self.head_spec = dm_specs.Array((size,), np.float32)
        elif self._single:
            self.head_spec = spec
        else:
            counts = high.astype(np.int64) - low.astype(np.int64)
            self.head_spec = dm_specs.BoundedArray((size,), np.int64, 0, counts)
        # What `to_environment` needs: in a range, middle and half-width.
        self._numbers: list[np.ndarray] = [low, high, free]
        if self.continuous:
            middle = np.where(ranged, (np.where(ranged, low, 0) + np.where(ranged, high, 0)) / 2, 0.0)
            scale = np.where(ranged, (np.where(ranged, high, 1) - np.where(ranged, low, -1)) / 2, 1.0)
            self._numbers += [middle, scale]
        arrays: list[np.ndarray] = []  # What `drawn` needs.
        if self._squash:
            arrays = [free, middle[free], scale[free]]
        elif not self.continuous and not self._single:
            arrays = [low.astype(np.int64), self.head_spec.maximum]
        self._constants = [tuple(each.tolist()) for each in arrays]

    def make_head(self, input_size: int) -> nn.Module:
        """The head of a policy, made by `make_policy_head`."""
        return make_policy_head(input_size, self.head_spec, self._squash)

    def to_environment(self, drawn: Any) -> Any:
        """Sampled actions `[B]` or `[B, D]` to actions of the environment, `[B, *shape]`.

        Tensors stay on their device, and arrays are arrays.
        """
        is_tensor = isinstance(drawn, torch.Tensor)
        if not self._single:
            low, high, free, *line = self._on_device(drawn.device) if is_tensor else self._numbers
            if self._squash and len(free) < len(low):
                size = drawn.shape[0], len(low)
                free_ones, drawn = drawn, drawn.new_zeros(size) if is_tensor else np.zeros(size)
                drawn[:, free] = free_ones
            drawn = (line[0] + line[1] * drawn).clip(low, high) if self.continuous else drawn + low
            drawn = drawn.reshape(drawn.shape[0], *self._shape)
        return drawn.to(self._torch_dtype) if is_tensor else drawn.astype(self._dtype, copy=False)

    def _on_device(self, device: torch.device) -> list[torch.Tensor]:
        """What `to_environment` computes with, on `device`."""
        if device not in self._on:
            self._on[device] = [torch.from_numpy(np.array(each)).to(device) for each in self._numbers]
        return self._on[device]

    def drawn(self, data: Any) -> torch.Tensor:
        """The sampled actions of a batch of transitions `[N]` or rows `[N, T]`.

        Actions that may exceed their range are in the extras, as `action`.
        """
        if self.continuous and not self._squash:
            return data.extras["action"]
        if self._single:
            return data.action.long()
        flat = data.action.reshape(*data.action.shape[: data.action.dim() - len(self._shape)], -1)
        if self._squash:
            free, middle, scale = self._constants
            if len(free) < flat.shape[-1]:
                flat = flat.index_select(-1, _constant(free, torch.int64, flat.device))
            flat = flat - _constant(middle, flat.dtype, flat.device)
            return (flat / _constant(scale, flat.dtype, flat.device)).float()
        low, last = (_constant(each, torch.int64, flat.device) for each in self._constants)
        # Closing rows have action 0, which may be below the first action.
        return (flat.long() - low).clamp(min=0).minimum(last)

    @property
    def vector_size(self) -> int:
        """Width of `vectors`."""
        return self.head_spec.shape[0] if self.continuous else sum(specs.choices(self.head_spec))

    def vectors(self, drawn: torch.Tensor) -> torch.Tensor:
        """Sampled actions as networks see them, float32 `[..., vector_size]`: choices become one-hot."""
        if self.continuous:
            return drawn.float()
        if self._single:
            return one_hot(drawn, self.vector_size)
        parts = zip(drawn.unbind(-1), specs.choices(self.head_spec), strict=True)
        return torch.cat([one_hot(part, count) for part, count in parts], -1)

    def parameters(self, distribution: Any) -> dict[str, torch.Tensor]:
        """The parameters that determine this distribution."""
        if self.continuous:
            return {"mean": distribution.mean, "log_std": distribution.log_std}
        if self._single:
            return {"logits": distribution.logits}
        return {"logits": torch.cat([part.logits for part in distribution.parts], -1)}

    def distribution(self, parameters: dict[str, torch.Tensor]) -> Any:
        """The distribution with these `parameters`."""
        if self.continuous:
            return distributions.DiagonalGaussian(parameters["mean"], parameters["log_std"])
        if self._single:
            return distributions.Categorical(parameters["logits"])
        sizes = [int(n) + 1 for n in self.head_spec.maximum]
        return distributions.MultiCategorical(parameters["logits"], sizes)


def one_hot(choices: torch.Tensor, count: int) -> torch.Tensor:
    """Integers `[...]` as float32 `[..., count]`. That of torch reads them, so it could not be compiled."""
    return (choices.unsqueeze(-1) == torch.arange(count, device=choices.device)).float()


def _constant(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of these values that must not be changed."""
    if torch.compiler.is_compiling():  # A compiler keeps constants by itself.
        return torch.tensor(values, dtype=dtype, device=device)
    return _kept_constant(values, dtype, device)


@functools.lru_cache(maxsize=256)  # A copy to a GPU waits for it, and a CUDA graph cannot make one.
def _kept_constant(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def as_tensors(nest: Nest, device: str | torch.device | None = None) -> Nest:
    """Arrays to tensors on `device` (None: the CPU), without a copy where memory can be shared."""
    if isinstance(nest, np.ndarray):
        # torch warns about, and cannot protect, memory that must not be written.
        tensor = torch.from_numpy(nest if nest.flags.writeable else nest.copy())
        return tensor if device is None else tensor.to(device)
    if tree.is_nested(nest):
        return tree.map_structure(lambda leaf: as_tensors(leaf, device), nest)
    return torch.as_tensor(nest, device=device)


def holds_tensors(nest: Nest) -> bool:
    """Whether the leaves of an observation are tensors, not arrays. Looks at one of them."""
    while isinstance(nest, _NESTS):
        nest = next(iter(nest.values() if isinstance(nest, dict) else nest))
    return isinstance(nest, torch.Tensor)


def as_numpy(nest: Nest) -> Nest:
    """Tensors, wherever they are, to arrays. Arrays stay as they are."""
    if isinstance(nest, torch.Tensor):
        return nest.numpy(force=True)
    if type(nest) is dict:  # dm-tree costs more than these conversions
        arrays = {}
        for name, entry in nest.items():
            arrays[name] = entry.numpy(force=True) if isinstance(entry, torch.Tensor) else as_numpy(entry)
        return arrays
    if isinstance(nest, np.ndarray):
        return nest
    if type(nest) is tuple:
        return tuple([as_numpy(entry) for entry in nest])
    return tree.map_structure(as_numpy, nest)
