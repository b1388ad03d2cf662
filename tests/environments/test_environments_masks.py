"""Environments with action masks: steps that allow nothing, several choices as one action, the board."""

import functools

import dm_env
import gymnasium
import numpy as np
import pytest

from framework import environments, specs
from framework.environments.testing import FakeEnvironment, MaskedEnvironment, TupleEnvironment, make_spec
from framework.networks import check_action_mask

ACTIONS = {"a": specs.DiscreteArray(2), "b": specs.BoundedArray((2,), np.int64, [1, 0], [3, 1])}


class Several(dm_env.Environment):
    """Takes a dict of choices, and shows a nest of masks, those of `MASKS` in turn."""

    MASKS = (([1, 0], [0, 1, 1, 1, 0]), ([0, 1], [1, 0, 0, 1, 1]), ([0, 1], [1, 1, 1, 0, 0]))

    def __init__(self):
        self.time, self.taken = -1, []

    def observation_spec(self):
        mask = {"a": specs.Array((2,), bool), "b": specs.Array((5,), bool)}
        return {"inner": {"board": specs.Array((1,), np.float32), "action_mask": mask}}

    def action_spec(self):
        return ACTIONS

    def _observe(self):
        a, b = np.array(self.MASKS[self.time][0], bool), np.array(self.MASKS[self.time][1], bool)
        return {"inner": {"board": np.zeros(1, np.float32), "action_mask": {"a": a, "b": b}}}

    def reset(self):
        self.time = 0
        return dm_env.restart(self._observe())

    def step(self, action):
        self.time += 1
        return dm_env.transition(
            float(100 * action["a"] + 10 * action["b"][0] + action["b"][1]), self._observe()
        )


def test_several_choices_as_one():
    environment = environments.make(Several, num_envs=2, wrappers=[environments.CombineActions])
    assert environment.action_spec() == specs.DiscreteArray(12, dtype=np.int64, name="action")
    timestep = environment.reset()
    # Legal: a 0, the first of b 2 or 3, the second 0; the last choice changes fastest.
    mask = timestep.observation["inner"]["action_mask"]
    assert mask.shape == (2, *environment.observation_spec()["inner"]["action_mask"].shape) == (2, 12)
    assert np.flatnonzero(mask[0]).tolist() == [2, 4]
    timestep = environment.step(np.array([2, 4]))
    assert timestep.reward.tolist() == [20.0, 30.0]
    assert np.flatnonzero(timestep.observation["inner"]["action_mask"][1]).tolist() == [6, 7]


BAD = {
    "too large": (np.array([0, 12]), r"Several: action of env 1 is .*12.*, outside 0 ... 11"),
    "negative": (np.array([-1, 0]), r"Several: action of env 0 is .*-1"),
    "real numbers": (np.zeros(2), "Several: action has dtype float64, expected int64"),
    "of another batch": (np.zeros(3, np.int64), r"action has shape \(3,\), expected \(2,\)"),
}


@pytest.mark.parametrize(("action", "message"), BAD.values(), ids=BAD)
def test_a_bad_combined_action_is_named(action, message):
    environment = environments.make(Several, num_envs=2, wrappers=[environments.CombineActions])
    environment.reset()
    with pytest.raises(environments.EnvironmentFault, match=message):
        environment.step(action)


def test_a_step_that_allows_nothing_for_a_choice_is_named():
    environment = environments.make(Several, num_envs=2)
    with environment, pytest.raises(environments.EnvironmentFault) as error:
        environment.reset()
        action = {"a": np.zeros(2, np.int64), "b": np.ones((2, 2), np.int64)}
        for _ in range(2):
            environment.step(action)
    expected = r"Several, env 0: action_mask is \[0 1 1 1 1 0 0\], expected a legal action for each choice"
    assert error.match(expected)


class InTuple(Several):
    """A mask in a tuple, of two parts with two choices: the sum of the sizes is their product."""

    def observation_spec(self):
        return specs.Array((1,), np.float32), {"action_mask": specs.Array((4,), bool)}

    def action_spec(self):
        return {"a": specs.DiscreteArray(2), "b": specs.DiscreteArray(2)}

    def _observe(self):
        return np.zeros(1, np.float32), {"action_mask": np.array([1, 0, 0, 1], bool)}


class InList(InTuple):
    def observation_spec(self):
        return list(super().observation_spec())

    def _observe(self):
        return list(super()._observe())


@pytest.mark.parametrize("one", [InTuple, InList])
def test_a_mask_in_a_tuple_or_list_becomes_that_of_combinations(one):
    environment = environments.make(one, num_envs=1, wrappers=[environments.CombineActions])
    _, entry = environment.reset().observation
    assert entry["action_mask"].tolist() == [[False, True, False, False]]
    assert environment.spec.observations[1]["action_mask"].shape == (4,)


@pytest.mark.parametrize("wrapper", ["CombineActions", "Flatten", "ObservationActionReward"])
def test_several_agents_cannot_be_combined(wrapper):
    with pytest.raises(ValueError, match=f"got .*{wrapper}.* for the agents agent_0"):
        environments.make("multi_agent:CartPole", wrappers=[getattr(environments, wrapper)])


class Stuck(gymnasium.Env):
    observation_space = gymnasium.spaces.Dict({"action_mask": gymnasium.spaces.MultiBinary(2)})
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return {"action_mask": np.zeros(2, np.int8)}, {}


def test_a_vector_environment_that_begins_with_nothing_to_do_is_named():
    def make(num_envs):
        vector = gymnasium.vector.SyncVectorEnv([Stuck] * num_envs)
        return vector

    environment = environments.make(make, num_envs=2)
    with pytest.raises(environments.EnvironmentFault, match=r"env 0: action_mask is \[0 0\]"):
        environment.reset()


UNFIT = {
    # name: (shape of the mask, actions)
    "two axes": ((2, 3), specs.BoundedArray((2,), np.int64, 0, 2)),
    "combinations": ((9,), specs.BoundedArray((2,), np.int64, 0, 2)),
    "real numbers": ((2,), specs.BoundedArray((2,), np.float32, -1, 1)),
}


@pytest.mark.parametrize(("shape", "actions"), UNFIT.values(), ids=UNFIT)
def test_a_mask_that_does_not_fit_is_not_checked(shape, actions):
    observations = {"action_mask": specs.BoundedArray(shape, np.int8, 0, 0)}
    spec = make_spec(observations=observations, actions=actions)
    repeat = functools.partial(environments.ActionRepeat, num_repeats=2)
    environment = environments.make(lambda: FakeEnvironment(spec), wrappers=[repeat])
    environment.reset()
    environment.step(np.zeros((1, 2), actions.dtype))
    if actions.dtype.kind == "i":
        with pytest.raises(ValueError, match=r"action_mask: got shapes .* expected 6 entries along one axis"):
            environments.CombineActions(environment)


def test_real_numbers_cannot_be_combined():
    with pytest.raises(ValueError, match=r"expected discrete actions only\. Use an agent for nests"):
        environments.make(TupleEnvironment, num_envs=1, wrappers=[environments.CombineActions])


def test_a_mask_cannot_be_flattened():
    with pytest.raises(ValueError, match="testing:Masked: got an observation with action_mask, expected one"):
        environments.make("testing:Masked", wrappers=[environments.Flatten])


@pytest.mark.parametrize("truncate", [False, True])
def test_the_shortest_way_over_the_board_earns_1(truncate):
    options = {"size": 3, "truncate": truncate}
    with environments.make("testing:Masked", num_envs=3, seed=1, options=options) as environment:
        observation, earned = environment.reset().observation, np.zeros(3)
        for _ in range(4):
            row, column, goal_row, goal_column = observation["board"].reshape(3, 4, 3).argmax(-1).T
            vertical = np.where(row > goal_row, 0, 1)
            action = np.where(row != goal_row, vertical, np.where(column > goal_column, 2, 3))
            assert observation["action_mask"][np.arange(3), action].all()
            assert observation["action_mask"].sum(1).min() >= 2
            timestep = environment.step(action)
            observation, earned = timestep.observation, earned + timestep.reward
        assert timestep.last().all() and (timestep.discount == float(truncate)).all()
        np.testing.assert_allclose(earned, 1.0, rtol=1e-6)
        assert not observation["action_mask"].any()
        assert environment.step(action).first().all()  # Its action is ignored.


def test_a_move_off_the_board_is_an_error():
    make = functools.partial(MaskedEnvironment, size=2)
    with environments.make(make, num_envs=1, seed=0) as environment:
        mask = environment.reset().observation["action_mask"]
        with pytest.raises(environments.EnvironmentFault, match=r"action: got .*, expected one of"):
            environment.step(np.flatnonzero(~mask[0])[:1])


def test_each_part_of_a_tuple_earns_its_share():
    options = {"choices": (3, 2), "numbers": (2,)}
    with environments.make("testing:Tuple", num_envs=4, seed=0, options=options) as environment:
        shown = environment.reset().observation
        right = (shown[:, :3].argmax(-1), shown[:, 3:5].argmax(-1), shown[:, 5:])
        assert environment.step(right).reward.tolist() == [1.0] * 4
        shown = environment.reset().observation
        wrong = ((shown[:, :3].argmax(-1) + 1) % 3, shown[:, 3:5].argmax(-1), shown[:, 5:] * 0)
        expected = (1.0 + 1.0 - np.abs(shown[:, 5:]).mean(1)) / 3
        np.testing.assert_allclose(environment.step(wrong).reward, expected, rtol=1e-5)


def test_stacked_frames_keep_the_last_mask():
    stack = functools.partial(environments.FrameStack, num_frames=3)
    plain = environments.make("testing:Masked", num_envs=2, seed=1)
    stacked = environments.make("testing:Masked", num_envs=2, seed=1, wrappers=[stack])
    check_action_mask(stacked.spec, "PPO", takes_masks=True)
    expected, timestep, boards = plain.reset(), stacked.reset(), []
    for _ in range(2):
        mask = expected.observation["action_mask"]
        np.testing.assert_array_equal(timestep.observation["action_mask"], mask)
        boards.append(expected.observation["board"])
        np.testing.assert_array_equal(timestep.observation["board"][:, -len(boards) :], np.stack(boards, 1))
        expected, timestep = plain.step(mask.argmax(1)), stacked.step(mask.argmax(1))
    of_parts = environments.make(Several, wrappers=[stack, environments.CombineActions])
    assert specs.action_mask(of_parts.spec.observations).shape == (12,)
    assert specs.action_mask(of_parts.reset().observation).shape == (1, 12)


class Narrowing(Several):
    """After each step, one value fewer of each choice is legal: the first ones stay."""

    def observation_spec(self):
        return {"action_mask": {"a": specs.Array((2,), bool), "b": specs.Array((5,), bool)}}

    def _observe(self):
        masks = [np.arange(count) < max(1, count - self.time) for count in (2, 3, 2)]
        return {"action_mask": {"a": masks[0], "b": np.concatenate(masks[1:])}}


@pytest.mark.parametrize(
    ("action", "steps"), [((0, 1, 0), 4), ((0, 2, 0), 2), ((0, 1, 1), 1), ((1, 1, 0), 1)]
)
def test_an_action_is_repeated_while_it_is_legal(action, steps):
    repeat = functools.partial(environments.ActionRepeat, num_repeats=4)
    environment = environments.make(Narrowing, num_envs=2, wrappers=[repeat])
    environment.reset()
    a, *b = action
    reward = 100 * a + 10 * b[0] + b[1]
    both = {"a": np.array([a, 0]), "b": np.array([b, [1, 0]])}  # The other env repeats it four times.
    assert environment.step(both).reward.tolist() == [steps * reward, 4 * 10]
