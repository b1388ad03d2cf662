# ruff: noqa: B905, UP035  (Python 3.8)
"""Batches of environments of gymnasium, gym or dm_env, and their specs as data."""

from __future__ import annotations

import inspect
import traceback
from typing import Any, Callable, Sequence

import numpy as np

from .messages import flatten, is_leaf, layout_of, unflatten

FIRST, MID, LAST = 0, 1, 2


def describe_spec(spec: Any) -> Any:
    """Spec data of a nest of dm_env specs: plain lists, dicts, numbers and strings.

    A leaf is a dict of `shape`, `dtype`, and where they apply `minimum` and `maximum` (a number or nested
    lists), `num_values` (of a discrete value from 0) and `stacked`.
    """
    if isinstance(spec, dict):
        return {str(key): describe_spec(value) for key, value in spec.items()}
    if isinstance(spec, (list, tuple)):
        return [describe_spec(child) for child in spec]
    data = {"shape": list(spec.shape), "dtype": np.dtype(spec.dtype).str}
    if getattr(spec, "num_values", None) is not None:
        return {**data, "num_values": int(spec.num_values)}
    if getattr(spec, "minimum", None) is not None:
        data.update(minimum=np.asarray(spec.minimum).tolist(), maximum=np.asarray(spec.maximum).tolist())
    if type(spec).__name__ in ("StackedArray", "StackedBoundedArray"):
        data["stacked"] = True
    return data


def describe_space(space: Any) -> Any:
    """Spec data of a space of gymnasium or gym. A Discrete space counts from 0, and has its `start`, too."""
    kind = type(space).__name__
    if kind == "Dict":
        return {str(key): describe_space(child) for key, child in space.spaces.items()}
    if kind == "Tuple":
        return [describe_space(child) for child in space.spaces]
    if kind not in ("Box", "Discrete", "MultiDiscrete", "MultiBinary"):
        raise TypeError(
            f"space: got {space!r}, expected Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple."
        )
    data = {"shape": list(space.shape or ()), "dtype": np.dtype(space.dtype).str}
    if kind == "Discrete":
        return {**data, "num_values": int(space.n), "start": int(getattr(space, "start", 0))}
    if kind == "MultiBinary":
        return {**data, "minimum": 0, "maximum": 1}
    if kind == "MultiDiscrete":
        first = np.asarray(getattr(space, "start", np.zeros_like(space.nvec)))
        return {**data, "minimum": first.tolist(), "maximum": (first + space.nvec - 1).tolist()}
    low, high = np.asarray(space.low), np.asarray(space.high)
    if np.isfinite(low).any() or np.isfinite(high).any():
        alike = low.ndim > 1 and (low == low.flat[0]).all() and (high == high.flat[0]).all()
        data["minimum"] = (low.flat[0] if alike else low).tolist()
        data["maximum"] = (high.flat[0] if alike else high).tolist()
    return data


class _Gymnasium:
    """One environment of gymnasium, or of gym, whose `step` may return four values."""

    def __init__(self, env: Any, seed: int | None):
        self._env, self._seed = env, seed  # The seed is the first reset's.
        self.spec = {
            "observations": describe_space(env.observation_space),
            "actions": describe_space(env.action_space),
            "rewards": {"shape": [], "dtype": "<f4"},
            "discounts": {"shape": [], "dtype": "<f4", "minimum": 0.0, "maximum": 1.0},
        }
        self.starts = [
            [leaf.pop("start", 0) for leaf in flatten(self.spec[of])] for of in ("actions", "observations")
        ]

    def reset(self) -> Any:
        seed, self._seed = self._seed, None
        if seed is not None and callable(getattr(self._env, "seed", None)):  # gym before 0.26
            self._env.seed(seed)
            seed = None
        result = self._env.reset() if seed is None else self._env.reset(seed=seed)
        is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        return result[0] if is_pair else result

    def step(self, action: Any) -> tuple[Any, Any, Any, int]:
        observation, reward, ended, *more = self._env.step(action)
        if len(more) == 2:
            terminated, truncated = ended, more[0]
        else:
            truncated = more[0].get("TimeLimit.truncated", False)
            terminated = ended and not truncated
        terminated, truncated = _flag("terminated", terminated), _flag("truncated", truncated)
        return observation, reward, 0.0 if terminated else 1.0, LAST if terminated or truncated else MID

    def close(self) -> None:
        self._env.close()


def _flag(name: str, value: Any) -> bool:
    """A flag as a bool; text, None and NaN, which would count as one, raise ValueError."""
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "iubf" or array.item() not in (0, 1):
        raise ValueError(f"{name}: got {value!r}, expected a bool.")
    return bool(array.item())


class _DmEnv:
    """One environment of dm_env."""

    def __init__(self, env: Any):
        self._env = env
        keys = ("observations", "actions", "rewards", "discounts")
        self.spec = {key: describe_spec(getattr(env, f"{key[:-1]}_spec")()) for key in keys}
        for key in ("rewards", "discounts"):
            for leaf in flatten(self.spec[key]):
                leaf["dtype"] = "<f4"
        self.starts = [[0] * len(flatten(self.spec[of])) for of in ("actions", "observations")]

    def reset(self) -> Any:
        return self._env.reset().observation

    def step(self, action: Any) -> tuple[Any, Any, Any, int]:
        step_type, reward, discount, observation = self._env.step(action)
        return observation, reward, discount, int(step_type)

    def close(self) -> None:
        if hasattr(self._env, "close"):
            self._env.close()


class EnvironmentsOf:
    """Makes batches of new environments, which `make_one()` returns one by one.

    Its parameter `seed`, if it has one, receives the env's seed.
    """

    def __init__(self, make_one: Callable[..., Any]):
        self._make_one = make_one
        try:
            self._takes_seed = "seed" in inspect.signature(make_one).parameters
        except (TypeError, ValueError):  # a builtin, say
            self._takes_seed = False
        first = self._make(None)
        self.spec = first.spec
        first.close()

    def _make(self, seed: int | None) -> Any:
        env = self._make_one(seed=seed) if self._takes_seed else self._make_one()
        return _Gymnasium(env, seed) if hasattr(env, "observation_space") else _DmEnv(env)

    def __call__(self, num_envs: int, seed: int | None) -> _Batch:
        seeds: list[int | None] = [None] * num_envs
        if seed is not None:
            children = np.random.SeedSequence(seed).spawn(num_envs)
            seeds = [int(child.generate_state(1)[0]) for child in children]
        return _Batch([self._make(each) for each in seeds], self.spec)


class _Batch:
    """Envs that are stepped one after the other, as one batch."""

    def __init__(self, envs: list[Any], spec: Any):
        self._envs, self._spec = envs, spec
        self._step_types = [LAST] * len(envs)
        first = [np.zeros(leaf["shape"], np.float32) for leaf in flatten(spec["rewards"])]
        self._first = first, [np.ones(leaf["shape"], np.float32) for leaf in flatten(spec["discounts"])]
        # Agents begin and end together, and each has a step type.
        nests = [
            set(field) if isinstance(field, dict) and not is_leaf(field) else set() for field in spec.values()
        ]
        self._num_agents = len(nests[0]) if all(nest == nests[0] for nest in nests) else 0
        self._layout = [
            (field, *leaf)
            for field in ("rewards", "discounts", "observations")
            for leaf in layout_of(spec[field], len(envs))
        ]
        action_starts, starts = envs[0].starts
        self._action_starts = action_starts
        self._starts = [0] * (len(self._layout) - len(starts)) + list(starts)

    def reset(self) -> list[np.ndarray]:
        self._step_types = [LAST] * len(self._envs)
        return self._advance([None] * len(self._envs))

    def step(self, leaves: list[np.ndarray]) -> list[np.ndarray]:
        shifted = [leaf + start if start else leaf for leaf, start in zip(leaves, self._action_starts)]
        actions = []
        for env in range(len(self._envs)):
            parts = (
                int(leaf[env]) if leaf.ndim == 1 and leaf.dtype.kind in "iu" else leaf[env].copy()
                for leaf in shifted
            )
            actions.append(unflatten(self._spec["actions"], parts))
        return self._advance(actions)

    def _advance(self, actions: list[Any]) -> list[np.ndarray]:
        rows = []
        for index, env in enumerate(self._envs):
            if self._step_types[index] == LAST:
                rewards, discounts = self._first
                observation, self._step_types[index] = env.reset(), FIRST
            else:
                observation, reward, discount, self._step_types[index] = env.step(actions[index])
                rewards = _pick(self._spec["rewards"], reward)
                discounts = _pick(self._spec["discounts"], discount)
            rows.append([*rewards, *discounts, *_pick(self._spec["observations"], observation)])
        leaves = [np.array(self._step_types, np.int64)]
        for column, leaf, start in zip(zip(*rows), self._layout, self._starts):
            leaves.append(_to_array(column, start, *leaf))
        return leaves + leaves[:1] * self._num_agents

    def close(self) -> None:
        for env in self._envs:
            try:
                env.close()
            except Exception:  # The others must be closed, too.
                traceback.print_exc()


def _to_array(column: Sequence[Any], start: int, field: str, dtype: np.dtype, shape: Any) -> np.ndarray:
    """The values of all envs as an array that fits the spec; raises ValueError if a value would change."""
    array = np.asarray(column)
    # One number may come as an array of one number.
    fits = array.shape == shape or (len(shape) == 1 and array.size == shape[0])
    numbers = array.dtype.kind in ("iubf" if dtype.kind == "f" else "iub")
    if fits and numbers:
        array = (array - start if start else array).reshape(shape)
        converted = array.astype(dtype)
        if dtype.kind == "f" or array.dtype == dtype or (converted == array).all():
            return converted
    values = f" {array.tolist()}" if array.size <= 16 else ""
    raise ValueError(
        f"{field[:-1]}: got {array.dtype}{list(array.shape[1:])}{values}, expected {dtype}{list(shape[1:])}. "
        "Make the environment agree with its spec."
    )


def _pick(data: Any, value: Any) -> list[Any]:
    """The leaves of `value` in the order of `flatten(data)`."""
    if is_leaf(data):
        return [value]
    keys = sorted(data) if isinstance(data, dict) else range(len(data))
    return [leaf for key in keys for leaf in _pick(data[key], value[key])]
