"""Demonstrations: recorded, in a file, and as items of replay."""

import functools

import numpy as np
import pytest
import tree

from framework import adders, demonstrations, environments, replay, specs
from framework.environments.testing import EchoEnvironment, FakeEnvironment, make_spec
from framework.types import Step


def echo(count=2, **options):
    """Episodes of three steps of an environment whose reward names the observation and the action."""
    environment = environments.make(EchoEnvironment, num_envs=1, options={"episode_length": 3, **options})
    actions = iter(range(1000))
    act = lambda observation: np.array([next(actions) % 4])  # noqa: E731
    return list(demonstrations.record(environment, act, count))


def test_the_rows_of_an_episode():
    first, second = echo()
    np.testing.assert_array_equal(first.observation[:, 0], [0, 1, 2, 3])
    np.testing.assert_array_equal(first.action, [0, 1, 2, 0])
    np.testing.assert_array_equal(first.reward, [0, 101, 202, 0])
    np.testing.assert_array_equal(first.discount, [1, 1, 0, 0])
    np.testing.assert_array_equal(second.start_of_episode, [True, False, False, False])
    np.testing.assert_array_equal(second.action, [3, 0, 1, 0])


def test_a_truncated_episode_ends_with_its_discount():
    (episode,) = echo(1, truncate=True)
    np.testing.assert_array_equal(episode.discount, [1, 1, 1, 0])


class Lost(environments.BatchedEnvironment):
    """An `EchoEnvironment` that is lost after two time steps, and replaced by one that counts from 100."""

    def __init__(self):
        make = functools.partial(environments.make, EchoEnvironment)
        self._envs = [make(options={"episode_length": 3, "first": first}) for first in (0, 100)]
        self.spec, self._steps = self._envs[0].spec, 0

    def reset(self):
        return self._envs[0].reset()

    def step(self, action):
        self._steps += 1
        return self._envs[self._steps >= 2].step(action)


def test_an_episode_that_is_cut_short_is_left_out():
    (episode,) = demonstrations.record(Lost(), lambda observation: np.array([0]), 1)
    np.testing.assert_array_equal(episode.observation[:, 0], [100, 101, 102, 103])
    np.testing.assert_array_equal(episode.start_of_episode, [True, False, False, False])


class Continued(environments.EnvironmentWrapper):
    """An environment whose first `reset` comes in mid-episode, and does not end the episode."""

    num_resets = 0

    def reset(self):
        self.num_resets += 1
        timestep = super().reset()
        if self.num_resets == 1:
            timestep = self.step(np.array([0]))._replace(step_type=timestep.step_type)
        return timestep

    @property
    def cut(self):
        return np.array([self.num_resets == 1])


def test_an_episode_that_began_before_the_reset_is_left_out():
    environment = Continued(environments.make(EchoEnvironment, options={"episode_length": 3}))
    (episode,) = demonstrations.record(environment, lambda observation: np.array([0]), 1)
    np.testing.assert_array_equal(episode.observation[:, 0], [4, 5, 6, 7])
    np.testing.assert_array_equal(episode.start_of_episode, [True, False, False, False])


def nested(num_episodes=3):
    pair = (specs.Array((), np.uint8),) * 2
    observations = {"a": specs.Array((2,), np.float32), "b": pair, "c": list(pair)}
    spec = make_spec(observations=observations)
    environment = environments.make(functools.partial(FakeEnvironment, spec, episode_length=4), num_envs=1)
    return spec, list(demonstrations.record(environment, lambda observation: np.array([1]), num_episodes))


def test_a_file_holds_nests(tmp_path):
    spec, episodes = nested()
    demonstrations.save(tmp_path / "nested.npz", episodes)
    loaded = demonstrations.load(str(tmp_path / "nested.npz"))
    assert len(loaded) == 3
    for one, other in zip(episodes, loaded, strict=True):
        tree.map_structure(np.testing.assert_array_equal, one[:5], other[:5])
    demonstrations.check(loaded, spec)
    with np.load(tmp_path / "nested.npz") as file:
        assert {"observation/a", "observation/b/1", "action", "reward", "discount"} <= {*file}


def test_episodes_of_another_environment_are_an_error():
    _, episodes = nested()
    with pytest.raises(ValueError, match=r"got the observation .*uint8.*, expected .*float32"):
        demonstrations.check(episodes, make_spec())
    with pytest.raises(ValueError, match=r"got the action .*int64.*, expected .*int32"):
        demonstrations.check(echo(), make_spec(specs.Array((1,), np.float32), specs.Array((), np.int32)))
    spec, episodes = nested()
    episodes[1] = episodes[1]._replace(reward=episodes[1].reward.astype(np.float64))
    with pytest.raises(ValueError, match=r"got the reward float64\[\], expected float32\[\]"):
        demonstrations.check(episodes, spec)


def test_an_iterator_is_a_source():
    episodes = demonstrations.load(f"{__name__}:echo(count=3)")
    assert len(episodes) == 3 and isinstance(episodes[0], Step)
    with pytest.raises(ValueError, match="expected at least one"):
        demonstrations.load(f"{__name__}:echo(count=0)")
    with pytest.raises(ValueError, match="cannot be imported"):
        demonstrations.load("no_module:episodes")
    with pytest.raises(ValueError, match=r"got 'episodes\.pkl', expected a file whose name ends in \.npz"):
        demonstrations.load("episodes.pkl")


def test_only_one_env_is_recorded():
    environment = environments.make(EchoEnvironment, num_envs=2)
    with pytest.raises(ValueError, match="got 2 envs, expected 1"):
        next(demonstrations.record(environment, lambda observation: observation, 1))


def test_replay_holds_what_an_actor_would_have_written():
    def make_client():
        return replay.EmbeddedClient([replay.Table.queue("replay", 100)])

    written, acted = make_client(), make_client()
    for episode in echo():
        demonstrations.write(episode, adders.NStepTransitionAdder(written, 2, 0.9))
    adder = adders.NStepTransitionAdder(acted, 2, 0.9)
    environment = environments.make(EchoEnvironment, num_envs=1, options={"episode_length": 3})
    adder.add_first(environment.reset())
    for step in range(7):  # One of them begins the second episode.
        action = np.array([(step - step // 4) % 4])
        adder.add(action, environment.step(action))
    adder.flush()
    size = acted.server_info()["replay"].current_size
    assert size == 8
    one, other = (client.sample_batch("replay", size).data for client in (written, acted))
    tree.map_structure(np.testing.assert_array_equal, one, other)


def test_files_that_do_not_hold_whole_episodes_are_errors(tmp_path):
    file = tmp_path / "nested.npz"
    demonstrations.save(file, nested()[1])
    with np.load(file) as arrays:
        good = dict(arrays)
    begins = good["start_of_episode"].copy()
    begins[0] = False
    cases = {
        "not whole episodes": {**good, "start_of_episode": begins},
        "of one length": {**good, "reward": good["reward"][:-1]},
        "has no": {"observation": good["reward"]},
    }
    for message, arrays in cases.items():
        np.savez(file, **arrays)
        with pytest.raises(ValueError, match=message):
            demonstrations.load(str(file))
    with pytest.raises(ValueError, match=r"path: got .*episodes', expected the name of a \.npz file"):
        demonstrations.save(tmp_path / "episodes", [])
    with pytest.raises(ValueError, match="episodes: got none, expected at least one"):
        demonstrations.save(tmp_path / "none.npz", [])


@pytest.mark.parametrize("kept", [0, 300, 0.99])
def test_a_file_that_is_cut_off_is_an_error(tmp_path, kept):
    file = tmp_path / "nested.npz"
    demonstrations.save(file, nested()[1])
    whole = file.read_bytes()
    file.write_bytes(whole[: int(kept * len(whole)) if kept < 1 else kept])
    with pytest.raises(ValueError, match=r"nested\.npz', which cannot be read .*write or copy it again"):
        demonstrations.load(str(file))


def test_recorded_actions_have_the_dtype_of_the_spec(caplog):
    environment = environments.make("gymnasium:Pendulum-v1", seed=0, options={"max_episode_steps": 2})
    episodes = list(demonstrations.record(environment, lambda observation: [[0.5]], 1))
    assert episodes[0].action.dtype == np.float32
    assert not caplog.records  # Of dm-tree, whose functions warn of some arguments.
    demonstrations.check(episodes, environment.spec)
