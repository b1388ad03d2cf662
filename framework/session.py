"""An agent without a program: an application steps the environments and calls the agent.

```text
act(observation) ─▶ policy ─▶ action                                              parameters
observe(...)     ─▶ adder of the env ─▶ tables ◀─ rate limiter                         ▲
learn()          ─▶ dataset ─▶ learner, as often as the replay ratio allows ───────────┘
```

All parts are the agent's own, in one thread. The tables are embedded.
"""

from __future__ import annotations

import dataclasses
import heapq
import io
import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, SupportsFloat

import dm_env
import numpy as np
import torch
import tree

from framework import core, specs
from framework.own_settings import OwnSettings, in_own_settings, seeded
from framework.parameters import NamedArrays, load_state, state_of
from framework.pickling import ObjectPickler, pickle_module
from framework.replay.client import EmbeddedClient
from framework.replay.errors import WouldBlockError
from framework.specs import EnvironmentSpec
from framework.types import FIRST, LAST, MID, Nest, Progress
from framework.variables import copy_variables


class Session:
    """Acts for any envs and learns from them, in the caller's thread. `TorchAgent.session` makes it.

    ```python
    session = DQN().session(spec, num_envs=2)
    actions = session.act(observations, ["left", "right"])                # [2, ...] to [2, ...]
    session.observe(next_observations, rewards, terminated, truncated, ["left", "right"])
    metrics = session.learn()
    ```

    Row i of every argument belongs to `env_ids[i]`. Ids are any hashable values; None numbers the rows. A
    call may have any of the envs, in any order. An id that has no open episode begins one with its next
    `act`. An id may return or never be seen again.

    Args:
      agent: the agent.
      spec: see `TorchAgent.session`; so are `num_envs` and `seed`.

    Attributes:
      networks: the parameters that act, which `learn` updates. Policies made with them stay up to date.
      env_steps: number of observed transitions.
      learner_steps: number of learner steps.

    Raises:
      ValueError: The agent wraps its environments, which it does not see here.
    """

    settings = OwnSettings()

    @in_own_settings
    def __init__(self, agent: core.Agent, spec: EnvironmentSpec, num_envs: int = 1, seed: int = 0):
        if num_envs < 1:
            raise ValueError(f"num_envs: got {num_envs}, expected at least 1.")
        agent = agent.for_program(num_envs)
        if wrappers := agent.environment_wrappers():
            raise ValueError(
                f"environment wrappers: got {list(wrappers)}, expected none. A session does not see the "
                "environments; turn off the setting of the agent that needs them."
            )
        self._agent, self._spec, self._num_envs = agent, spec, num_envs
        with seeded(seed):
            learned = agent.make_networks(spec)
            self.networks = agent.make_networks(spec)
            self._learner = agent.make_learner(learned, spec)
        self.settings = OwnSettings(state_of(learned).values())
        self._policy = agent.make_policy(self.networks)
        self._acting = NamedArrays(self.networks, self._policy.variables)
        tables = agent.make_tables(spec)
        seeds = np.random.SeedSequence(seed).generate_state(1 + len(tables))
        self._policy.seed(int(seeds[0]))
        for table, table_seed in zip(tables, seeds[1:], strict=True):
            table.set_seed(int(table_seed))
        client = EmbeddedClient(tables, concurrent=False)
        # Each env has a place, with an adder and a row of the policy's state, while its episode is open.
        self._adders = [agent.make_adder(client, spec) for _ in range(num_envs)]
        self._dataset = agent.make_dataset(client)
        self._initial = self._policy.initial_state(num_envs)
        self._state = tree.map_structure(_copy, self._initial)
        self._has_state = bool(tree.flatten(self._initial))
        self._places: dict[Hashable, int] = {}
        self._free = list(range(num_envs))  # A heap, so that the same calls have the same places.
        self._chosen: dict[int, tuple[Nest, Nest]] = {}  # By place: action and extras before `observe`.
        self.env_steps = self.learner_steps = 0
        self._publish()

    @in_own_settings
    def act(self, observation: Nest, env_ids: Sequence[Hashable] | None = None) -> Nest:
        """Chooses actions `[k, ...]` for k envs.

        Args:
          observation: nest of `[k, ...]`. What `observe` got last; at the start of an episode, the first one.
          env_ids: ids of the k envs.

        Raises:
          ValueError: An env's last action was not observed, there are more than `num_envs` open episodes, or
            an observation does not fit the spec, is not finite, or is outside a Discrete space.
          WouldBlockError: As for `observe`; it concerns envs that begin an episode.
        """
        ids, observation = self._take(env_ids, observation)
        for env in ids:
            if self._places.get(env) in self._chosen:
                raise ValueError(
                    f"act: env {env!r} has an action that was not observed. Call observe() first."
                )
        begins = [row for row, env in enumerate(ids) if env not in self._places]
        if len(begins) > len(self._free):
            raise ValueError(
                f"num_envs: got {len(begins)} new episodes beside {len(self._places)} open ones, expected at "
                f"most {self._num_envs} together. Give session() a larger num_envs, or end episodes with "
                "end_episodes()."
            )
        self._make_room("act", heapq.nsmallest(len(begins), self._free))
        for row in begins:
            place = self._places[ids[row]] = heapq.heappop(self._free)
            self._adders[place].add_first(self._timestep(FIRST, 1.0, observation, row))
        places = np.array([self._places[env] for env in ids])
        state = self._state
        if self._has_state:
            if begins:  # Kept before the policy acts: it may be interrupted, and then called again.
                new = places[begins]
                state = tree.map_structure(
                    lambda leaf, first: _put(leaf, new, first[new]), state, self._initial
                )
                self._state = state
            state = tree.map_structure(lambda leaf: leaf[places], state)
        action, extras, state = self._policy.step(observation, state)
        if self._has_state:
            self._state = tree.map_structure(lambda leaf, new: _put(leaf, places, new), self._state, state)
        for row, place in enumerate(places.tolist()):
            # The caller may change the action that it gets.
            self._chosen[place] = tree.map_structure(_copy, (_row(action, row), _row(extras, row)))
        return action

    @in_own_settings
    def observe(
        self,
        next_observation: Nest,
        reward: Nest,
        terminated: Any,
        truncated: Any = False,
        env_ids: Sequence[Hashable] | None = None,
    ) -> None:
        """Takes the responses of k environments to the actions of `act`.

        Args:
          next_observation: nest of `[k, ...]`, at the end of an episode its last observation.
          reward: `[k]`, or a nest like the spec's.
          terminated: bool `[k]` or one for all: the episode ended, and there is nothing beyond it.
          truncated: bool `[k]` or one for all: the episode was cut short.
          env_ids: ids of the k envs.

        Raises:
          ValueError: An env has no action to observe, or a value does not fit the specs. Nothing was taken.
            If an observation breaks its stack of frames, the envs before it in the call were taken.
          WouldBlockError: Replay has no room, because `learn` was not called often enough. Nothing was taken:
            call `learn`, then this again.
        """
        ids, observation = self._take(env_ids, next_observation)
        places = [self._places.get(env, -1) for env in ids]
        for env, place in zip(ids, places, strict=True):
            if place not in self._chosen:
                raise ValueError(f"observe: env {env!r} has no action to observe. Call act() first.")
        rewards = specs.batch("reward", self._spec.rewards, reward, len(ids))
        is_terminal = specs.flags("terminated", terminated, len(ids))
        ends = is_terminal | specs.flags("truncated", truncated, len(ids))
        self._make_room("observe", places)
        for row, (env, place) in enumerate(zip(ids, places, strict=True)):
            kind, discount = LAST if ends[row] else MID, 0.0 if is_terminal[row] else 1.0
            timestep = self._timestep(kind, discount, observation, row, rewards)
            action, extras = self._chosen[place]
            self._adders[place].add(action, timestep, extras)
            del self._chosen[place]
            self.env_steps += 1
            if ends[row]:
                self._end(env)

    @in_own_settings
    def end_episodes(self, env_ids: Sequence[Hashable]) -> None:
        """Ends the open episodes of envs that do not continue, as if they were truncated.

        Raises:
          WouldBlockError: As for `observe`.
        """
        ids = [env for env in dict.fromkeys(env_ids) if env in self._places]
        self._make_room("end_episodes", [self._places[env] for env in ids])
        for env in ids:
            self._adders[self._places[env]].end_episodes()
            self._chosen.pop(self._places[env], None)
            self._end(env)

    @in_own_settings
    def learn(self, max_steps: int | None = None) -> dict[str, float]:
        """Makes the learner steps that the rate limiter of replay allows now, at most `max_steps`.

        Returns:
          The metrics of the last step, with `learner_steps` and `env_steps`; empty if no step was due.
        """
        made = 0
        metrics: Mapping[str, SupportsFloat] = {}
        while made != max_steps and self._dataset.ready():
            sample = next(self._dataset)
            self._learner.env_steps = self.env_steps
            result = self._learner.step(sample)
            if result.priorities is not None:
                self._dataset.update_priorities(sample.info.key, result.priorities)
            made, metrics = made + 1, result.metrics
            self.learner_steps += 1  # Here, so that an interrupt of the next step leaves it counted.
        if not made:
            return {}
        self._publish()
        counts = {"learner_steps": float(self.learner_steps), "env_steps": float(self.env_steps)}
        return {name: float(value) for name, value in metrics.items()} | counts

    @in_own_settings
    def save(self) -> bytes:
        """The exact state: parameters, optimizer, replay, open episodes and random choices."""
        file = io.BytesIO()
        torch.save(
            {name: getattr(self, name) for name in _SAVED}
            | {
                "about": self._about,
                "learner": self._learner.save(),
                "networks": state_of(self.networks),
                "policy": self._policy.save(),
                "progress": tuple(self._policy.progress),
            },
            file,
            pickle_module=pickle_module(ObjectPickler),
        )
        return file.getvalue()

    @in_own_settings
    def restore(self, state: bytes) -> None:
        """Continues from what `save` returned, bit for bit.

        Loading can run code, so restore only what you have saved. The versions of Python and of the packages
        must be those that saved it.

        Raises:
          ValueError: The state is another agent's, or from one with other settings or networks, or from
            another number of envs. The session is as it was.
        """
        saved = torch.load(io.BytesIO(state), pickle_module=pickle_module(ObjectPickler), weights_only=False)
        about = saved.get("about", {})
        for name, value in self._about.items():
            if about.get(name) != value:
                raise ValueError(
                    f"state: got one with {name} {about.get(name)}, expected {value}. Make the session with "
                    "the agent, settings, and num_envs of the saved one."
                )
        # A part may fail when others are restored already, so another session tries it first.
        trial = Session(self._agent, self._spec, self._num_envs, seed=0)
        try:
            trial._restore(saved)
        except Exception as error:
            raise ValueError(
                f"state: got one that does not fit: {error}. Make the session with the agent, settings, and "
                "spec of the saved one."
            ) from error
        self._restore(saved)

    def _restore(self, saved: Mapping[str, Any]) -> None:
        self._learner.restore(saved["learner"])
        load_state(self.networks, saved["networks"])
        self._policy.restore(saved["policy"])
        self._policy.loaded(Progress(*saved["progress"]))
        for name in _SAVED:
            setattr(self, name, saved[name])

    @property
    def _about(self) -> dict[str, Any]:
        """What must be equal for a restore: the agent's class, the number of envs, and the settings."""
        config: Any = getattr(self._agent, "config", None)
        fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
        # They are text, since a pickle cannot hold every setting, such as a function.
        settings = {
            f"setting {field.name}": json.dumps(getattr(config, field.name), default=_name)
            for field in fields
            if field.name not in ("device", "devices")
        }
        return {"agent class": type(self._agent).__name__, "num_envs": self._num_envs, **settings}

    def _publish(self) -> None:
        copy_variables(self._learner.parameters(), self._acting.arrays)
        self._acting.loaded()
        self._policy.loaded(Progress(self.learner_steps, self.env_steps))

    def _make_room(self, call: str, places: Sequence[int]) -> None:
        """Makes room for a step of all envs before the first one is taken: all are, or none."""
        try:
            for place in places:
                self._adders[place].make_room()
        except WouldBlockError as error:
            raise WouldBlockError(
                f"{call}: replay has no room before the learner has used some experience. Call "
                f"learn(), and then {call}() again. {error}"
            ) from None

    def _end(self, env: Hashable) -> None:
        heapq.heappush(self._free, self._places.pop(env))

    def _timestep(
        self, kind: int, discount: float, observation: Nest, row: int, reward: Nest = None
    ) -> dm_env.TimeStep:
        """The time step of one env, leaves `[1, ...]`."""

        def full(spec: Any, value: float) -> np.ndarray:
            return np.full((1, *spec.shape), value, spec.dtype)

        if reward is None:
            reward = tree.map_structure(lambda spec: full(spec, 0.0), self._spec.rewards)
        else:
            reward = _row(reward, row)
        discounts = tree.map_structure(lambda spec: full(spec, discount), self._spec.discounts)
        return dm_env.TimeStep(np.array([kind]), reward, discounts, _row(observation, row))

    def _take(self, env_ids: Sequence[Hashable] | None, observation: Nest) -> tuple[list[Hashable], Nest]:
        """The ids of a call, and the observation of each of them as arrays of the spec's dtypes."""
        ids = None if env_ids is None else list(env_ids)
        count = None if ids is None else len(ids)
        observation = specs.batch("observation", self._spec.observations, observation, count)
        if ids is None:
            ids = list(range(len(tree.flatten(observation)[0])))
        if len(set(ids)) < len(ids) or not ids:
            raise ValueError(f"env_ids: got {ids}, expected at least one, and each once.")
        return ids, observation


# Attributes of the session that `save` stores as they are.
_SAVED = ("_adders", "_dataset", "_state", "_places", "_free", "_chosen", "env_steps", "learner_steps")


def _row(nest: Nest, row: int) -> Nest:
    return tree.map_structure(lambda leaf: leaf[row : row + 1], nest)


def _copy(leaf: Any) -> Any:
    """A copy of a tensor or array. Of an inference tensor, one that may be changed."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) else np.array(leaf)


def _name(value: Any) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _put(leaf: Any, rows: Any, values: Any) -> Any:
    """A copy of `leaf` with other rows."""
    copy = _copy(leaf)
    copy[rows] = values
    return copy
