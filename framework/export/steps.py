"""The step of a policy as a function of tensors only, for export and for serving."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import tree
from torch import nn
from torch.overrides import TorchFunctionMode

from framework import core, specs
from framework.multi_agent import MultiAgentPolicy
from framework.networks import as_tensors
from framework.torch_policy import TorchPolicy
from framework.types import Nest

if TYPE_CHECKING:
    from framework.programs.loading import LoadedPolicy

_LEAST = 1e-7  # The logarithm of a uniform number is finite from here on.


class PolicyStep(nn.Module):
    """`(*observation, *state, noise)` to `(*action, *next state)`, flat tuples of tensors `[B, ...]`.

    The state has the parts that a step changes, which are a memory, or noise with a correlation. What stays
    the same in an episode, such as the exploration rate of an env, is the first env's.

    Args:
      policy: its agent makes a policy of a copy of its networks.
      greedy: whether to choose as evaluations do, with no random choice. Otherwise the policy explores as the
        actors do at the step of the checkpoint, and `noise [B, K]`, float32 between 0 and 1, decides all
        random choices.

    Attributes:
      names: of the inputs and outputs: `observation/camera`, `state/0`, `noise`, `action`, `next_state/0`.
      initial: the state at the start of an episode, arrays `[1, ...]`.
      noise_size: K; 0 without random choices.

    Raises:
      ValueError: The agent's policy does not act with torch.
    """

    def __init__(self, policy: LoadedPolicy, greedy: bool = True):
        super().__init__()
        self._spec = policy.spec
        self.networks = copy.deepcopy(policy.networks)
        self._policy: Any = policy.agent.make_policy(self.networks, evaluation=greedy)
        for part in _parts(self._policy):
            if not isinstance(part, TorchPolicy):
                raise ValueError(
                    f"policy: got {type(part).__name__} of {type(policy.agent).__name__}, which does not act "
                    "with torch, expected a TorchPolicy. Act with load_policy in Python instead."
                )
            # Drawn at each step, not ahead: `_Noise` sees it.
            part.random = torch.Generator()  # type: ignore[assignment]
            # The version of an action would fix the size of the batch, and nothing asks for it here.
            part.versions = lambda drawn: ()  # type: ignore[assignment,method-assign,return-value]
        self.networks.requires_grad_(False)
        self._policy.loaded(core.Progress(version=1, env_steps=policy.step))
        state = tree.map_structure(lambda leaf: torch.as_tensor(leaf).clone(), self._policy.initial_state(1))
        rows, self._greedy = 2, greedy
        with torch.no_grad(), _Noise(greedy, rows) as noise:
            before = tree.map_structure(lambda leaf: leaf.repeat(rows, *[1] * (leaf.dim() - 1)), state)
            observation = as_tensors(specs.zeros(self._spec.observations, (rows,)))
            _, after = _act(self._policy, observation, before)
        self._draws, self.noise_size = noise.draws, sum(noise.draws)
        pairs = zip(tree.flatten(before), tree.flatten(after), strict=True)
        self._changing = [index for index, (old, new) in enumerate(pairs) if old is not new]
        self._state = state
        leaves = tree.flatten(state)
        self.initial = [leaves[index].numpy() for index in self._changing]
        numbers = range(len(self.initial))
        self.names = (
            [specs.path_name("observation", path) for path, _ in specs.leaves(self._spec.observations)]
            + [f"state/{number}" for number in numbers]
            + ["noise"] * bool(self.noise_size),
            [specs.path_name("action", path) for path, _ in specs.leaves(self._spec.actions)]
            + [f"next_state/{number}" for number in numbers],
        )

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given, count = list(inputs), len(tree.flatten(self._spec.observations))
        uniform = given.pop() if self.noise_size else None
        observation = tree.unflatten_as(self._spec.observations, given[:count])
        leaves = tree.flatten(self._state)
        for index, leaf in zip(self._changing, given[count:], strict=True):
            leaves[index] = leaf
        state = tree.unflatten_as(self._state, leaves)
        with _Noise(self._greedy, uniform=uniform, draws=self._draws):
            action, after = _act(self._policy, observation, state)
        changed = tree.flatten(after)
        return (*tree.flatten(action), *[changed[index] for index in self._changing])

    def example(self, rows: int, seed: int = 0) -> list[torch.Tensor]:
        """Inputs of `rows` rows: zeros, the initial state, and noise of this seed."""
        observations = tree.flatten(as_tensors(specs.zeros(self._spec.observations, (rows,))))
        state = [torch.from_numpy(leaf).repeat(rows, *[1] * (leaf.ndim - 1)) for leaf in self.initial]
        generator = torch.Generator().manual_seed(seed)
        noise = [torch.rand(rows, self.noise_size, generator=generator)] if self.noise_size else []
        return [*observations, *state, *noise]


def _parts(policy: core.Policy) -> Sequence[core.Policy]:
    """The policy, or the policies of the agents of a multi-agent policy."""
    return list(policy.parts.values()) if isinstance(policy, MultiAgentPolicy) else [policy]


def _act(policy: Any, observation: Nest, state: Nest) -> tuple[Nest, Nest]:
    """Actions of the environment and the next state; `step` of a policy without its conversions."""
    if not isinstance(policy, MultiAgentPolicy):
        drawn, _, state = policy.act(policy.scaled(observation), state)
        return policy.actions.to_environment(drawn), state
    actions: dict[str, Nest] = {}
    states: dict[str, Nest] = {}
    for name, group in policy.groups.items():
        before = tree.map_structure(lambda leaf: leaf.flatten(0, 1), state[name])
        rows, after = _act(policy.parts[name], group.rows(observation), before)
        actions.update(group.split(rows))
        states[name] = group.of_envs(after)
    return actions, states


class _Noise(TorchFunctionMode):
    """Random numbers from an input in place of torch's generators.

    Args:
      greedy: whether there are none: normal ones are 0, exponential ones 1, whole ones 0, and those between 0
        and 1 are 1, so that no chance is taken.
      rows: B, to find out how many numbers a step draws for each row, which `draws` then has.
      uniform: `[B, K]`, the numbers between 0 and 1.
      draws: what `draws` was before.
    """

    _SHAPED = ("rand", "randn", "randint", "rand_like", "randn_like")
    _IN_PLACE = ("exponential_", "normal_", "uniform_")
    _GREEDY = {"exponential_": 1.0, "rand": 1.0, "rand_like": 1.0, "uniform_": 1.0}

    def __init__(
        self,
        greedy: bool,
        rows: int = 0,
        uniform: torch.Tensor | None = None,
        draws: Sequence[int] = (),
    ):
        super().__init__()
        self._greedy, self._rows, self._uniform = greedy, rows, uniform
        self._known = iter(draws)
        self.draws: list[int] = []
        self._at = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, options = getattr(func, "__name__", ""), dict(kwargs or {})
        if name in self._IN_PLACE:
            names = {"normal_": ("mean", "std"), "uniform_": ("from", "to"), "exponential_": ("lambd",)}[name]
            options |= dict(zip(names, args[1:], strict=False))
            return args[0].copy_(self._made(name, args[0].shape, options))
        if name in self._SHAPED:
            options.pop("generator", None)
            if name == "randint":
                *bounds, size = args if "size" not in options else (*args, options["size"])
                low, high = (options.get("low", 0), options.get("high")) if not bounds else (0, *bounds)[-2:]
                return self._made(name, size, {"low": low, "high": high})
            shape = args[0] if args and not isinstance(args[0], int | torch.SymInt) else args
            shape = shape.shape if isinstance(shape, torch.Tensor) else shape
            return self._made(name, shape, options).to(options.get("dtype") or torch.get_default_dtype())
        if options.get("generator") is not None:
            raise ValueError(
                f"policy: got random numbers of torch's {name}, expected some of "
                f"{', '.join((*self._SHAPED, *self._IN_PLACE))}, which can be made of an input."
            )
        return func(*args, **options)

    def _made(self, name: str, shape: Any, options: Mapping[str, Any]) -> torch.Tensor:
        """Random numbers of the distribution of the function `name`."""
        if self._greedy:
            made = torch.full(tuple(shape), self._GREEDY.get(name, 0.0))
            return made.long() if name == "randint" else made
        uniform = self._take(shape)
        if name == "randint":
            low, high = options["low"], options["high"]
            return (low + (uniform * (high - low)).floor().clamp(max=high - low - 1)).long()
        if name == "exponential_":
            return -uniform.clamp(min=_LEAST).log() / options.get("lambd", 1.0)
        if name in (
            "randn",
            "randn_like",
            "normal_",
        ):  # By Box and Muller (1958): every runtime has a cosine.
            radius = (-2.0 * uniform.clamp(min=_LEAST).log()).sqrt()
            normal = radius * torch.cos(2.0 * math.pi * self._take(shape))
            return options.get("mean", 0.0) + options.get("std", 1.0) * normal
        low, high = options.get("from", 0.0), options.get("to", 1.0)
        return low + (high - low) * uniform

    def _take(self, shape: Any) -> torch.Tensor:
        """The next uniform numbers, of this shape, whose first axis has whole multiples of the rows."""
        if self._uniform is None:
            self.draws.append(math.prod(shape) // self._rows)
            return torch.rand(tuple(shape))
        count = next(self._known)
        start, self._at = self._at, self._at + count
        return self._uniform[:, start : self._at].reshape(tuple(shape))
