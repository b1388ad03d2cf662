"""Environments whose specs say that observations are stacks: agents store each frame once, unasked."""

import functools
import pickle

import numpy as np
import pytest
import tree
from served_table import table

from agents import dqn, random_actions, sac
from framework import adders, environments, replay, specs
from framework.environments import wrappers

TABLE = adders.REPLAY_TABLE


def atari(**options):
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    return environments.make("atari:Breakout", num_envs=3, seed=5, options=options)


def cartpole(num_envs=3):
    return wrappers.FrameStack(environments.make("gymnasium:CartPole-v1", num_envs=num_envs, seed=5), 3)


CASES = {
    # Episodes end by lost lives (terminations) and after 120 frames (truncations), in each env on its own.
    "Atari": functools.partial(atari, life_loss_terminates=True, max_frames=120, noop_max=5),
    "Atari, two frames, not resized": functools.partial(atari, stack=2, size=None, max_frames=90),
    "FrameStack of vectors": cartpole,
}


def play(environment, adder_list, steps):
    """Random actions; how many steps of each type were seen."""
    rng = np.random.default_rng(1)
    spec = environment.action_spec()
    timestep = environment.reset()
    for adder in adder_list:
        adder.add_first(timestep)
    ends = [0, 0]
    for _ in range(steps):
        action = rng.integers(0, spec.num_values, environment.num_envs).astype(spec.dtype)
        timestep = environment.step(action)
        last = timestep.step_type == 2
        ends[0] += int(np.count_nonzero(last & (timestep.discount == 0)))
        ends[1] += int(np.count_nonzero(last & (timestep.discount > 0)))
        for adder in adder_list:
            adder.add(action, timestep)
    return ends


@pytest.mark.parametrize("case", CASES)
def test_sampled_stacks_are_the_environments_byte_for_byte(case):
    environment, n_step = CASES[case](), 3
    spec = specs.make_environment_spec(environment)
    agent = dqn.DQN(dqn.DQNConfig(n_step=n_step, discount=0.9))
    whole, once = [replay.EmbeddedClient([table(TABLE, size=10_000)]) for _ in range(2)]
    adder_list = [adders.NStepTransitionAdder(whole, n_step, 0.9), agent.make_adder(once, spec)]
    steps = 150
    ends = play(environment, adder_list, steps)
    environment.close()
    assert sum(ends) >= 6 and (case != "Atari" or min(ends) >= 1), f"terminations, truncations: {ends}"
    for each in adder_list:
        each.flush()
    a, b = [client.sample_batch(TABLE, 600) for client in (whole, once)]  # the same seed: the same items
    tree.map_structure(np.testing.assert_array_equal, a.data, b.data)
    assert len(whole.tables[TABLE]) == len(once.tables[TABLE]) > steps
    # Each frame once: one a step and env, and what the first stacks of the episodes show besides.
    frames = once.store.streams["frames"]
    assert frames.num_rows <= 3 * (steps + 1) + 2 * (sum(ends) + 3)
    assert "observations" not in once.store.streams
    for each in adder_list:
        each.close()


@pytest.mark.parametrize(
    "agent",
    [
        dqn.DQN(dqn.DQNConfig()),
        sac.SAC(sac.SACConfig()),
        random_actions.RandomActions(random_actions.RandomActionsConfig()),
    ],
    ids=["dqn", "sac", "random"],
)
@pytest.mark.parametrize("stacked", [True, False])
def test_agents_take_it_from_the_spec(agent, stacked):
    environment = cartpole() if stacked else environments.make("gymnasium:CartPole-v1", num_envs=2)
    client = replay.EmbeddedClient([table(TABLE, size=10_000)])
    adder = agent.make_adder(client, specs.make_environment_spec(environment))
    adder.add_first(environment.reset())
    action = np.zeros(environment.num_envs, np.int64)
    adder.add(action, environment.step(action))
    adder.flush()
    assert ("frames" in client.store.streams) == stacked
    adder.close()
    environment.close()


STACK = specs.StackedBoundedArray((4, 5), np.float32, 0, 1, name="x")


@pytest.mark.parametrize(
    "observations, expected",
    [
        (STACK, 4),
        ({"a": STACK, "b": specs.StackedArray((4,), np.int32)}, 4),
        ({"a": STACK, "b": specs.StackedArray((3,), np.int32)}, None),  # a row holds one frame of each leaf
        ({"a": STACK, "b": specs.Array((4,), np.int32)}, None),
        (specs.Array((4, 5), np.float32), None),
        (specs.StackedArray((1, 5), np.float32), None),
        ((), None),
    ],
)
def test_frame_stack_of_a_spec(observations, expected):
    assert specs.frame_stack(observations) == expected


def test_stacked_specs_travel():
    for spec in (STACK, specs.StackedArray((2, 3), np.uint8, name="y")):
        there = pickle.loads(pickle.dumps(spec))
        assert type(there) is type(spec) and there == spec and there.num_frames == spec.shape[0]
        assert type(spec.replace(name="z")) is type(spec)


@pytest.mark.parametrize(
    "make, wrap, expected",
    [
        (cartpole, wrappers.Flatten, None),
        (cartpole, wrappers.ObservationActionReward, None),
        (atari, lambda inner: wrappers.StepLimit(inner, 50), 4),
        (cartpole, wrappers.SinglePrecision, 3),
        (atari, functools.partial(wrappers.ActionRepeat, num_repeats=1), 4),
        (atari, functools.partial(wrappers.ActionRepeat, num_repeats=2), None),  # moves by two frames a step
    ],
    ids=["Flatten", "ObservationActionReward", "StepLimit", "SinglePrecision", "once", "twice"],
)
def test_specs_of_wrappers(make, wrap, expected):
    """What changes observations in another way does not promise stacks any more; what leaves them does."""
    environment = wrap(make())
    assert specs.frame_stack(environment.observation_spec()) == expected
    environment.close()
