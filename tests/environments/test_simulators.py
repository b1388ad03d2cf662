"""A simulator that a factory returns twice is refused, in whatever it is wrapped, and whoever asks."""

import gc
import itertools
import weakref

import dm_env
import gymnasium
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from framework import environments
from framework.environments import testing


class Held(dm_env.Environment):
    """A wrapper of dm_env's interface, as other packages have them."""

    def __init__(self, environment):
        self._env = environment

    def reset(self):
        return self._env.reset()

    def step(self, action):
        return self._env.step(action)

    def observation_spec(self):
        return self._env.observation_spec()

    def action_spec(self):
        return self._env.action_spec()


def _cartpole():
    return gymnasium.make("CartPole-v1")


def _limited(environment):
    return gymnasium.wrappers.TimeLimit(environment, 9)


class Team(gymnasium.Env):
    """An env that steps the other environments that it is given."""

    observation_space, action_space = spaces.Discrete(2), spaces.Discrete(2)

    def __init__(self, *members):
        self.members = list(members)


def _parallel():
    module = pytest.importorskip("mpe2.simple_spread_v3")
    return module.parallel_env()


def _in_pettingzoo(environment):
    return pytest.importorskip("pettingzoo.utils").BaseParallelWrapper(environment)


def _batch():
    return environments.make(testing.EchoEnvironment)


# How the shared environment is made, and what each call of the factory makes of it.
_SHARED = {
    "itself": (testing.EchoEnvironment, lambda one: one),
    "gymnasium's wrapper": (_cartpole, _limited),
    "what is in gymnasium's": (_cartpole, lambda one: _limited(_limited(one.unwrapped))),
    "dm_env's wrapper": (testing.EchoEnvironment, lambda one: Held(Held(one))),
    "ours": (_batch, lambda one: environments.StepLimit(one, 9)),
    "ours in dm_env's": (testing.EchoEnvironment, lambda one: environments.make(lambda: Held(one))),
    "PettingZoo's wrapper": (_parallel, _in_pettingzoo),
    "one of a list": (_cartpole, lambda one: Team(_cartpole(), one)),
}


@pytest.mark.parametrize("name", _SHARED)
def test_one_simulator_for_two_envs_is_refused(name):
    make, wrap = _SHARED[name]
    shared, calls = make(), itertools.count()

    def factory():
        return wrap(shared if next(calls) else make())

    # Env 0 has its own: envs 1 and 2 share one.
    with pytest.raises(ValueError, match=r": got the same environment \(\w+\) from two calls"):
        environments.make(factory, num_envs=3)
    # A probe of the specs and another node ask one after the other.
    shared = make()
    environments.make(factory).close()
    with pytest.raises(ValueError, match="inside of the factory"):
        environments.make(factory)
    assert "got the same environment" in str(environments.check_environment(factory)[0])


_BATCHES = {
    "made of envs": lambda: environments.make(testing.EchoEnvironment, num_envs=2),
    "ours": lambda: environments.make("tasks:Navigation2D", num_envs=2),
    "gymnasium's": lambda: SyncVectorEnv([_cartpole] * 2, autoreset_mode="NextStep"),
}


@pytest.mark.parametrize("make", _BATCHES.values(), ids=_BATCHES)
def test_one_batch_for_two_users_is_refused(make):
    def factory(num_envs):
        return batch

    batch = make()
    environments.make(factory, num_envs=2)
    with pytest.raises(ValueError, match="same environment"):
        environments.make(factory, num_envs=2)


def test_one_simulator_in_a_batch_is_refused():
    def factory(num_envs):
        return SyncVectorEnv([lambda: _limited(one)] * num_envs, autoreset_mode="NextStep")

    one = _cartpole()
    with pytest.raises(ValueError, match="same environment"):
        environments.make(factory, num_envs=2)


def test_what_a_factory_makes_in_several_steps_is_its_own():
    def inner(num_envs):
        return environments.make("tasks:Navigation2D", num_envs=num_envs)

    def middle(num_envs):
        return environments.make(inner, num_envs=num_envs)

    for _ in range(2):
        environments.make(middle, num_envs=2)


def test_environments_are_gone_when_their_users_are():
    def factory():
        made.append(weakref.ref(env := _limited(_cartpole())))
        return env

    made = []
    environments.make(factory, num_envs=2).close()
    gc.collect()
    assert [env() for env in made] == [None, None]
