"""Foreign code and our arrays: what it changes in place, or uses again, changes nothing of ours."""

import functools

import dm_env
import gymnasium
import numpy as np
import pytest
import tree
from gymnasium import spaces

from framework import environments, specs
from framework.actors import EnvironmentLoop, EnvironmentLoopObserver, PolicyActor
from framework.environments import FIRST, LAST, MID, BatchedEnvironment, EnvironmentWrapper, testing
from framework.types import MultiAgentTimeStep


class InPlace(gymnasium.Env):
    """Scales its argument, and observes in one buffer: the number of the step."""

    observation_space, action_space = spaces.Box(0, 99, (1,)), spaces.Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        self.buffer = np.zeros(1, np.float32)
        return self.buffer, {}

    def step(self, action):
        assert np.abs(action).max() <= 1.0
        action *= 100.0
        self.buffer += 1
        return self.buffer, 1.0, False, bool(self.buffer[0] == 4), {}


gymnasium.register("InPlace-v0", entry_point=InPlace)


class Batch(BatchedEnvironment):
    """A batched environment of a user that does the same. `changes` are the fields of its steps."""

    def __init__(self, num_envs, changes=()):
        self.num_envs, self.changes = num_envs, dict(changes)
        self.spec = specs.from_spaces(InPlace.observation_space, InPlace.action_space)

    def reset(self):
        self.buffer = np.zeros((self.num_envs, 1), np.float32)
        return self.observed(FIRST, 0.0)

    def step(self, action):
        action *= 100.0
        self.buffer += 1
        return self.observed(MID, 1.0)._replace(**self.changes)

    def observed(self, kind, reward):
        full = functools.partial(np.full, self.num_envs)
        return dm_env.TimeStep(full(kind), full(reward), full(1.0), self.buffer)


class InPlaceWrapper(EnvironmentWrapper):
    def step(self, action):
        action *= 100.0
        timestep = super().step(np.clip(action, -1, 1))
        timestep.observation[:] += 0
        return timestep


class Spoils(EnvironmentLoopObserver):
    """Overwrites all that it gets."""

    def observe_first(self, environment, timestep):
        timestep.observation[:] = -1

    def observe(self, environment, timestep, action):
        for array in (timestep.observation, timestep.reward, timestep.step_type, action):
            array[:] = -1

    def get_metrics(self, envs):
        return {}


class Adder(Spoils):
    """A user's adder: keeps what it gets, then overwrites it."""

    def __init__(self):
        self.kept = []

    def add_first(self, timestep):
        self.observe_first(None, timestep)

    def add(self, action, timestep, extras):
        self.kept.append((action[0].tolist(), timestep.observation[0, 0], extras[0]))
        self.observe(None, timestep, action)
        extras[:] = -1


class Policy:
    """A user's policy: the same buffers at each step, and it overwrites what it sees."""

    def __init__(self):
        self.action, self.extras, self.seen = np.full((2, 2), 0.5, np.float32), np.zeros(2), []

    def initial_state(self, batch_size):
        return ()

    def step(self, observation, state):
        self.seen.append(float(observation[0, 0]))
        self.extras += 1
        observation[:] = -1
        return self.action, self.extras, state


MAKERS = {
    "inline": functools.partial(environments.make, "gymnasium:InPlace-v0"),
    "vector": functools.partial(environments.make, "gymnasium:InPlace-v0", stepping="vector"),
    "vector factory": functools.partial(
        environments.make, lambda num_envs: gymnasium.vector.SyncVectorEnv([InPlace] * num_envs)
    ),
    "batch": functools.partial(environments.make, Batch),
    "wrapper": functools.partial(environments.make, InPlace, wrappers=[InPlaceWrapper]),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_nobody_changes_what_others_get(make):
    policy, adder = Policy(), Adder()
    actor = PolicyActor(policy, adder, num_envs=2)
    loop = EnvironmentLoop(make(num_envs=2), actor, observers=[Spoils(), Spoils()])
    for _ in range(3):
        assert loop.step() is None
    assert (policy.action == 0.5).all()
    assert policy.seen == [0, 1, 2]
    assert adder.kept[:2] == [([0.5, 0.5], 1, 1), ([0.5, 0.5], 2, 2)]


def test_an_action_that_is_repeated_stays_as_it_is():
    repeat = functools.partial(environments.ActionRepeat, num_repeats=3)
    environment = environments.make(InPlace, wrappers=[repeat])
    environment.reset()
    assert environment.step(np.full((1, 2), 0.5, np.float32)).observation.tolist() == [[3.0]]


@pytest.mark.parametrize(
    ("name", "wrappers"),
    [
        ("tasks:Navigation2D", []),
        ("tasks:PointMaze", []),
        ("tasks:WindingRoad", []),
        ("gymnasium:CartPole-v1", [functools.partial(environments.FrameStack, num_frames=2)]),
        ("gymnasium:CartPole-v1", [environments.ObservationActionReward]),
    ],
)
def test_a_time_step_is_the_callers(name, wrappers):
    played = []
    for spoil in (False, True):
        environment = environments.make(name, num_envs=2, seed=1, wrappers=wrappers)
        timestep, action = environment.reset(), specs.zeros(environment.action_spec(), (2,))
        for turn in range(4):
            kept = tree.map_structure(np.array, timestep.observation)
            if spoil:
                tree.map_structure(lambda leaf: leaf.fill(9), timestep.observation)
            timestep = environment.reset() if turn == 2 else environment.step(action)
        played.append(kept)
    tree.map_structure(np.testing.assert_array_equal, *played)


_BAD = {
    "reward is None": ({"reward": np.array([None, 1.0])}, r"reward has dtype object, expected"),
    "reward is NaN": ({"reward": np.array([1.0, np.nan])}, "env 1: reward holds NaN"),
    "discount": ({"discount": np.array([1.0, 1.5])}, r"env 1: discount is .*1\.5.*outside 0"),
    "step type": ({"step_type": np.array([1, 3])}, r"env 1: step_type is .*3.*outside 0 \.\.\. 2"),
    "observation": ({"observation": np.zeros((2, 3))}, r"observation has shape \(2, 3\)"),
    "MID or LAST after LAST": ({"step_type": np.array([MID, LAST])}, "env 1: got no FIRST"),
    "reward with FIRST": ({"step_type": np.array([MID, FIRST])}, "env 1: got a reward with FIRST"),
}


@pytest.mark.parametrize(("changes", "message"), _BAD.values(), ids=_BAD)
def test_batches_of_users_are_checked_at_every_step(changes, message):
    environment = environments.make(Batch, num_envs=2, options={"changes": changes})
    environment.reset()
    with pytest.raises(environments.EnvironmentFault, match=message):
        for _ in range(2):
            environment.step(np.zeros((2, 2), np.float32))


class Together(BatchedEnvironment):
    """Its environment ends while an agent goes on."""

    def __init__(self, num_envs):
        self.num_envs, one = num_envs, testing.make_spec()
        self.spec = specs.EnvironmentSpec(*[{"a": leaf, "b": leaf} for leaf in one])

    def reset(self):
        return self.step(None, FIRST, FIRST)

    def step(self, action, kind=2, agent=MID):
        zeros = specs.zeros(self.spec, (self.num_envs,))
        kinds = np.full(self.num_envs, kind)
        agents = {"a": kinds, "b": np.full(self.num_envs, agent)}
        return MultiAgentTimeStep(kinds, zeros.rewards, zeros.discounts, zeros.observations, agents)


def test_agents_end_with_their_environment():
    environment = environments.make(Together, num_envs=2)
    environment.reset()
    with pytest.raises(environments.EnvironmentFault, match="env 0: agents: b has step type 1"):
        environment.step(specs.zeros(environment.action_spec(), (2,)))
