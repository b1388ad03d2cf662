"""Population-based training (Jaderberg et al., 2017): members train apart, and the worst copy the best.

```text
member 0   |train|score 90        |          |train|...
member 1   |train|score 480, best |──┐       |train|...
member 2   |train|score 30, worst |◀─┴─ copy |train|...  the learner's state of 1, settings times 0.8
```
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import launch
from framework import config_checks, flow
from framework.actors import EnvironmentLoop, PolicyActor
from framework.checkpoints import torch_part
from framework.own_settings import seeded
from framework.programs.make import environment_spec, make_environment
from framework.replay import EmbeddedClient
from framework.runs.checkpoints import newest_checkpoint, run_checkpoints
from framework.runs.parts import make_logger
from framework.runs.run_config import RunConfig
from framework.torch_agents import TorchAgent
from framework.variables import VariableBlock, VariableClient
from framework.workers.collector import Collector
from framework.workers.worker import ProgramWorker, Setup, derive_seed, make_tables, prepare_process

# By the name of a setting of the agent, its bounds.
Search = Mapping[str, tuple[float, float]]

# What the program of a population has no use for.
_UNUSED = {"num_actors": 1, "num_learners": 1, "inference": "local", "init": None, "max_learner_steps": None}


class Member:
    """An agent with its envs, learner and tables, in a node of its own.

    Args:
      setup: makes the parts.
      settings: fields of the agent's config, in place of its own.
      index: index of this member, whose part of a checkpoint is `member-INDEX`.
    """

    def __init__(self, setup: Setup, settings: Mapping[str, float], index: int):
        seed = derive_seed(setup.config.seed, f"member-{index}")
        reader, saved = newest_checkpoint(setup.config), None
        if reader is not None:
            saved, seed = reader.state(f"member-{index}"), derive_seed(seed, reader.path.name)
        prepare_process(seed)
        self._setup, self._seed, agent = setup, seed, setup.agent
        self._environment = setup.make_environment(setup.config.envs_per_actor, seed)
        self._games = setup.make_environment(setup.config.num_evaluation_episodes, 0, evaluation=True)  # type: ignore[call-arg]
        client = EmbeddedClient(make_tables(setup, seed), concurrent=False)
        self._adder, self._dataset = agent.make_adder(client, setup.spec), agent.make_dataset(client)
        self.load(saved or {"settings": settings, "learner": None})

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on with another member's settings, and with the state of its learner if that is not None."""
        self.settings, agent = dict(state["settings"]), copy.copy(self._setup.agent)
        agent.config = dataclasses.replace(agent.config, **self.settings)  # type: ignore[attr-defined]
        with seeded(self._seed):
            self._networks, learned = (agent.make_networks(self._setup.spec) for _ in range(2))
            self.learner = agent.make_learner(learned, self._setup.spec)
        if state["learner"] is not None:
            self.learner.restore(state["learner"])
        self._agent, policy, self._versions = agent, agent.make_policy(self._networks), itertools.count()
        self._block = VariableBlock(self.learner.parameters())
        variables = VariableClient(self._block, self._networks, policy)
        self._adder.reset()
        self._collector = Collector(
            self._environment, policy, self._adder, variables=variables, seed=self._seed, updates=False
        )
        self._publish()

    def train(self, env_steps: int) -> dict[str, Any]:
        """Makes env steps, and the learner steps that replay allows; returns `result`.

        The score is minus infinity after a step that was not finite, and there is no state.
        """
        made = 0
        try:
            while made < env_steps:
                if launch.stop_event().is_set():
                    raise launch.ProgramStopped("member: the program stops.")
                taken = self._collector.step(env_steps - made).made
                made, self.learner.env_steps = made + taken, self.learner.env_steps + taken
                while self._dataset.ready():
                    sample = next(self._dataset)
                    result = self.learner.step(sample)
                    if result.priorities is not None:
                        self._dataset.update_priorities(sample.info.key, result.priorities)
                    self._publish()
            return {**self.result(), "learner": self.learner.save()}
        except FloatingPointError:
            return {"score": -np.inf, "settings": self.settings, "learner": None}

    def result(self) -> dict[str, Any]:
        """The score, which is the mean return of greedy episodes, and the settings."""
        policy = self._agent.make_policy(self._networks, evaluation=True)
        actor = PolicyActor(policy, num_envs=self._games.num_envs)
        limit = self._setup.config.evaluation_limit
        loop = EnvironmentLoop(self._games, actor, should_update=False, max_episode_steps=limit)
        played = self._agent.play(loop, policy, self._games.num_envs)
        return {"score": float(played["episode_return"].mean()), "settings": self.settings}

    def _publish(self) -> None:
        self._block.publish(next(self._versions), self.learner.parameters(), self.learner.env_steps)
        self._collector.update()

    def close(self) -> None:
        """Closes the environments, and the adder and dataset."""
        self._adder.close(timeout=0.0)
        for each in (self._dataset, self._environment, self._games):
            each.close()


class Population(ProgramWorker):
    """Trains members round by round; see `make_population`.

    Args:
      members: clients of the nodes of the `Member`s.
      config: the settings; so are `search`, `copies` and `factors`.

    Attributes:
      plan: the flow of rounds, each a list of the members' results after the copies.
    """

    def __init__(
        self, members: Sequence[Any], config: RunConfig, search: Search, copies: int, factors: Sequence[float]
    ):
        self._members = [flow.Node(client, f"member-{index}") for index, client in enumerate(members)]
        self._config, self._search, self._copies, self._factors = config, search, copies, factors
        reader = newest_checkpoint(config)
        self._made, self._logger = 0 if reader is None else reader.step, make_logger(config)
        self._steps: int = config.evaluate_period  # type: ignore[assignment]
        train = functools.partial(Member.train, env_steps=self._steps)
        self.plan = flow.Par(self._members, train).sync().map(self.select)

    def select(self, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The worst members copy one of the best, with other settings. Logs and saves the round."""
        self._made += self._steps
        random = np.random.default_rng([self._config.seed, self._made])
        order = sorted(range(len(results)), key=lambda index: -results[index]["score"])
        for loser in order[len(order) - self._copies :]:
            winner = int(random.choice(order[: self._copies]))
            settings = {
                name: _within(self._search[name], value * random.choice(self._factors))
                for name, value in results[winner]["settings"].items()
            }
            results[loser] |= {**results[winner], "settings": settings, "copied": winner}
        parts = {}
        for node, result in zip(self._members, results, strict=True):
            parts[node.name] = torch_part({name: result[name] for name in ("settings", "learner")})
            row = {name: value for name, value in result.items() if name not in ("settings", "learner")}
            if self._logger is not None:
                self._logger.write({"label": node.name, "env_steps": self._made, **row, **result["settings"]})
        if self._config.directory is not None:
            run_checkpoints(self._config).save(self._made, parts)
        pairs = zip(self._members, results, strict=True)
        for load in [node.call(Member.load, result) for node, result in pairs if "copied" in result]:
            with contextlib.suppress(launch.CallLost):  # The node starts again from the checkpoint.
                load.result()
        return results

    def step(self) -> None:
        if self._made < self._config.max_env_steps:  # type: ignore[operator]
            next(self.plan)
        else:
            self._finished = True
            launch.stop(next(flow.Par(self._members, Member.result).sync()))


def make_population(
    agent: TorchAgent,
    environment: str | Callable[..., Any],
    search: Search,
    config: RunConfig,
    *,
    members: int = 8,
    copies: int = 2,
    factors: Sequence[float] = (0.8, 1.25),
) -> launch.Program:
    """A program that trains a population.

    ```python
    config = RunConfig(envs_per_actor=8, max_env_steps=60_000, evaluate_period=5_000, directory="runs/pbt")
    program = make_population(PPO(), "gymnasium:CartPole-v1", {"learning_rate": (1e-6, 1e-1)}, config)
    results = launch.launch(program, engine="processes")
    ```

    A member is a node of its own, with `envs_per_actor` envs and a replay of its own. It makes
    `max_env_steps`, in rounds of `evaluate_period`. After a round it plays `num_evaluation_episodes` greedy
    episodes, whose mean return is its score. The same call goes on from the last round in `directory`.

    Args:
      agent: its config has the settings that are not searched.
      environment: see `make_program`.
      search: fields of the agent's config that its learner or its policy use, with their bounds. First values
        are spread evenly on a logarithmic scale.
      config: the settings of the run, of which the fields above and the fields of environments are used.
      members: number of members.
      copies: number of members that copy after a round, and of members from which they copy. 0: members
        train alone.
      factors: a copied setting is multiplied by one of these.

    Returns:
      The program. Its result is a list of a dict for each member, with `score` and `settings`.

    Raises:
      ValueError: A setting is not one of the agent's, or has no positive bounds; or there are more copies
        than half of the members.
    """
    config = config.decided({})
    for field, expected in _UNUSED.items():
        if getattr(config, field) != expected:
            config_checks.refuse(config, field, f", expected {expected!r} for a population.")
    for field in ("max_env_steps", "evaluate_period"):
        if getattr(config, field) is None:
            config_checks.refuse(config, field, ", expected a number of env steps for a population.")
    config_checks.names("search", search, [field.name for field in dataclasses.fields(agent.config)])
    for name, (low, high) in search.items():
        if not 0 < low < high:
            raise ValueError(f"search: {name}: got ({low}, {high}), expected bounds with 0 < low < high.")
    if not 0 <= 2 * copies <= members:
        raise ValueError(f"copies: got {copies}, expected 0 to {members // 2}, half of the members.")
    make_envs = functools.partial(make_environment, agent, environment, config)
    spec = environment_spec(agent, environment, config)
    setup = Setup(agent.for_program(config.envs_per_actor), make_envs, spec, config)
    random = np.random.default_rng(config.seed)
    values = {
        name: [_within(bounds, value) for value in random.permutation(np.geomspace(*bounds, members))]
        for name, bounds in search.items()
    }
    program = launch.Program("population")
    program.seed, program.resources = config.seed, config.resources
    program.preload = ["torch", __name__, *agent.preload]
    with program.group("member"):
        clients = [
            program.add_node(
                flow.worker_node(Member, setup, {name: values[name][index] for name in search}, index)
            )
            for index in range(members)
        ]
    driver = launch.PyClassNode(Population, clients, config, search, copies, factors)
    program.add_node(driver, label="population")
    return program


def _within(bounds: tuple[float, float], value: float) -> float:
    """The value between the bounds; whole if they are."""
    clipped = float(np.clip(value, *bounds))
    return round(clipped) if all(isinstance(bound, int) for bound in bounds) else clipped
