"""From a factory to one env: adapters of gymnasium, dm_env and batched environments to one interface."""

from __future__ import annotations

import abc
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dm_env
import numpy as np
import tree

from framework import config_checks, specs
from framework import nest as nests
from framework.environments import simulators
from framework.environments.base import FIRST, LAST, MID, BatchedEnvironment, UnexpectedReturn, unrounded
from framework.environments.tensor import as_arrays
from framework.environments.wrappers import EnvironmentWrapper
from framework.types import MultiAgentTimeStep, Nest


class SingleEnv(abc.ABC):
    """One environment. It never starts a new episode by itself; the batch calls `reset`.

    Attributes:
      spec: its observations, actions, rewards and discounts.
      observation_starts, action_starts: per leaf, the first value of a Discrete space; empty if all are 0.
        Values of the spec count from 0. The batch adds and subtracts the start.
      agents: the step type of each agent at the last time step; None if it is the environment's.
    """

    spec: specs.EnvironmentSpec
    observation_starts: Sequence[int] = ()
    action_starts: Sequence[int] = ()
    agents: Mapping[str, int] | None = None
    _environment: Any
    #: The seed of the first reset, where the environment is not seeded when it is made.
    _seed: int | None = None

    @abc.abstractmethod
    def reset(self) -> Nest:
        """Starts an episode; returns the observation."""

    @abc.abstractmethod
    def step(self, action: Nest) -> tuple[Nest, Any, Any, int]:
        """`(observation, reward, discount, step_type)`; step_type is MID or LAST."""

    def seeder(self) -> Callable[[int], Any] | None:
        """Takes the seed with which the next episode begins; None if the environment has no such function."""
        return functools.partial(setattr, self, "_seed")

    def method(self, name: str) -> Callable[..., Any] | None:
        """A method of the environment inside all wrappers; None if it has none of that name."""
        inside = self._environment
        while isinstance(inside, EnvironmentWrapper):
            inside = inside.wrapped
        found = getattr(getattr(inside, "unwrapped", inside), name, None)
        return found if callable(found) else None

    def render(self) -> Any:
        """A picture of the present state."""
        return self._environment.render()

    def close(self) -> None:
        self._environment.close()


class GymnasiumAdapter(SingleEnv):
    """A gymnasium environment. `terminated` is LAST with discount 0, `truncated` LAST with discount 1."""

    def __init__(self, environment: Any, seed: int | None):
        self._environment = environment
        self._seed = seed
        self.spec = specs.from_spaces(environment.observation_space, environment.action_space)
        self.observation_starts = specs.discrete_offsets(environment.observation_space)
        self.action_starts = specs.discrete_offsets(environment.action_space)

    def reset(self) -> Nest:
        # Once for each seed: seeding again would repeat the same episode.
        seed, self._seed = self._seed, None
        return reset_parts(self._environment.reset(seed=seed))

    def step(self, action: Nest) -> tuple[Nest, Any, Any, int]:
        result = self._environment.step(action)
        observation, reward, terminated, truncated, _ = result if len(result) == 5 else step_parts(result)
        if terminated is not False and as_flag("terminated", terminated):
            return observation, reward, 0.0, LAST
        if truncated is not False and as_flag("truncated", truncated):
            return observation, reward, 1.0, LAST
        return observation, reward, 1.0, MID


def reset_parts(result: Any) -> Nest:
    """The observation of what `reset` of gymnasium or PettingZoo returned; else UnexpectedReturn."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping | type(None)):
        return result[0]
    raise UnexpectedReturn(
        f"returned {_outline(result)}, expected the pair (observation, info), info a dict",
        "Environments of the old gym package return the observation only; return `observation, {}`",
    )


def step_parts(result: Any) -> tuple[Any, Any, Any, Any, Any]:
    """What `step` of gymnasium or PettingZoo returned; UnexpectedReturn if not five values."""
    if isinstance(result, tuple | list) and len(result) == 5:
        return tuple(result)
    raise UnexpectedReturn(
        f"returned {_outline(result)}, expected (observation, reward, terminated, truncated, info)",
        "The `done` of the old gym package is terminated (no value after it) or truncated (a time limit)",
    )


def _outline(result: Any) -> str:
    kind, shape = type(result).__name__, getattr(result, "shape", None)
    count = f" of {len(result)} values" if isinstance(result, tuple | list | dict) else ""
    return kind + (count if shape is None else f" of shape {shape}")


def as_flag(name: str, value: Any) -> bool:
    """A flag of one env. Text, None and NaN would count as one, too: they are UnexpectedReturn."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "iubf" or array.item() not in (0, 1):
        raise UnexpectedReturn(f"returned {name} {value!r:.80}, expected a bool", "Return True or False")
    return bool(array.item())


class PettingZooAdapter(SingleEnv):
    """An environment with PettingZoo's parallel API, as nests keyed by agent."""

    def __init__(self, environment: Any, seed: int | None):
        from gymnasium import spaces

        self._environment, self._seed = environment, seed
        names = environment.possible_agents
        observations = spaces.Dict({name: self._observation_space(name) for name in names})
        actions = spaces.Dict({name: environment.action_space(name) for name in names})
        self.observation_starts = specs.discrete_offsets(observations)
        self.action_starts = specs.discrete_offsets(actions)
        spec = specs.from_spaces(observations, actions)
        self.spec = spec._replace(
            rewards=dict.fromkeys(names, spec.rewards), discounts=dict.fromkeys(names, spec.discounts)
        )
        self._over: set[str] = set()  # Agents whose episode has ended, although the environment lists them.
        # These go to agents that are not in the episode. A Discrete space may start above 0.
        zeros = specs.zeros(spec.observations)
        leaves = zip(tree.flatten(zeros), self.observation_starts, strict=True)
        self._absent = tree.unflatten_as(zeros, [leaf + leaf.dtype.type(start) for leaf, start in leaves])

    def _observation_space(self, name: str) -> Any:
        return self._environment.observation_space(name)

    def reset(self) -> Nest:
        seed, self._seed = self._seed, None
        observations, is_first = reset_parts(self._environment.reset(seed=seed)), self.agents is None
        self.agents, self._over = dict.fromkeys(self._absent, FIRST), set()
        seen = self._seen(observations, set(self._environment.agents))
        if is_first and (unknown := set(observations) - set(seen)):
            warnings.warn(
                f"{type(self._environment).__name__}: got observations of {', '.join(map(str, unknown))}, "
                f"expected none but of {', '.join(seen)}: they are left out. Name them in possible_agents."
            )
        return seen

    def step(self, action: Nest) -> tuple[Nest, Any, Any, int]:
        listed = list(self._environment.agents)
        playing = [name for name in listed if name not in self._over]
        observations, rewards, terminated, truncated, _ = step_parts(
            self._environment.step({name: action[name] for name in listed})
        )
        # An agent's episode ends by its flags or by its absence from the list, whichever comes first.
        remaining = set(self._environment.agents)
        failed = {name: as_flag(f"terminated of {name!r}", terminated[name]) for name in playing}
        ended = {
            name
            for name in playing
            if failed[name] or as_flag(f"truncated of {name!r}", truncated[name]) or name not in remaining
        }
        self._over = (self._over | ended) & remaining
        types = {name: LAST if name in ended else MID for name in playing}
        self.agents = {**dict.fromkeys(self._absent, FIRST), **types}
        if missing := [name for name in playing if name not in observations and not failed[name]]:
            raise UnexpectedReturn(
                f"returned no observation of {', '.join(missing)}, expected one of each agent that plays",
                "Return observations of all of them",
            )
        return (
            # Agents that begin have one, too.
            self._seen(observations, {*playing, *(remaining - self._over)}),
            {**dict.fromkeys(self._absent, 0.0), **{name: rewards[name] for name in playing}},
            {**dict.fromkeys(self._absent, 1.0), **{name: 1.0 - failed[name] for name in playing}},
            MID if remaining - self._over else LAST,
        )

    def _seen(self, observations: Any, present: set[str]) -> dict[str, Nest]:
        """The observation of every agent: zeros of those that are not in the episode."""
        if not isinstance(observations, Mapping):
            raise UnexpectedReturn(
                f"returned observations of {_outline(observations)}, expected a dict", "Name each agent in it"
            )
        return {
            name: observations.get(name, zero) if name in present else zero
            for name, zero in self._absent.items()
        }


class TurnBasedAdapter(PettingZooAdapter):
    """An environment with PettingZoo's turn-based API (AEC), as nests keyed by agent. A step is one move.

    Actions of agents whose turn it is not are ignored. If observations have an `action_mask`, theirs allows
    the first action only, so that what they do has probability 1. A dict has an entry `turn`, 1 for the agent
    whose turn it is, else 0: in many games a board with as many pieces of both is seen by the first player,
    who moves, and by the second, who waits, and has different values for them.
    """

    def _observation_space(self, name: str) -> Any:
        from gymnasium import spaces

        space = super()._observation_space(name)
        if not isinstance(space, spaces.Dict):
            return space
        return spaces.Dict({specs.TURN: spaces.Discrete(2), **space.spaces})

    def reset(self) -> Nest:
        seed, self._seed = self._seed, None
        self._environment.reset(seed=seed)
        self.agents = dict.fromkeys(self._absent, FIRST)
        looks = self._looks()
        return self._seen(looks, set(looks))

    def step(self, action: Nest) -> tuple[Nest, Any, Any, int]:
        game, playing = self._environment, self._playing  # Each look at its fields passes all its wrappers.
        game.step(action[self._mover])
        rewards, terminated, truncated = dict(game.rewards), game.terminations, game.truncations
        failed = {name: as_flag(f"terminated of {name!r}", terminated[name]) for name in playing}
        ended = {
            name for name in playing if failed[name] or as_flag(f"truncated of {name!r}", truncated[name])
        }
        looks = self._looks()
        if ended:
            while game.agents and game.agent_selection in ended:
                game.step(None)  # The game removes the agent.
            looks |= self._looks()
        types = {name: LAST if name in ended else MID for name in playing}
        self.agents = {**dict.fromkeys(self._absent, FIRST), **types}
        return (
            self._seen(looks, set(playing)),
            {**dict.fromkeys(self._absent, 0.0), **{name: rewards[name] for name in playing}},
            {**dict.fromkeys(self._absent, 1.0), **{name: 1.0 - failed[name] for name in playing}},
            MID if self._playing else LAST,
        )

    def _looks(self) -> dict[str, Nest]:
        """The observation of each agent in the game. Keeps which agents are in it, and whose turn it is."""
        game = self._environment
        self._playing, self._mover = list(game.agents), game.agent_selection
        looks = {name: game.observe(name) for name in self._playing}
        for name, look in looks.items():
            if isinstance(look, Mapping):
                moves = name == self._mover
                looks[name] = {specs.TURN: int(moves), **look}
                if not moves and (mask := look.get(specs.ACTION_MASK)) is not None:
                    looks[name][specs.ACTION_MASK] = (np.arange(len(mask)) == 0).astype(mask.dtype)
        return looks


class DmEnvAdapter(SingleEnv):
    """A dm_env environment; rewards and discounts may be nested or arrays and become float32."""

    def __init__(self, environment: dm_env.Environment):
        self._environment = environment
        spec = specs.make_environment_spec(environment)
        # dm_control's OrderedDicts become dicts, so that specs and values have equal types.
        spec = nests.unflattener(spec)(tree.flatten(spec))
        self.spec = spec._replace(
            rewards=tree.map_structure(_as_float32, spec.rewards),
            discounts=tree.map_structure(_as_float32, spec.discounts),
        )

    def seeder(self) -> Callable[[int], Any] | None:
        task = getattr(self._environment, "task", None)
        for generator in (getattr(task, "random", None), getattr(self._environment, "random_state", None)):
            if isinstance(generator, np.random.RandomState):  # dm_control's suite and composer
                return generator.seed
        seeder = getattr(self._environment, "seed", None)
        return seeder if callable(seeder) else None

    def reset(self) -> Nest:
        timestep = _timestep(self._environment.reset())
        if not timestep.first():
            found = f"returned step_type {timestep.step_type!r}, expected FIRST"
            raise UnexpectedReturn(found, "Return dm_env.restart(observation)")
        return timestep.observation

    def step(self, action: Nest) -> tuple[Nest, Any, Any, int]:
        step_type, reward, discount, observation = _timestep(self._environment.step(action))
        if step_type == FIRST:
            raise UnexpectedReturn(
                "returned FIRST although the previous step was not LAST", "End the episode with LAST"
            )
        if step_type not in (MID, LAST):
            found = f"returned step_type {step_type!r}, expected MID or LAST"
            raise UnexpectedReturn(found, "Return a dm_env.TimeStep")
        return observation, reward, discount, int(step_type)

    def render(self) -> Any:
        physics = getattr(self._environment, "physics", None)
        if physics is not None:  # dm_control, whose environments have no render()
            return physics.render(height=240, width=320, camera_id=0)
        if not callable(getattr(self._environment, "render", None)):
            raise NotImplementedError(f"{type(self._environment).__name__} has no render() method.")
        return self._environment.render()


def _timestep(result: Any) -> dm_env.TimeStep:
    if isinstance(result, dm_env.TimeStep):
        return result
    found = f"returned {_outline(result)}, expected a dm_env.TimeStep"
    raise UnexpectedReturn(found, "Return dm_env.restart(observation), dm_env.transition(…)")


class BatchOfOne(DmEnvAdapter):
    """Presents a batched environment of one env as a single one, such as one of `environments.make`."""

    def seeder(self) -> Callable[[int], Any] | None:
        def seed(number: int, envs: bool = True) -> None:
            self._environment.seed_episodes(np.array([number]), np.array([envs]))

        try:
            seed(0, False)
        except NotImplementedError:
            return None
        return seed

    def reset(self) -> Nest:
        return self._only(self._environment.reset()).observation

    def step(self, action: Nest) -> tuple[Nest, Any, Any, int]:
        batched = tree.map_structure(lambda leaf: np.asarray(leaf)[None], action)
        timestep = self._only(self._environment.step(batched))
        return timestep.observation, timestep.reward, timestep.discount, int(timestep.step_type)

    def _only(self, batch: dm_env.TimeStep | MultiAgentTimeStep) -> dm_env.TimeStep | MultiAgentTimeStep:
        exact = tree.unflatten_as(batch.reward, unrounded(self._environment, batch))
        batch = batch._replace(reward=exact)
        timestep = tree.map_structure(lambda leaf: leaf[0], batch)
        if isinstance(timestep, MultiAgentTimeStep):
            self.agents = timestep.agents
        return timestep


def _as_float32(spec: specs.Array) -> specs.Array:
    if isinstance(spec, specs.BoundedArray):
        with np.errstate(over="ignore"):  # Larger bounds become infinite.
            return specs.BoundedArray(spec.shape, np.float32, spec.minimum, spec.maximum, name=spec.name)
    return specs.Array(spec.shape, np.float32, name=spec.name)


def make_env(environment: Any, seed: int | None) -> SingleEnv:
    """Wraps what a factory returned.

    Raises:
      TypeError: It is neither dm_env's nor gymnasium's.
      ValueError: It is a batch of several envs.
    """
    import gymnasium  # 0.2 s

    if isinstance(environment, GymnasiumAdapter):  # One of `infos`.
        environment._seed = seed
        return environment
    if isinstance(environment, BatchedEnvironment):
        if environment.num_envs == 1:
            return BatchOfOne(as_arrays(environment))
        raise ValueError(
            f"environment factory: got a batch of {environment.num_envs} envs, expected one env. Give the "
            "factory a parameter num_envs, so that each node can ask for the envs that it steps."
        )
    if isinstance(environment, gymnasium.Env):
        return GymnasiumAdapter(environment, seed)
    pettingzoo = sys.modules.get("pettingzoo")  # Whoever makes its environments has imported it.
    if pettingzoo is not None and isinstance(environment, pettingzoo.ParallelEnv):
        return PettingZooAdapter(environment, seed)
    if pettingzoo is not None and isinstance(environment, pettingzoo.AECEnv):
        return TurnBasedAdapter(environment, seed)
    methods = ["reset", "step", "close", "observation_spec", "action_spec", "reward_spec", "discount_spec"]
    if isinstance(environment, dm_env.Environment) or all(hasattr(environment, name) for name in methods):
        return DmEnvAdapter(environment)
    raise TypeError(
        f"the environment factory returned {type(environment).__name__}, expected a dm_env.Environment, a "
        "gymnasium.Env (environments of the old gym package: wrap them in a gymnasium.Env), a "
        "pettingzoo.ParallelEnv or a pettingzoo.AECEnv."
    )


def call_factory(
    name: str,
    factory: Callable[..., Any],
    seed: int | None,
    options: Mapping[str, Any],
    num_envs: int = 1,
) -> Any:
    """Calls `factory`; `seed` and `num_envs` are passed if it names such a parameter and `options` do not.

    `name` is the environment's, for errors.

    Warns if the seed is lost, because an environment of `environments.make` must be made with it.
    Environments of dm_env may have no random numbers, and gymnasium's are seeded at their first reset.

    Raises:
      ValueError: The factory returned an environment that it has returned before; see `simulators.take`.
    """
    known: Mapping[str, Any] = {"seed": seed, "num_envs": num_envs}
    arguments = {**{name: value for name, value in known.items() if takes(factory, name)}, **options}
    config_checks.arguments(getattr(factory, "__qualname__", "environment"), factory, options)
    since = simulators.now()
    environment = factory(**arguments)
    simulators.take(name, environment, since)
    is_lost = seed is not None and "seed" not in arguments
    if is_lost and isinstance(environment, BatchedEnvironment) and environment.takes_seed:
        warnings.warn(
            f"{name}: the factory has no parameter seed, so its environment is not seeded; add one and pass "
            "it on to environments.make."
        )
    return environment


def takes(factory: Callable[..., Any], parameter: str) -> bool:
    """Whether `factory` names `parameter`."""
    try:
        return parameter in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a builtin, say
        return False


def env_seeds(seed: int | None, num_envs: int) -> list[int | None]:
    """One independent seed per env. The seed of env i does not depend on `num_envs`."""
    if seed is None:
        return [None] * num_envs
    return [int(child.generate_state(1)[0]) for child in np.random.SeedSequence(seed).spawn(num_envs)]
