"""Any nest of spaces survives the way through the batch, in and out."""

import gymnasium
import numpy as np
import tree
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from framework import environments, specs
from framework.actors import EnvironmentLoop
from framework.environments import testing
from framework.loggers import InMemoryLogger
from framework.runs.services import Counter

_LEAVES = st.one_of(
    st.builds(
        lambda shape, dtype: spaces.Box(-5, 5, tuple(shape), dtype),
        st.lists(st.integers(1, 3), max_size=2),
        st.sampled_from([np.float32, np.float64, np.int8]),
    ),
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 5), st.integers(-3, 3)),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 4), min_size=1, max_size=3)),
    st.builds(spaces.MultiBinary, st.integers(1, 4)),
)
_SPACES = st.recursive(
    _LEAVES,
    lambda children: st.one_of(
        st.lists(children, min_size=1, max_size=3).map(lambda parts: spaces.Tuple(tuple(parts))),
        st.dictionaries(st.sampled_from("dbca"), children, min_size=1, max_size=3).map(spaces.Dict),
    ),
    max_leaves=5,
)


class Mirror(gymnasium.Env):
    """Observes the action that it got, in the same space."""

    def __init__(self, space):
        self.observation_space = self.action_space = space

    def reset(self, *, seed=None, options=None):
        self.action_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(_typed(self.action_space, action)), action
        return action, 0.0, False, False, {}


def _typed(space, action):
    """Python's ints as numpy's, as ``contains`` of Dict and Tuple spaces takes both alike."""
    if isinstance(space, spaces.Dict):
        return {key: _typed(child, action[key]) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_typed(child, part) for child, part in zip(space.spaces, action, strict=True))
    return np.asarray(action, space.dtype) if not isinstance(space, spaces.Discrete) else int(action)


@given(space=_SPACES, num_envs=st.integers(1, 3), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_what_goes_in_comes_out(space, num_envs, seed):
    def vector():
        return gymnasium.vector.SyncVectorEnv([lambda: Mirror(space)] * num_envs)

    rng = np.random.default_rng(seed)
    for factory in (lambda: Mirror(space), vector):
        environment = environments.make(factory, num_envs=num_envs, seed=seed)
        spec = environment.observation_spec()
        tree.assert_same_structure(spec, environment.reset().observation)
        for _ in range(2):
            action = testing.draw_action(environment.action_spec(), rng, num_envs)
            observation = environment.step(action).observation
            tree.assert_same_structure(spec, observation)
            for leaf, sent, seen in zip(*map(tree.flatten, (spec, action, observation)), strict=True):
                assert seen.dtype == leaf.dtype and seen.shape == (num_envs, *leaf.shape)
                np.testing.assert_array_equal(sent, seen)
                if isinstance(leaf, specs.BoundedArray):
                    assert (seen >= leaf.minimum).all() and (seen <= leaf.maximum).all()


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    limits=st.lists(st.integers(1, 9), min_size=1, max_size=12),
)
@settings(max_examples=60, deadline=None)
def test_envs_of_any_length_follow_the_contract_and_limits_are_exact(lengths, limits):
    pending = iter(lengths)
    environment = environments.make(
        lambda: testing.EchoEnvironment(episode_length=next(pending), num_actions=1), num_envs=len(lengths)
    )

    class Actor:
        made = 0

        def select_action(self, observation):
            self.seen = observation[:, 0].copy()
            return np.zeros(len(lengths), np.int64)

        def observe_first(self, timestep):
            assert (timestep.step_type == 0).all()

        def observe(self, action, timestep):
            moved = timestep.step_type != 0
            self.made += moved.sum()
            np.testing.assert_array_equal(timestep.reward, np.where(moved, 100 * self.seen, 0))

        def update(self, wait=False):
            pass

    actor, counter, logger = Actor(), Counter(), InMemoryLogger()
    loop = EnvironmentLoop(environment, actor, counter, logger)
    for limit in limits:
        assert loop.run(num_steps=limit) == limit
    counts = counter.get_counts()
    assert loop.num_steps == actor.made == counts["steps"] == sum(limits)
    assert len(logger.rows) == counts.get("episodes", 0)
    for row in logger.rows:  # Every episode that has ended is whole.
        assert row["episode_length"] == lengths[row["env"]]
