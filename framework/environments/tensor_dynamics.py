"""Environments in torch: B envs whose steps are functions of tensors, computed together on a device."""

from __future__ import annotations

import abc
import math
import types

import dm_env
import numpy as np
import torch

from framework import config_checks, specs
from framework.config_checks import whole_number
from framework.devices import check_visible
from framework.environments.base import FIRST, MID
from framework.environments.tensor import TensorChecker, TensorEnvironment, arrays
from framework.environments.testing import make_spec
from framework.types import Nest

_INT32 = 2**31 - 1


class TensorDynamics(TensorEnvironment):
    """A tensor environment of three functions, which subclasses define: `begin`, `advance`, and `observe`.

    First states come from numpy's generator, so that they are the same on every device. All envs share it:
    the episodes of an env depend on the number of envs, except after `seed_episodes`.

    Attributes:
      state: float64`[S, B]`, S numbers of each env.
    """

    #: S.
    state_size: int

    def __init__(
        self,
        spec: specs.EnvironmentSpec,
        num_envs: int = 1,
        seed: int | None = None,
        device: str = "cpu",
        max_episode_steps: int | None = None,
    ):
        """Makes B envs.

        Args:
          spec: the spec of one env, whose action is one array.
          num_envs: B.
          seed: seed of all first states. None: different ones in every run.
          device: torch device of the states and the time steps.
          max_episode_steps: steps after which an episode is truncated; None for no limit.
        """
        self.num_envs, self.spec = whole_number("num_envs", num_envs, 1), spec
        config_checks.device(types.SimpleNamespace(device=device), "device")
        self.device = torch.empty(0, device=check_visible("device", device)).device  # "cuda:0" for "cuda"
        limit = _INT32 if max_episode_steps is None else max_episode_steps
        self._limit = min(whole_number("max_episode_steps", limit, 1), _INT32)
        self._check_action = TensorChecker(self.device, self.name, "action", spec.actions, num_envs)
        self._rng, self._seeds = np.random.default_rng(seed), dict[int, int]()
        self._no_action = self._check_action(specs.zeros(spec.actions, (num_envs,)))[0]
        self.state = torch.zeros(self.state_size, num_envs, dtype=torch.float64, device=self.device)
        self._steps = torch.zeros(num_envs, dtype=torch.int32, device=self.device)
        # Envs whose next step starts an episode.
        self._over = torch.ones(num_envs, dtype=torch.bool, device=self.device)
        self._exact: torch.Tensor | None = None

    @abc.abstractmethod
    def begin(self, uniform: torch.Tensor) -> torch.Tensor:
        """First states float64`[S, n]`, from as many numbers in [0, 1)."""

    @abc.abstractmethod
    def advance(
        self, state: torch.Tensor, action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`(state [S, B], action [B, ...])` to the next state, reward `[B]`, and bool`[B]`: terminated.

        The arguments are left as they are, and the results are new tensors.
        """

    @abc.abstractmethod
    def observe(self, state: torch.Tensor) -> Nest:
        """The observations `[B, ...]` of a state `[S, B]`, in new tensors."""

    @property
    def exact_rewards(self) -> list[np.ndarray] | None:
        return None if self._exact is None else [arrays(self._exact)]

    def reset(self) -> dm_env.TimeStep:
        self._over = torch.ones_like(self._over)
        return self.step(self._no_action)

    @torch.no_grad()
    def step(self, action: Nest) -> dm_env.TimeStep:
        (action,) = self._check_action(action)
        first = self._over
        state, reward, terminated = self.advance(self.state, action)
        self.state = self._begin(first, state)
        self._steps.add_(1).masked_fill_(first, 0)
        terminated.masked_fill_(first, False)
        self._over = (self._steps >= self._limit).logical_or_(terminated)
        reward.masked_fill_(first, 0.0)
        self._exact = reward if reward.dtype == torch.float64 else None
        return dm_env.TimeStep(
            self._over.long().add_(MID).masked_fill_(first, FIRST),  # LAST is MID + 1.
            reward.float(),
            terminated.logical_not_().float(),
            self.observe(self.state),
        )

    def _begin(self, first: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """`state` with first states in the envs `first`, bool`[B]`."""
        envs = first.nonzero().squeeze(1)
        if not len(envs):
            return state
        uniform = self._rng.random((self.state_size, len(envs)))
        if self._seeds:
            for column, env in enumerate(envs.tolist()):
                if env in self._seeds:
                    uniform[:, column] = np.random.default_rng(self._seeds.pop(env)).random(self.state_size)
        return state.index_copy_(1, envs, self.begin(torch.from_numpy(uniform).to(self.device)))

    def seed_episodes(self, seeds: np.ndarray, envs: np.ndarray) -> None:
        self._seeds.update((int(env), int(seeds[env])) for env in np.flatnonzero(envs))

    def end_episodes(self, envs: np.ndarray) -> None:
        self._over = self._over | torch.tensor(envs, device=self.device)


def _spec(high: list[float], action: specs.Array) -> specs.EnvironmentSpec:
    """The spec of an env whose observations are within +- `high`, as gymnasium's has it."""
    bounds = np.array(high, np.float32)
    return make_spec(
        specs.BoundedArray(bounds.shape, np.float32, -bounds, bounds, name="observation"), action
    )


class CartPole(TensorDynamics):
    """Gymnasium's `CartPole-v1` (Barto et al., 1983), each step of whose states is the same to 1e-9."""

    name, state_size = "tensor:CartPole-v1", 4

    def __init__(
        self,
        num_envs: int = 1,
        seed: int | None = None,
        device: str = "cpu",
        max_episode_steps: int | None = 500,
    ):
        """See `TensorDynamics`."""
        self._angle = 12 * 2 * math.pi / 360
        spec = _spec([4.8, math.inf, 2 * self._angle, math.inf], specs.DiscreteArray(2, np.int64, "action"))
        super().__init__(spec, num_envs, seed, device, max_episode_steps)
        self._left, self._pole = torch.tensor([-10.0 / 1.1, 2.0 / 3.0], dtype=torch.float64).to(self.device)

    def begin(self, uniform: torch.Tensor) -> torch.Tensor:
        return 0.1 * uniform - 0.05

    def advance(
        self, state: torch.Tensor, action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        _, speed, angle, turning = state
        sin, cos = angle.sin(), angle.cos()
        # 9.8 m/s², a cart of 1 kg, a pole of 0.1 kg and twice 0.5 m, pushed by 10 N for 0.02 s. The fewer
        # operations, the faster:
        #   push = (±10 + 0.05 turning² sin) / 1.1
        #   turn = (9.8 sin - cos push) / (0.5 (4/3 - 0.1 cos² / 1.1))
        #   acceleration = push - 0.05 turn cos / 1.1
        push = torch.add(self._left, action, alpha=20.0 / 1.1)
        push.addcmul_(turning.square(), sin, value=0.05 / 1.1)
        turn = (9.8 * sin).addcmul_(cos, push, value=-1.0)
        turn.div_(torch.addcmul(self._pole, cos, cos, value=-0.05 / 1.1))
        acceleration = push.addcmul_(turn, cos, value=-0.05 / 1.1)
        state = torch.add(state, torch.stack((speed, acceleration, turning, turn)), alpha=0.02)
        fallen = (state[0].abs() > 2.4) | (state[2].abs() > self._angle)
        return state, torch.ones_like(fallen, dtype=torch.float32), fallen

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        return state.t().to(torch.float32, memory_format=torch.contiguous_format)


class Pendulum(TensorDynamics):
    """Gymnasium's `Pendulum-v1`, each step of whose states is the same to 1e-9."""

    name, state_size = "tensor:Pendulum-v1", 2

    def __init__(
        self,
        num_envs: int = 1,
        seed: int | None = None,
        device: str = "cpu",
        max_episode_steps: int | None = 200,
    ):
        """See `TensorDynamics`."""
        spec = _spec([1.0, 1.0, 8.0], specs.BoundedArray((1,), np.float32, -2.0, 2.0, name="action"))
        super().__init__(spec, num_envs, seed, device, max_episode_steps)

    def begin(self, uniform: torch.Tensor) -> torch.Tensor:
        return (2.0 * uniform - 1.0) * uniform.new_tensor([[math.pi], [1.0]])

    def advance(
        self, state: torch.Tensor, action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        angle, speed = state
        torque = action[:, 0].clamp(-2.0, 2.0)
        off = (angle + math.pi) % (2 * math.pi) - math.pi
        cost = off.square() + 0.1 * speed.square() + 0.001 * torque.square()
        # 10 m/s², 1 kg, 1 m, 0.05 s.
        speed = (speed + 0.05 * (15.0 * angle.sin() + 3.0 * torque)).clamp(-8.0, 8.0)
        return torch.stack((angle + 0.05 * speed, speed)), -cost, torch.zeros_like(self._over)

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        return torch.stack((state[0].cos(), state[0].sin(), state[1]), 1).float()
