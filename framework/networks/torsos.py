"""From observations to features: MLPs, convolutions, encoders of nests, and recurrent cores.

Convolutions turn images `[..., C, H, W]` or `[..., H, W, C]` of uint8 or float into features
`[..., output_size]`; `framework.networks.inputs` says what is an image, and which axis has its channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import tree
from torch import nn

from framework.networks import inputs
from framework.networks.constraints import SpectralConv2d
from framework.networks.modules import LayerNorm, Linear, Module, ReLU, Tanh
from framework.networks.noisy import NoisyLinear
from framework.networks.regularization import BatchRenorm, Dropout
from framework.types import Nest

State = tuple[torch.Tensor, ...]

_RELU_GAIN = nn.init.calculate_gain("relu")
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": ReLU,
    "tanh": Tanh,
    "elu": nn.ELU,
    "silu": nn.SiLU,
}


def orthogonal_(module: nn.Linear | nn.Conv2d, gain: float) -> None:
    """Orthogonal weights with the given gain and zero biases, in place (Saxe et al., 2014)."""
    nn.init.orthogonal_(module.weight, gain)
    if module.bias is not None:
        nn.init.zeros_(module.bias)


def in_float32(layer: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    """The output of a network's last layer, float32 also with autocast.

    In bfloat16, values of actions that differ by less than 0.4 % are often equal.
    """
    device = "cpu" if inputs.is_cpu or inputs.is_meta else inputs.device.type
    if not torch.is_autocast_enabled(device):
        return layer(inputs)
    with torch.autocast(device, enabled=False):
        return layer(inputs.float())


class MLP(Module):
    """`[..., input_size]` to `[..., output_size]` through hidden layers with an activation after each.

    Args:
      input_size: width of the last axis of the input.
      hidden_sizes: widths of the hidden layers; empty for none.
      output_size: width of a last linear layer without activation, float32 also with autocast; None leaves
        it out, and the last hidden layer is the output.
      activation: relu, tanh, elu or silu.
      orthogonal_gain: gain of orthogonal weights; None keeps torch's default initialization.
      layer_norm: normalizes each hidden layer before its activation (Ba et al., 2016).
      dropout: rate of a `Dropout` of each hidden layer, before that (Hiraoka et al., 2022).
      batch_renorm: normalizes the input and each activation by `BatchRenorm` (Bhatt et al., 2024).
      noise: initial noise of the linear layers, see `NoisyLinear`. 0 is no noise, with plain layers.
    """

    output_size: int

    def __init__(
        self,
        input_size: int,
        hidden_sizes: Sequence[int] = (),
        output_size: int | None = None,
        activation: str = "relu",
        orthogonal_gain: float | None = None,
        layer_norm: bool = False,
        noise: float = 0.0,
        dropout: float = 0.0,
        batch_renorm: bool = False,
    ):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: got {activation!r}, expected one of {sorted(ACTIVATIONS)}.")
        linear = functools.partial(NoisyLinear, initial_noise=noise) if noise else Linear
        layers: list[nn.Module] = [BatchRenorm(input_size)] if batch_renorm else []
        width = input_size
        for size in hidden_sizes:
            layers.append(linear(width, size))
            if dropout:
                layers.append(Dropout(dropout))
            if layer_norm:
                layers.append(LayerNorm(size))
            layers.append(ACTIVATIONS[activation]())
            if batch_renorm:
                layers.append(BatchRenorm(size))
            width = size
        if output_size is not None:
            layers.append(linear(width, output_size))
            width = output_size
        if orthogonal_gain is not None:
            for layer in layers:
                if isinstance(layer, nn.Linear):
                    orthogonal_(layer, orthogonal_gain)
        self.layers = nn.Sequential(*layers)
        self.output_size = width
        self._output = None if output_size is None else len(layers) - 1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        # The calls of a Sequential take time.
        layers: Any = () if torch.is_grad_enabled() else self._calls
        for index, call in enumerate(layers or self.layers._modules.values()):
            inputs = in_float32(call, inputs) if index == self._output else call(inputs)
        return inputs


class _Images(Module):
    """Converts images of any layout to float `[M, C, H, W]` and restores the leading axes of the features.

    The frames of a stack of images, four axes, become channels.

    Attributes:
      divides: whether integers are divided by 255.
    """

    divides = True
    layers: nn.Sequential  # `[M, C, H, W]` float to `[M, output_size]`
    output_size: int

    def __init__(self, shape: Sequence[int]):
        super().__init__()
        if len(shape) not in (2, 3, 4):
            raise ValueError(
                f"shape: got {tuple(shape)}, expected two to four axes: (height, width), three axes as "
                "(channels, height, width), or four as (frames, channels, height, width)."
            )
        self._axes = len(shape)
        channels, self.height, self.width, self._channels_last = inputs.picture_axes(shape)
        self.channels = channels * (shape[0] if self._axes == 4 else 1)
        if min(self.height, self.width) < 3:
            raise ValueError(f"shape: got {tuple(shape)}, expected at least 3 x 3 pixels.")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        leading = images.shape[: -self._axes]
        images = images.reshape(-1, *images.shape[-self._axes :])
        if self._channels_last:
            images = images.movedim(-1, -3)
        images = images.unsqueeze(1) if self._axes == 2 else images.flatten(1, -3)
        device = images.device.type
        if torch.is_grad_enabled() and device == "cpu":
            # Learning is a fifth faster in this layout; acting on small batches is not. Convert here, while a
            # pixel is one byte.
            images = images.contiguous(memory_format=torch.channels_last)
        if images.dtype == torch.uint8:
            # Directly to the dtype of mixed precision, which represents 0 to 255 exactly.
            mixed = torch.is_autocast_enabled(device)
            images = images.to(torch.get_autocast_dtype(device) if mixed else torch.float32)
            images = images.div_(255.0) if self.divides else images
        else:
            images = _as_float(images, self.divides)
        return self.layers(images).reshape(*leading, self.output_size)


class _Stack(_Images):
    """Convolutions `(filters, size, stride)` with ReLU, then one fully connected layer with ReLU.

    That layer has `hidden_size` units, or the network's usual ones with None; 0 leaves it out.

    Images smaller than 36 pixels, such as MinAtar's 10 x 10, are too small for large strides. They get the
    network of Young and Tian (2019) instead: 16 filters of 3 x 3 and a layer of 128.
    """

    kernels: Sequence[tuple[int, int, int]]
    usual_size: int  # of the last layer
    normalizes = False  # Whether each layer is normalized before its ReLU.

    def __init__(self, shape: Sequence[int], hidden_size: int | None = None):
        super().__init__(shape)
        small = min(self.height, self.width) < 36
        kernels, size = ([(16, 3, 1)], 128) if small else (self.kernels, self.usual_size)
        hidden_size = size if hidden_size is None else hidden_size
        layers: list[nn.Module] = []
        channels, height, width = self.channels, self.height, self.width
        for filters, size, stride in kernels:
            convolution = nn.Conv2d(channels, filters, size, stride)
            orthogonal_(convolution, _RELU_GAIN)
            layers += [convolution, *([_ChannelNorm(filters)] if self.normalizes else []), nn.ReLU()]
            channels = filters
            height, width = (height - size) // stride + 1, (width - size) // stride + 1
        layers.append(nn.Flatten(1))
        self.output_size = hidden_size or channels * height * width
        if hidden_size:
            linear = Linear(channels * height * width, hidden_size)
            orthogonal_(linear, _RELU_GAIN)
            norm = [LayerNorm(hidden_size)] if self.normalizes else []
            layers += [linear, *norm, nn.ReLU()]
        self.layers = nn.Sequential(*layers)


class _ChannelNorm(nn.LayerNorm):
    """Normalizes the channels of each pixel of `[M, C, H, W]`."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.movedim(1, -1)).movedim(-1, 1)


class NatureConv(_Stack):
    """Mnih et al. (2015), with a last layer of 512; images smaller than 36 pixels get MinAtar's network."""

    kernels, usual_size = ((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512


class NormalizedConv(NatureConv):
    """`NatureConv` with layer normalization, as PQN has it (Gallici et al., 2024)."""

    normalizes = True


class ShallowConv(_Stack):
    """The shallow network of IMPALA (Espeholt et al., 2018, figure 3, left), with a last layer of 256.

    Images smaller than 36 pixels get MinAtar's network.
    """

    kernels, usual_size = ((16, 8, 4), (32, 4, 2)), 256


class DataEfficientConv(_Stack):
    """The small network of data-efficient Rainbow (van Hasselt et al., 2019), with a last layer of 256.

    It takes a seventh of the operations of `NatureConv`. Images smaller than 36 pixels get MinAtar's network.
    """

    kernels, usual_size = ((32, 5, 5), (64, 5, 5)), 256


class ResidualConv(_Images):
    """The deep residual network of IMPALA (Espeholt et al., 2018, figure 3, right).

    For each entry of `filters`: a 3 x 3 convolution, a 3 x 3 max-pooling that halves the image, and two
    residual blocks of two 3 x 3 convolutions; then one fully connected layer of 256, or of `hidden_size`.
    0 leaves it out.
    """

    filters: Sequence[int] = (16, 32, 32)
    convolution: type[nn.Conv2d] = nn.Conv2d  # of the residual blocks
    pooled_size: int | None = None  # Height and width to which images are pooled before that layer.

    def __init__(self, shape: Sequence[int], hidden_size: int | None = None):
        super().__init__(shape)
        hidden_size = 256 if hidden_size is None else hidden_size
        layers: list[nn.Module] = []
        channels, height, width = self.channels, self.height, self.width
        for count in self.filters:
            layers.append(nn.Conv2d(channels, count, 3, padding=1))
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
            layers += [_ResidualBlock(count, self.convolution), _ResidualBlock(count, self.convolution)]
            channels = count
            height, width = (height + 1) // 2, (width + 1) // 2
        if self.pooled_size is not None:
            height = width = self.pooled_size
            layers.append(nn.AdaptiveMaxPool2d(height))
        self.output_size = hidden_size or channels * height * width
        layers += [nn.ReLU(), nn.Flatten(1)]
        if hidden_size:
            layers += [Linear(channels * height * width, hidden_size), nn.ReLU()]
        self.layers = nn.Sequential(*layers)


class SpectralConv(ResidualConv):
    """The network of Beyond the Rainbow (Clark et al., 2024), with a last layer of 256, or of `hidden_size`.

    `ResidualConv` with twice the filters, spectral normalization in the residual blocks, and max-pooling to
    6 x 6 after them, whatever the size of the images is.
    """

    filters, convolution, pooled_size = (32, 64, 64), SpectralConv2d, 6


class _ResidualBlock(Module):
    def __init__(self, channels: int, convolution: type[nn.Conv2d]):
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(),
            convolution(channels, channels, 3, padding=1),
            nn.ReLU(),
            convolution(channels, channels, 3, padding=1),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images + self.layers(images)


# The values of the config field `torso`.
CONVOLUTIONS: dict[str, type[NatureConv | ShallowConv | DataEfficientConv | ResidualConv]] = {
    "nature": NatureConv,
    "normalized": NormalizedConv,
    "shallow": ShallowConv,
    "data_efficient": DataEfficientConv,
    "deep": ResidualConv,
    "spectral": SpectralConv,
}


def make_torso(name: str, size: int | None = None) -> Callable[[Sequence[int]], Any]:
    """What an `ObservationEncoder` makes of images: one of `CONVOLUTIONS`, with `size` units at its end."""
    return functools.partial(CONVOLUTIONS[name], hidden_size=size)


class ObservationEncoder(Module):
    """Encodes a nest of observations, with any leading axes, as one feature vector `[..., output_size]`.

    `framework.networks.inputs` says what is a picture, which goes through `make_convolution`, what are codes,
    which become one-hot vectors, and what is divided by 255. All other leaves are flattened. The vectors are
    concatenated and, with `hidden_sizes`, go through an MLP. The features of the
    images follow them. An `action_mask` is left out: it is for the heads.

    Args:
      observation_spec: nest of dm_env specs of one env.
      hidden_sizes: widths of the hidden layers for the leaves that are not images; empty for no MLP.
      activation: activation of those layers.
      make_convolution: shape of an image, or of a stack of images with four axes, to a module with
        `output_size`; as `CONVOLUTIONS`.

    Raises:
      ValueError: There is nothing to encode.
    """

    def __init__(
        self,
        observation_spec: Nest,
        hidden_sizes: Sequence[int] = (),
        activation: str = "relu",
        make_convolution: Callable[[Sequence[int]], Any] = NatureConv,
    ):
        super().__init__()
        self._shapes = [tuple(leaf.shape) for leaf in tree.flatten(observation_spec)]
        self._inputs = inputs.inputs_of(observation_spec)
        self._single = not tree.is_nested(observation_spec)
        # Most observations are one vector, which needs no encoding.
        plain = (inputs.NUMBERS, False, 0)
        self._is_vector = self._single and len(self._shapes[0]) == 1 and self._inputs[0] == plain
        self._has_layers = bool(hidden_sizes)
        images = {}
        width = image_features = 0
        for index, (shape, taken) in enumerate(zip(self._shapes, self._inputs, strict=True)):
            if taken.kind == inputs.PICTURE:
                images[str(index)] = make_convolution(shape)
                images[str(index)].divides = taken.divides
                image_features += images[str(index)].output_size
            elif taken.kind != inputs.MASK:
                width += int(np.prod(shape, dtype=np.int64)) * (taken.codes or 1)
        self.images = nn.ModuleDict(images)
        self.body = (
            MLP(width, hidden_sizes, activation=activation) if width and hidden_sizes else nn.Identity()
        )
        if width and hidden_sizes:
            width = hidden_sizes[-1]
        self.output_size = width + image_features
        if not self.output_size:
            raise ValueError(
                f"observation spec: got {observation_spec!r}, expected numbers besides an action mask, "
                "which the networks do not see. Add a constant if there is nothing to observe."
            )

    def forward(self, observation: Nest) -> torch.Tensor:
        if self._is_vector:
            observation = observation if observation.dtype == torch.float32 else observation.float()
            return self.body(observation) if self._has_layers else observation
        leaves = [observation] if self._single else tree.flatten(observation)
        if len(leaves) != len(self._inputs):
            raise ValueError(
                f"observation: got {len(leaves)} leaves, expected {len(self._inputs)} as in its spec."
            )
        flat, features = [], []
        for index, (leaf, taken) in enumerate(zip(leaves, self._inputs, strict=True)):
            if taken.kind == inputs.MASK:
                continue
            if taken.kind == inputs.PICTURE:
                features.append(self.images[str(index)](leaf))
                continue
            axes = len(self._shapes[index])
            if taken.kind == inputs.CODES:
                flat.append(nn.functional.one_hot(leaf.long(), taken.codes).flatten(-1 - axes).float())
            else:
                leaf = leaf.unsqueeze(-1) if axes == 0 else leaf.flatten(-axes)
                flat.append(_as_float(leaf, taken.divides))
        if flat:
            features.insert(0, self.body(flat[0] if len(flat) == 1 else torch.cat(flat, -1)))
        return features[0] if len(features) == 1 else torch.cat(features, -1)


def _as_float(leaf: torch.Tensor, divides: bool) -> torch.Tensor:
    """Integers may be divided by 255. Floats never are: they may be normalized ones."""
    return leaf / 255.0 if divides and not leaf.is_floating_point() else leaf.float()


class RecurrentCore(Module):
    """An LSTM (Hochreiter and Schmidhuber, 1997) or a GRU (Cho et al., 2014) of one or more layers.

    ```python
    state = core.initial_state(envs)
    features, state = core.step(inputs, state)                      # acting, [B, ...]
    features, _ = core.unroll(inputs, state, start_of_episode)      # learning, [N, T, ...]
    ```

    The forget gates of the LSTM start with a bias of 1 (Jozefowicz et al., 2015), not with torch's 0. With 0,
    each step halves the memory, and after ten steps hardly any signal is left to learn from.

    A state is a tuple of `[B, hidden_size]`: for each layer, hidden and cell of an LSTM, hidden of a GRU;
    zeros at the start of an episode. `step` and `unroll` use the same cells: for one time step a cell is
    about ten times as fast as `nn.LSTM`, and in a sequence the state must restart wherever an episode does.

    Args:
      input_size: width of the inputs.
      hidden_size: width of the state and of the output, `output_size`.
      kind: "lstm" or "gru".
      layers: number of layers, each of which gets the output of the one before it.
    """

    def __init__(self, input_size: int, hidden_size: int, kind: str = "lstm", layers: int = 1):
        super().__init__()
        cells: dict[str, type[nn.LSTMCell] | type[nn.GRUCell]] = {"lstm": nn.LSTMCell, "gru": nn.GRUCell}
        if kind not in cells:
            raise ValueError(f"kind: got {kind!r}, expected one of {sorted(cells)}.")
        widths = [input_size] + [hidden_size] * (layers - 1)
        made = [cells[kind](width, hidden_size) for width in widths]
        for cell in made if kind == "lstm" else ():
            with torch.no_grad():
                cell.bias_hh[hidden_size : 2 * hidden_size] += 1.0
        self.cells = nn.ModuleList(made)
        self._parts = 2 if kind == "lstm" else 1
        self.output_size = hidden_size

    def initial_state(self, batch_size: int) -> State:
        """Zeros for `batch_size` envs, on the device of the parameters."""
        weight: Any = self.cells[0].weight_hh
        count = self._parts * len(self.cells)
        return tuple(weight.new_zeros(batch_size, self.output_size) for _ in range(count))

    def step(self, inputs: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """`[B, input_size]` and a state to `[B, hidden_size]` and the next state."""
        after: State = ()
        hidden = inputs
        for index, cell in enumerate(self.cells):
            at = index * self._parts
            part: State = (cell(hidden, state[at]),) if self._parts == 1 else cell(hidden, state[at : at + 2])
            after, hidden = after + part, part[0]
        if not torch.is_grad_enabled():
            # Replay stores the states of acting. With autocast on a GPU they are bfloat16, unknown to numpy.
            after = tuple(part.to(before.dtype) for part, before in zip(after, state, strict=True))
        return hidden, after

    def unroll(
        self, inputs: torch.Tensor, state: State, start_of_episode: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, State]:
        """`[N, T, input_size]` to `[N, T, hidden_size]` and the state after the last row.

        Args:
          state: `[N, ...]` before the first row, as it was when its action was chosen.
          start_of_episode: `[N, T]`; where it is 1 or True, the state restarts before that row.
        """
        if start_of_episode is not None and start_of_episode.shape != inputs.shape[:2]:
            raise ValueError(
                f"start_of_episode: got shape {tuple(start_of_episode.shape)}, expected "
                f"{tuple(inputs.shape[:2])}, the first two axes of the inputs."
            )
        outputs = []
        for t, row in enumerate(inputs.unbind(1)):
            if start_of_episode is not None:
                restarts = (start_of_episode[:, t] != 0).unsqueeze(-1)
                state = tuple(part.masked_fill(restarts, 0.0) for part in state)
            output, state = self.step(row, state)
            outputs.append(output)
        return torch.stack(outputs, 1), state
