"""Multi-agent environments: PettingZoo's parallel API, CartPole of several agents, agents that end early."""

import gymnasium
import numpy as np
import pytest
import tree
from gymnasium import spaces

from framework import core, environments, specs
from framework.actors import EnvironmentLoop
from framework.environments import FIRST, LAST, MID
from framework.environments.multi_agent import MultiAgentCartPole
from framework.environments.testing import draw_action
from framework.types import MultiAgentTimeStep

pettingzoo = pytest.importorskip("pettingzoo")


class Visit(pettingzoo.ParallelEnv):
    """`host` stays for 4 steps; `guest` comes after the first and is terminated, or truncated, two later."""

    metadata = {"name": "visit"}
    possible_agents = ["host", "guest"]

    def __init__(self, truncates=False):
        self.truncates = truncates

    def observation_space(self, agent):
        return spaces.Box(0, 9, (1,), np.float32) if agent == "host" else spaces.Discrete(5, start=3)

    def action_space(self, agent):
        return spaces.Discrete(2, start=7) if agent == "host" else spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, seed=None, options=None):
        self.time, self.agents = 0, ["host"]
        return self.observe(), {}

    def observe(self):
        seen = {"host": np.array([self.time], np.float32), "guest": 3 + self.time}
        return {agent: seen[agent] for agent in self.agents}

    def step(self, actions):
        assert sorted(actions) == sorted(self.agents)
        assert all(self.action_space(agent).contains(actions[agent]) for agent in actions)
        self.time += 1
        leaves = [agent for agent, end in (("host", 4), ("guest", 3)) if self.time == end]
        ended = {agent: agent in leaves for agent in self.agents}
        none = dict.fromkeys(self.agents, False)
        rewards = {agent: float(self.time) for agent in self.agents}
        if self.time == 1:
            self.agents = ["host", "guest"]
        observations = self.observe()
        self.agents = [agent for agent in self.agents if agent not in leaves]
        flags = (none, ended) if self.truncates else (ended, none)
        return observations, rewards, *flags, {agent: {} for agent in ended}


def _play(environment, num_steps):
    """The time steps of a reset and `num_steps` steps, stacked to `[T + 1, B, ...]`, and the actions."""
    rng = np.random.default_rng(0)
    actions = [draw_action(environment.action_spec(), rng, environment.num_envs) for _ in range(num_steps)]
    timesteps = [tree.map_structure(np.array, environment.reset())]
    timesteps += [tree.map_structure(np.array, environment.step(action)) for action in actions]
    return tree.map_structure(lambda *leaves: np.stack(leaves), *timesteps), actions


@pytest.mark.parametrize(
    ("stepping", "truncates"), [("inline", False), ("inline", True), ("processes", True)]
)
def test_agents_that_come_late_and_end_early(stepping, truncates):
    with environments.make(
        Visit, num_envs=2, stepping=stepping, options={"truncates": truncates}
    ) as environment:
        assert specs.agents(environment.spec) == ("guest", "host")
        assert specs.agent_spec(environment.spec, "host").actions.num_values == 2
        played, _ = _play(environment, 6)
    assert isinstance(played, MultiAgentTimeStep)
    for env in range(2):
        only = tree.map_structure(lambda leaf, env=env: leaf[:, env].tolist(), played)
        assert only.step_type == [FIRST, MID, MID, MID, LAST, FIRST, MID]
        assert only.agents["host"] == only.step_type
        assert only.agents["guest"] == [FIRST, FIRST, MID, LAST, FIRST, FIRST, FIRST]
        assert only.observation["guest"] == [0, 1, 2, 3, 0, 0, 1]
        assert only.reward == {"host": [0, 1, 2, 3, 4, 0, 1], "guest": [0, 0, 2, 3, 0, 0, 0]}
        end = 1.0 if truncates else 0.0
        assert only.discount == {"host": [1, 1, 1, 1, end, 1, 1], "guest": [1, 1, 1, end, 1, 1, 1]}


def test_agents_that_are_not_named_are_told():
    class More(Visit):
        def observe(self):
            return super().observe() | {"judge": 0}

    environment = environments.make(More)
    with pytest.warns(UserWarning, match="More: got observations of judge, expected none but of guest, host"):
        environment.reset()
    with pytest.raises(environments.EnvironmentFault, match=r"reset\(\) returned observations of NoneType"):
        environments.make(type("Blank", (Visit,), {"observe": lambda self: None})).reset()


class Leaves(pettingzoo.ParallelEnv):
    """Two agents. At step 1 and 2 `first`, at step 3 `b` end, by their flags or by leaving the list."""

    metadata = {"name": "leaves"}
    possible_agents = ["a", "b"]

    def __init__(self, by, blind=False):
        self.by, self.blind = by, blind

    def observation_space(self, agent):
        return spaces.Box(-9, 9, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def each(self, value):
        return dict.fromkeys(self.possible_agents, value)

    def reset(self, seed=None, options=None):
        self.time, self.agents = 0, list(self.possible_agents)
        return self.each(np.zeros(1, np.float32)), {}

    def step(self, actions):
        assert sorted(actions) == sorted(self.agents)
        self.time += 1
        gone = {"a": self.time >= 1, "b": self.time >= 3}
        if self.by == "list":
            self.agents = [agent for agent in self.agents if not gone[agent]]
        ended = gone if self.by == "flags" else self.each(False)
        seen = {} if self.blind else self.each(np.ones(1, np.float32))
        return seen, self.each(1.0), ended, self.each(False), self.each({})


@pytest.mark.parametrize("by", ["flags", "list"])
def test_either_signal_ends_an_agent(by):
    """Agents that have ended and stay listed, and agents that leave the list without a flag."""
    played, _ = _play(environments.make(Leaves, options={"by": by}), 4)
    only = tree.map_structure(lambda leaf: leaf[:, 0].tolist(), played)
    assert only.step_type == [FIRST, MID, MID, LAST, FIRST]
    assert only.agents == {"a": [FIRST, LAST, FIRST, FIRST, FIRST], "b": [FIRST, MID, MID, LAST, FIRST]}
    end = 0.0 if by == "flags" else 1.0
    assert only.discount == {"a": [1, end, 1, 1, 1], "b": [1, 1, 1, end, 1]}
    assert only.reward == {"a": [0, 1, 0, 0, 0], "b": [0, 1, 1, 1, 0]}
    assert only.observation["a"] == [[0], [1], [0], [0], [0]]


def test_an_agent_that_plays_on_is_observed():
    environment = environments.make(Leaves, options={"by": "flags", "blind": True})
    environment.reset()
    with pytest.raises(environments.EnvironmentFault, match="returned no observation of b, expected"):
        environment.step({"a": np.zeros(1, np.int64), "b": np.zeros(1, np.int64)})


class _Idle(core.Actor):
    def __init__(self, spec):
        self.spec, self.last = spec, None

    def select_action(self, observation):
        return specs.zeros(self.spec.actions, (2,))

    def observe_first(self, timestep):
        pass

    def observe(self, action, timestep):
        self.last = timestep

    def update(self, wait=False):
        pass


def test_limits_end_the_episodes_of_all_agents():
    """Those of a wrapper, and the step budget of a loop, which makes FIRST of the steps beyond it."""
    limit = [lambda environment: environments.StepLimit(environment, 2)]
    played, _ = _play(environments.make(Visit, wrappers=limit), 5)
    assert played.step_type[:, 0].tolist() == [FIRST, MID, LAST, FIRST, MID, LAST]
    assert played.agents["host"][:, 0].tolist() == [FIRST, MID, LAST, FIRST, MID, LAST]
    assert played.agents["guest"][:, 0].tolist() == [FIRST, FIRST, LAST, FIRST, FIRST, LAST]
    environment = environments.make(Visit, num_envs=2)
    actor = _Idle(environment.spec)
    EnvironmentLoop(environment, actor).run(num_steps=5)
    assert actor.last.step_type.tolist() == [MID, FIRST]
    assert {name: kinds.tolist() for name, kinds in actor.last.agents.items()} == {
        "host": [MID, FIRST],
        "guest": [LAST, FIRST],
    }


def test_stacks_of_frames_begin_with_the_episode_of_each_agent():
    stack = [lambda environment: environments.FrameStack(environment, 2)]
    played, _ = _play(environments.make(Visit, wrappers=stack), 6)
    stacks = {name: frames[:, 0].reshape(7, 2).tolist() for name, frames in played.observation.items()}
    assert stacks["guest"] == [[0, 0], [0, 1], [1, 2], [2, 3], [0, 0], [0, 0], [0, 1]]
    assert stacks["host"] == [[0, 0], [0, 1], [1, 2], [2, 3], [3, 4], [0, 0], [0, 1]]


def test_discrete_values_that_do_not_count_from_0_are_no_violation():
    assert environments.check_environment(Visit, num_steps=20) == []


def test_a_pettingzoo_environment_by_name():
    assert environments.check_environment("pettingzoo:mpe.simple_spread_v3", num_steps=60) == []
    environment = environments.make("pettingzoo:mpe.simple_tag_v3", num_envs=2, seed=1)
    assert specs.agents(environment.spec) == ("adversary_0", "adversary_1", "adversary_2", "agent_0")
    played, _ = _play(environment, 26)
    assert played.step_type[-2:].tolist() == [[LAST, LAST], [FIRST, FIRST]]
    assert played.discount["agent_0"].min() == 1.0  # Truncated by the time limit.
    again, _ = _play(environments.make("pettingzoo:mpe.simple_tag_v3", num_envs=2, seed=1), 26)
    tree.map_structure(np.testing.assert_array_equal, played, again)


@pytest.mark.parametrize("name", ["pettingzoo:mpe.no_such_v0", "pettingzoo:nothing", "pettingzoo:utils"])
def test_unknown_names(name):
    with pytest.raises(ValueError, match=r"unknown environment .*simple_spread_v3"):
        environments.make(name)


def test_each_agent_of_cartpole_plays_as_gymnasium_does():
    environment = environments.make("multi_agent:CartPole", num_envs=3, seed=1, options={"num_agents": 2})
    assert environments.check_environment("multi_agent:CartPole") == []
    played, actions = _play(environment, 120)
    single = gymnasium.make("CartPole-v1").unwrapped
    num_episodes = 0
    for agent in ("agent_0", "agent_1"):
        for env in range(3):
            over = True
            for time in range(121):
                of_agent = [field[agent][time, env] for field in (played.agents, played.observation)]
                step_type, observation = of_agent
                if step_type == FIRST:
                    assert over
                    if played.step_type[time, env] == FIRST:  # Else the agent waits for the other one.
                        single.reset()
                        single.state, over = np.float64(observation), False
                    else:
                        assert not observation.any()
                    continue
                expected, reward, terminated, _, _ = single.step(int(actions[time - 1][agent][env]))
                np.testing.assert_allclose(observation, expected, rtol=1e-4, atol=1e-6)
                assert reward == played.reward[agent][time, env] == 1.0
                assert played.discount[agent][time, env] == 1.0 - terminated
                assert step_type == (LAST if terminated else MID)
                over = terminated
                num_episodes += over
    assert num_episodes >= 12


def test_cartpole_is_truncated():
    environment = MultiAgentCartPole(num_agents=2, num_envs=1, seed=3, max_episode_steps=5)
    played, _ = _play(environment, 6)
    assert played.step_type[:, 0].tolist() == [FIRST, MID, MID, MID, MID, LAST, FIRST]
    assert played.agents["agent_1"][-2:, 0].tolist() == [LAST, FIRST]
    assert played.discount["agent_1"].min() == 1.0
    with pytest.raises(ValueError, match="num_agents: got 0"):
        MultiAgentCartPole(num_agents=0)
