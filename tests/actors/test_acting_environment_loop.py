"""The environment loop: exact limits, per-env figures, counters, logs and observers."""

import dm_env
import numpy as np
import pytest
from faulty_environment import FaultyEnvironment

from framework import core, environments, specs
from framework.actors import EnvironmentLoop, observers
from framework.environments import FIRST, testing
from framework.loggers import InMemoryLogger
from framework.runs.services import Counter


class RecordingActor(core.Actor):
    """Chooses action 1 everywhere and keeps all that it is told."""

    def __init__(self):
        self.firsts = []
        self.steps = []
        self.num_updates = 0

    def select_action(self, observation):
        return np.ones(len(observation), np.int64)

    def observe_first(self, timestep):
        self.firsts.append(_copy(timestep))

    def observe(self, action, next_timestep):
        self.steps.append(_copy(next_timestep))

    def update(self, wait=False):
        self.num_updates += 1

    def transitions(self):
        return sum(int((timestep.step_type != FIRST).sum()) for timestep in self.steps)


def _copy(timestep):
    return dm_env.TimeStep(*[np.array(field) for field in timestep])


def _make(num_envs=1, episode_length=5, **options):
    environment = environments.make(
        testing.EchoEnvironment, num_envs=num_envs, options={"episode_length": episode_length, **options}
    )
    actor, counter, logger = RecordingActor(), Counter(), InMemoryLogger()
    return EnvironmentLoop(environment, actor, counter, logger), actor, counter, logger


def test_envs_beyond_the_limit_are_closed_by_first_and_reset_later():
    loop, actor, _, _ = _make(num_envs=4)
    loop.run(num_steps=6)
    last = actor.steps[-1]
    assert last.step_type.tolist() == [1, 1, FIRST, FIRST]
    assert last.reward[2:].tolist() == [0, 0] and last.discount[2:].tolist() == [1, 1]
    assert len(actor.firsts) == 1
    loop.run(num_steps=4)
    assert len(actor.firsts) == 2


def test_a_limit_that_the_envs_meet_needs_no_reset():
    loop, actor, _, logger = _make(num_envs=4)
    for _ in range(3):
        loop.run(num_steps=8)
    assert len(actor.firsts) == 1
    assert len(logger.rows) == 4  # the episodes of 5 steps went on over the calls


def test_a_run_of_fifteen_steps_of_episodes_of_ten_updates_fifteen_times():
    loop, actor, _, logger = _make(episode_length=10)
    assert loop.run(num_steps=15) == 15
    assert len(logger.rows) == 1
    # The call that begins the second episode is no transition, but the actor may update at it.
    assert actor.num_updates == 16
    EnvironmentLoop(loop.environment, actor, should_update=False).run(num_steps=20)
    assert actor.num_updates == 16


def test_returns_and_lengths_are_per_env():
    # Env i observes 0, 1, 2 ...; reward = 100 * observation + 1.
    loop, _, _, _ = _make(num_envs=3, episode_length=3)
    finished = None
    while finished is None:
        finished = loop.step()
    assert finished["episode_length"].tolist() == [3, 3, 3]
    assert finished["episode_return"].tolist() == [1 + 101 + 201] * 3
    assert finished["env"].tolist() == [0, 1, 2]
    finished = None
    while finished is None:
        finished = loop.step()
    # The second episode starts at observation 4 and its score does not hold the first one's.
    assert finished["episode_return"].tolist() == [401 + 501 + 601] * 3


def test_an_episode_that_the_environment_cuts_short_is_counted_and_has_no_return():
    loop, _, _, _ = _make(num_envs=2, episode_length=5)
    assert [loop.step() for _ in range(2)] == [None, None]
    loop.environment.end_episodes(np.array([True, False]))
    steps = [loop.step() for _ in range(6)]  # Env 0 begins again in the first of these.
    finished = [one for one in steps if one]
    assert loop.num_dropped == 1 and loop.num_steps == 2 * 2 + 5 + 5
    ended = [pair for one in finished for pair in zip(one["env"], one["episode_length"], strict=True)]
    assert sorted(ended) == [(0, 5), (1, 5)]


class Unresettable(environments.wrappers.EnvironmentWrapper):
    """Env 0 says that it has not begun an episode at the reset."""

    @property
    def cut(self):
        return np.array([True, False])


def test_an_episode_that_began_before_the_reset_has_no_return_and_is_not_played_for_another():
    loop, actor, _, logger = _make(num_envs=2, episode_length=3)
    loop.environment = Unresettable(loop.environment)
    assert loop.run_episodes(2)["env"].tolist() == [0, 1]
    assert loop.num_dropped == 1 and loop.num_steps == actor.transitions() == 12
    assert [row["episode_length"] for row in logger.rows] == [3, 3]
    loop.restart()
    loop.step()
    loop.environment.end_episodes(np.array([True, False]))  # The next one of env 0 is whole.
    finished = [loop.step() for _ in range(4)]
    assert [one["env"].tolist() for one in finished if one] == [[1], [0]] and loop.num_dropped == 2


class Uneven(testing.EchoEnvironment):
    """Env 0 has episodes of 2 steps, env 1 of 20."""

    made, lengths = 0, (2, 20)

    def __init__(self):
        super().__init__(episode_length=self.lengths[Uneven.made % 2])
        Uneven.made += 1


def test_run_episodes_does_not_favour_short_episodes():
    Uneven.made = 0
    environment = environments.make(Uneven, num_envs=2)
    logger = InMemoryLogger()
    loop = EnvironmentLoop(environment, RecordingActor(), logger=logger)
    result = loop.run_episodes(6)
    assert sorted(result["episode_length"].tolist()) == [2, 2, 2, 20, 20, 20]
    assert sorted(row["episode_length"] for row in logger.rows) == [2, 2, 2, 20, 20, 20]


def test_an_episode_without_an_end_is_cut_and_said(caplog):
    """Each env plays its share: one that was cut waits for the others, and for the reset after them."""
    Uneven.made = 0
    actor = RecordingActor()
    loop = EnvironmentLoop(environments.make(Uneven, num_envs=2), actor, max_episode_steps=7)
    result = loop.run_episodes(6)
    assert result["env"].tolist() == [0, 1, 0, 1, 0, 1]
    assert result["episode_length"].tolist() == [2, 7, 2, 7, 2, 7]
    assert result["episode_return"][1] == sum(100 * step + 1 for step in range(7))
    assert loop.num_cut == 3 and len(actor.firsts) == 3
    assert loop.run_episodes(2)["episode_length"].tolist() == [2, 7]
    told = "Uneven: 3 of 6 episodes had not ended after 7 steps"
    assert [told in record.message for record in caplog.records] == [True]


def test_the_rest_of_a_cut_episode_does_not_count_if_it_ends_while_others_play(monkeypatch):
    Uneven.made = 0
    monkeypatch.setattr(Uneven, "lengths", (6, 8))
    loop = EnvironmentLoop(environments.make(Uneven, num_envs=2), RecordingActor(), max_episode_steps=7)
    assert loop.run_episodes(6)["episode_length"].tolist() == [6, 7] * 3
    assert loop.num_cut == 3


def test_run_episodes_starts_from_a_reset_and_with_fewer_episodes_than_envs():
    loop, actor, _, _ = _make(num_envs=4)
    loop.run(num_steps=8)
    result = loop.run_episodes(3)
    assert len(actor.firsts) == 2
    assert result["env"].tolist() == [0, 1, 2]
    assert len(loop.run_episodes(0)["episode_return"]) == 0


def test_rows_hold_figures_timings_and_counts():
    loop, _, _, logger = _make(num_envs=2)
    loop.run(num_steps=10)
    assert len(logger.rows) == 2 and not any(loop.seconds.values())
    row = logger.rows[1]
    assert row["env"] == 1 and row["episode_length"] == 5
    assert isinstance(row["episode_return"], float) and isinstance(row["env"], int)
    assert row["steps"] == 10 and row["episodes"] == 2
    assert row["steps_per_second"] > 0
    for name in ("reset", "select_action", "step", "observe"):
        assert row[f"{name}_duration_sec"] > 0


def test_both_limits_or_a_negative_one_are_errors():
    loop, _, _, _ = _make()
    with pytest.raises(ValueError, match="num_episodes=1 and num_steps=2"):
        loop.run(num_episodes=1, num_steps=2)
    with pytest.raises(ValueError, match="num_steps: got -1"):
        loop.run(num_steps=-1)
    for play in (loop.run, loop.run_episodes):
        with pytest.raises(ValueError, match="num_episodes: got -1"):
            play(num_episodes=-1)
    with pytest.raises(ValueError, match="max_steps: got 0"):
        loop.step(max_steps=0)


class Enough(Exception):
    pass


class StopAt(observers.EnvironmentLoopObserver):
    """Ends the loop after some steps; notes the calls."""

    def __init__(self, at):
        self.at = at
        self.calls = []

    def observe_first(self, environment, timestep):
        self.calls.append("first")

    def observe(self, environment, timestep, action):
        self.calls.append("step")
        if self.calls.count("step") == self.at:
            raise Enough

    def get_metrics(self, envs):
        self.calls.append("metrics")
        return {"seen": np.full(len(envs), len(self.calls))}


def test_run_without_a_limit_goes_on_until_an_error():
    observer = StopAt(8)
    environment = environments.make(testing.EchoEnvironment)
    logger = InMemoryLogger()
    loop = EnvironmentLoop(environment, RecordingActor(), logger=logger, observers=[observer])
    with pytest.raises(Enough):
        loop.run()
    assert loop.num_steps == 6  # 5 steps, the start of an episode, 1 step
    assert observer.calls == ["first", *["step"] * 5, "metrics", "step", "step", "step"]
    assert logger.rows[0]["seen"] == 7
    assert loop.run(num_steps=3) == 3  # from a reset


def test_observers_measure_each_env_and_episode():
    environment = environments.make(testing.EchoEnvironment, num_envs=2, options={"episode_length": 3})
    watching = [observers.ActionObserver(), observers.ObservationObserver()]
    logger = InMemoryLogger()
    EnvironmentLoop(environment, RecordingActor(), logger=logger, observers=watching).run(num_steps=12)
    assert [row["observation_min"] for row in logger.rows] == [0, 0, 4, 4]
    assert [row["observation_max"] for row in logger.rows] == [3, 3, 7, 7]
    assert [row["observation_mean"] for row in logger.rows] == [1.5, 1.5, 5.5, 5.5]
    assert all(row["action_min"] == row["action_max"] == row["action_mean"] == 1 for row in logger.rows)


@pytest.mark.parametrize("observer", [observers.ActionObserver, observers.ObservationObserver])
def test_an_observer_that_has_seen_nothing_says_so(observer):
    spec = testing.make_spec(specs.Array((0,), np.float32), specs.BoundedArray((0,), np.float32, -1, 1))
    empty = environments.make(testing.FakeEnvironment, num_envs=2, options={"spec": spec})
    for environment in (environments.make(testing.EchoEnvironment, num_envs=3), empty):
        watching, envs = observer(), np.arange(environment.num_envs)
        action = testing.draw_action(environment.action_spec(), np.random.default_rng(0), len(envs))
        for number in range(3):  # Before a reset, after it, and after a step.
            assert [each.shape for each in watching.get_metrics(envs[:0]).values()] == [(0,)] * 3
            few = watching.get_metrics(envs[:1])
            seen = environment is not empty and number > (observer is observers.ActionObserver)
            assert len(few) == 3 and all(np.isfinite(each).tolist() == [seen] for each in few.values())
            if number == 0:
                watching.observe_first(environment, environment.reset())
            elif number == 1:
                watching.observe(environment, environment.step(action), action)
        # The same observer in a loop of another size.
        loop = EnvironmentLoop(
            environments.make(testing.EchoEnvironment), RecordingActor(), observers=[watching]
        )
        assert loop.run_episodes(0)["episode_return"].shape == (0,)
        assert loop.run_episodes(1)["episode_return"].shape == (1,)


def test_nested_rewards_give_nested_returns():
    spec = testing.make_spec(
        rewards={"a": specs.Array((2,), np.float32), "b": specs.Array((), np.float32)},
        discounts={"a": specs.Array((2,), np.float32), "b": specs.Array((), np.float32)},
    )
    environment = environments.make(testing.FakeEnvironment, num_envs=2, seed=0, options={"spec": spec})
    actor = RecordingActor()
    actor.observe = lambda action, timestep: actor.steps.append(np.array(timestep.reward["a"]))
    actor.observe_first = lambda timestep: None
    logger = InMemoryLogger()
    loop = EnvironmentLoop(environment, actor, logger=logger)
    result = loop.run_episodes(2)
    np.testing.assert_allclose(result["episode_return"]["a"], np.sum(actor.steps, axis=0), atol=1e-5)
    assert result["episode_return"]["b"].shape == (2,)
    assert loop.run_episodes(0)["episode_return"]["a"].shape == (0, 2)
    row = logger.rows[1]
    names = ["episode_return/a/0", "episode_return/a/1", "episode_return/b"]
    assert [name for name in row if name.startswith("episode_return")] == names
    np.testing.assert_allclose([row[name] for name in names[:2]], result["episode_return"]["a"][1])


def test_a_fault_of_the_environment_leaves_the_loop():
    environment = environments.make(FaultyEnvironment, options={"fault": "raise", "at": 4})
    actor = RecordingActor()
    loop = EnvironmentLoop(environment, actor)
    with pytest.raises(environments.EnvironmentFault, match="env 0"):
        loop.run(num_steps=10)
    assert loop.num_steps == 3
    assert loop.run(num_steps=2) == 2  # from a reset
    assert len(actor.firsts) == 2
