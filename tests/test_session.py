"""Sessions: agents that an application drives itself."""

from __future__ import annotations

from unittest import mock

import callers
import numpy as np
import pytest
import torch
import tree
from dm_env import specs as dm_specs

from agents.batch_ppo import BatchPPO, BatchPPOConfig
from agents.dqn import DQN, DQNConfig
from agents.impala import IMPALA, IMPALAConfig
from agents.iqn import IQN, IQNConfig
from agents.maml import MAML
from agents.mbmpo import MBMPO
from agents.ppo import PPO, PPOConfig
from agents.ppo_dqn import PPODQN
from agents.r2d2 import R2D2, R2D2Config
from agents.random_actions import CountingLearner, RandomActions, RandomActionsConfig
from agents.sac import SAC, SACConfig
from framework import specs
from framework.adders import block
from framework.replay.errors import WouldBlockError
from framework.session import Session
from framework.types import StepResult

SPEC = specs.EnvironmentSpec(
    observations=dm_specs.Array((2,), np.float32),
    actions=dm_specs.DiscreteArray(3),
    rewards=dm_specs.Array((), np.float32),
    discounts=dm_specs.BoundedArray((), np.float32, 0.0, 1.0),
)
CELL = SPEC._replace(observations=dm_specs.DiscreteArray(5))
DICT = SPEC._replace(observations={"a": SPEC.observations, "b": SPEC.observations})
BYTES = SPEC._replace(observations=dm_specs.Array((2,), np.uint8))
LEARNS = {"min_replay_size": 16, "batch_size": 8, "insert_burst": 16, "hidden_sizes": (16,)}
UNROLLS = {"unroll_length": 4, "hidden_sizes": (16,)}
SEQUENCES = {"min_replay_size": 2, "batch_size": 2, "burn_in": 2, "period": 2, "lstm_size": 8}
AGENTS = {
    "dqn": lambda: DQN(DQNConfig(prioritized=True, epsilon_ladder=3.0, n_step=2, **LEARNS)),
    "ppo": lambda: PPO(PPOConfig(**UNROLLS, recurrent="lstm", normalize_observations=True, epochs=2)),
    "impala": lambda: IMPALA(IMPALAConfig(**UNROLLS, lstm_size=8, batch_size=4)),
    "r2d2": lambda: R2D2(R2D2Config(**UNROLLS, **SEQUENCES, samples_per_insert=2.0)),
    "ppo-tuple": lambda: PPO(PPOConfig(**UNROLLS, minibatch_size=4)),
    "batch_ppo": lambda: BatchPPO(BatchPPOConfig(episodes_per_batch=3, hidden_sizes=(16,))),
    "sac": lambda: SAC(SACConfig(samples_per_insert=2.0, **LEARNS)),
}


TWO_NUMBERS = dm_specs.BoundedArray((2,), np.float32, -1.0, 1.0)
ACTIONS = {  # Of agents that do not choose one of three.
    "ppo-tuple": (TWO_NUMBERS, dm_specs.DiscreteArray(3)),
    "batch_ppo": TWO_NUMBERS,
}


def dqn(spec=SPEC, **options):
    return AGENTS["dqn"]().session(spec, **options)


class Game:
    """Two numbers of an env: its name and the time. Lasts as many steps as `length`, then begins again."""

    def __init__(self, name: float, length: int):
        self.name, self.length, self.time = name, length, 0

    def observation(self):
        return np.array([self.name, self.time], np.float32)

    def step(self):
        """Next observation, reward, terminated, truncated. Every second game is truncated."""
        self.time += 1
        over = self.time == self.length
        answer = self.observation(), 10 * self.name + self.time, over and self.name % 2 == 0, over
        if over:
            self.time = 0
        return answer


class Recorder(CountingLearner):
    def __init__(self):
        super().__init__()
        self.seen = []

    def step(self, batch):
        self.seen.append(batch.data)
        return super().step(batch)


class Recorded(RandomActions):
    def make_learner(self, networks, spec):
        self.learner = Recorder()
        return self.learner

    def for_program(self, num_envs, num_learners=1, rank=0):
        return self


def play(session, games, turns):
    """The actions of `turns`, which are lists of ids, and the metrics of the learner steps made."""
    actions, metrics = [], []
    for ids in turns:
        chosen = session.act([games[env].observation() for env in ids], ids)
        actions += zip(*(leaf.tolist() for leaf in tree.flatten(chosen)), strict=True)
        observation, reward, terminated, truncated = zip(*(games[env].step() for env in ids), strict=True)
        session.observe(observation, reward, terminated, truncated, ids)
        metrics.append(session.learn())
    return actions, [row for row in metrics if row]


def random_turns(seed, names, count):
    random = np.random.default_rng(seed)
    return [
        [names[i] for i in random.permutation(len(names))[: random.integers(1, len(names) + 1)]]
        for _ in range(count)
    ]


def repeated(session, refused, call, *arguments, max_steps=None):
    """Calls until replay has room, which learning makes; `refused` gets the names of the calls it refuses."""
    while True:
        steps = session.env_steps
        try:
            return call(*arguments)
        except WouldBlockError as error:
            refused.append(str(error).partition(":")[0])
            assert session.env_steps == steps
            assert session.learn(max_steps=max_steps), "learn() makes no room"


def test_each_env_has_its_own_episodes_in_any_order():
    agent = Recorded(RandomActionsConfig(batch_size=4))
    session = Session(agent, SPEC, num_envs=3)
    games = {"a": Game(1, 3), "b": Game(2, 4), ("c", 3): Game(3, 1)}
    turns = random_turns(0, list(games), 60)
    actions, metrics = play(session, games, turns)
    assert session.env_steps == len(actions) == sum(map(len, turns)) > 100
    assert session.learner_steps == agent.learner.steps == metrics[-1]["learner_steps"] > 20
    lengths, terminal = {1: 3, 2: 4, 3: 1}, {2}
    ended = set()
    for data in agent.learner.seen:
        for before, reward, discount, after in zip(
            data.observation, data.reward, data.discount, data.next_observation, strict=True
        ):
            (name, time), last = before, before[1] + 1 == lengths[before[0]]
            np.testing.assert_array_equal(after, [name, time + 1])
            assert reward == 10 * name + time + 1
            assert discount == (0.0 if last and name in terminal else 1.0)
            ended |= {name} if last else set()
    assert ended == {1, 2, 3}


@pytest.mark.parametrize("name", AGENTS)
def test_a_restored_session_continues_to_the_last_digit(name):
    names = ["a", "b", "c"]

    def games():
        return {env: Game(i, 3 + 2 * i) for i, env in enumerate(names)}

    before, after = random_turns(1, names, 30), random_turns(2, names, 30)
    spec = SPEC._replace(actions=ACTIONS.get(name, SPEC.actions))
    first, played = AGENTS[name]().session(spec, num_envs=3, seed=1), games()
    play(first, played, before)
    second, again = AGENTS[name]().session(spec, num_envs=3, seed=2), games()
    play(second, again, before[:5])  # A state that is replaced.
    for env in names:
        again[env].time = played[env].time
    second.restore(first.save())
    steps = first.learner_steps
    expected = play(first, played, after)
    assert play(second, again, after) == expected
    assert len(expected[1]) > 3 and second.learner_steps == first.learner_steps > steps > 0


class WideDQN(DQN):
    def make_networks(self, spec):
        return DQN(DQNConfig(hidden_sizes=(32,))).make_networks(spec)


WideDQN.__name__ = "DQN"


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (DQN(DQNConfig(n_step=3, **LEARNS)), "setting n_step 5, expected 3"),
        (DQN(DQNConfig(discount=0.5, **LEARNS)), "setting discount 0.99, expected 0.5"),
        (IQN(IQNConfig(**LEARNS)), "agent class DQN, expected IQN"),
        (WideDQN(DQNConfig(**LEARNS)), "that does not fit"),
    ],
    ids=["n_step", "discount", "class", "networks"],
)
def test_a_state_that_is_refused_changes_nothing(agent, message):
    saved, session, same = DQN(DQNConfig(**LEARNS)).session(SPEC), agent.session(SPEC), agent.session(SPEC)
    play(saved, {"a": Game(0, 5)}, [["a"]] * 30)
    games, games_of_same = {"a": Game(0, 5)}, {"a": Game(0, 5)}
    assert play(session, games, [["a"]] * 20) == play(same, games_of_same, [["a"]] * 20)
    with pytest.raises(ValueError, match=f"state: got one .*{message}"):
        session.restore(saved.save())
    assert session.env_steps == 20
    assert play(session, games, [["a"]] * 20) == play(same, games_of_same, [["a"]] * 20)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_session_that_learns_on_a_gpu_is_saved():
    agent, games = DQN(DQNConfig(device="cuda", **LEARNS)), {"a": Game(0, 5)}
    first, second = agent.session(SPEC), agent.session(SPEC)
    play(first, games, [["a"]] * 40)
    second.restore(first.save())
    assert second.learner_steps == first.learner_steps > 0
    assert play(second, games, [["a"]] * 20)[1]


def test_the_replay_ratio_holds():
    session = AGENTS["sac"]().session(SPEC, num_envs=2)
    play(session, {"a": Game(0, 50), "b": Game(1, 50)}, [["a", "b"]] * 100)
    # 2 samples per item; 16 items ahead at most, and a batch.
    assert abs(8 * session.learner_steps - 2 * 200) <= 16 * 2 + 8


def test_an_action_is_the_same_whatever_else_acts():
    """Memory and exploration belong to the env, not to its row."""
    alone, together = (AGENTS["ppo"]().session(SPEC, num_envs=2) for _ in range(2))
    for session, turns in ((alone, [["a"]] * 3), (together, [["a"], ["a", "b"], ["b", "a"]])):
        play(session, {"a": Game(1, 9), "b": Game(2, 9)}, turns)
    (row,) = (next(iter(alone._state))[:1],)
    np.testing.assert_allclose(next(iter(together._state))[:1], row, atol=1e-6)


def test_an_episode_whose_first_action_was_interrupted_begins_without_a_memory(monkeypatch):
    sessions = [AGENTS["ppo"]().session(SPEC, num_envs=1) for _ in range(2)]
    for session in sessions:
        play(session, {"a": Game(1, 3)}, [["a"]] * 3)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sessions[0]._policy, "step", interrupted)
        sessions[0].act([[2, 0]], ["b"])
    for session in sessions:
        session.act([[2, 0]], ["b"])
    tree.map_structure(np.testing.assert_array_equal, *(session._state for session in sessions))


@pytest.mark.parametrize("name", ["dqn", "r2d2", "sac"])
def test_a_session_computes_the_same_whatever_the_caller_sets_and_leaves_it(name):
    def learn():
        spec = SPEC._replace(actions=TWO_NUMBERS) if name == "sac" else SPEC
        session = AGENTS[name]().session(spec)
        played = play(session, {0: Game(0, 4)}, [[0]] * 30)
        session.restore(session.save())
        return played

    expected = learn()
    assert expected[1], "it does not learn"
    with callers.unusual_settings():
        before = callers.generators(), callers.settings()
        assert learn() == expected
        assert (callers.generators(), callers.settings()) == before


def test_an_env_that_is_gone_leaves_its_place():
    session = dqn(SPEC, num_envs=1)
    session.act([[0, 0]], ["a"])
    with pytest.raises(ValueError, match=r"num_envs: got 1 new .*end_episodes"):
        session.act([[0, 0]], ["b"])
    session.end_episodes(["a"])
    session.act([[0, 0]], ["b"])


@pytest.mark.parametrize("n_step", [1, 3])
def test_an_episode_that_is_ended_is_in_replay_as_if_it_was_truncated(n_step):
    ended, truncated = (DQN(DQNConfig(n_step=n_step, **LEARNS)).session(SPEC) for _ in range(2))
    for session in (ended, truncated):
        for time in range(5):
            session.act([[0, time]])
            session.observe([[0, time + 1]], [0.0], False, session is truncated and time == 4)
    ended.end_episodes([0])
    sizes = [session._dataset._items.server_info()["replay"].current_size for session in (ended, truncated)]
    assert sizes[0] == sizes[1] >= 5


def acted():
    session = dqn(SPEC, num_envs=2)
    session.act([[0, 0], [1, 0]])
    return session


ZEROS = np.zeros(2, np.float32)
WRONG_CALLS = [
    (lambda: acted().act([[0, 0]]), "env 0 has an action that was not observed"),
    (lambda: acted().act([[0, 0]], [2]), "num_envs: got 1 new"),
    (lambda: acted().act([[0, 0]] * 2, [2, 2]), "each once"),
    (lambda: acted().observe([[0, 0]], [0], False, env_ids=[5]), "env 5 has no action"),
    (lambda: acted().observe([[0, 0]], [0, 1], False), r"reward: got shape \(2,\), expected \(1,\)"),
    (lambda: acted().observe([[0, 0, 0]], [0], False), r"observation: got shape \(1, 3\)"),
    (lambda: dqn().act(ZEROS), r"observation: got shape \(2,\), expected \(1, 2\), .* \[observation\]"),
    (lambda: acted().observe([[0, 0]], 0, False), r"reward: got shape \(\), .* \[reward\]"),
    (lambda: dqn(CELL).act(3), r"observation: got shape \(\), expected \(1,\)"),
    (lambda: dqn(DICT).act([[0, 0]]), "observation: got a nest that does not fit"),
    (lambda: dqn(DICT).act({"a": [[0, 0]]}, [7]), "observation: got a nest"),
    (lambda: dqn(BYTES).act(ZEROS[None]), "observation: got dtype float32, expected uint8"),
    (
        lambda: dqn(BYTES).act(np.array([[9, 300]], np.uint16)),
        "observation: got 300, expected .* uint8 holds",
    ),
    (lambda: dqn(BYTES).act([[9, -1]]), "observation: got -1, expected .* uint8 holds"),
    (lambda: acted().observe([[0, 0]] * 2, [0, 0], False, [[True]] * 2), r"truncated: got shape \(2, 1\)"),
    (lambda: acted().observe([[0, 0]], [0], False, [True, False], [0]), r"truncated: got shape \(2,\)"),
    (lambda: acted().observe([[0, 0]] * 2, [0, 0], [True] * 3), r"terminated: got shape \(3,\)"),
    (lambda: acted().observe([[0, 0]], [0], np.nan, env_ids=[0]), "terminated: got nan, expected bools"),
    (lambda: acted().observe([[0, 0]], [0], False, ["no"], [0]), r"truncated: got \['no'\], expected bools"),
    (lambda: dqn(num_envs=0), "num_envs: got 0"),
    (lambda: dqn().act([[0, np.nan]]), "observation: got nan, expected finite numbers of float32"),
    (lambda: acted().observe([[0, 0]], [1e39], False, [0]), "reward: got inf, expected finite"),
    (lambda: dqn(CELL).act([5]), "observation: got 5, expected 0 to 4"),
    (lambda: dqn().restore(acted().save()), "num_envs 2, expected 1"),
    (lambda: IMPALA(IMPALAConfig(previous_action_and_reward=True)).session(SPEC), "wrappers: got"),
]


def test_lists_of_numbers_are_taken_where_the_spec_has_bytes():
    assert dqn(BYTES).act([[9, 255]]).shape == (1,)


@pytest.mark.parametrize(("call", "message"), WRONG_CALLS)
def test_wrong_calls_are_errors_that_say_what_to_do(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_experience_without_learning_is_an_error_in_the_end():
    session, game = AGENTS["ppo"]().session(SPEC), Game(0, 5)
    with pytest.raises(WouldBlockError, match=r"observe: .* Call learn\(\)"):
        for _ in range(1_000):
            session.act([game.observation()])
            observation, reward, terminated, truncated = game.step()
            session.observe([observation], [reward], terminated, truncated)


# The replay of R2D2 takes more sequences than this test writes.
@pytest.mark.parametrize("name", ["dqn", "ppo", "impala", "sac"])
def test_a_call_that_replay_refuses_takes_nothing_and_may_be_repeated(name):
    session, refused = AGENTS[name]().session(SPEC, num_envs=3), []
    games = {env: Game(i, 3 + 2 * i) for i, env in enumerate(["a", "b", "c"])}
    turns = random_turns(0, list(games), 200)

    for ids in turns:
        repeated(session, refused, session.act, [games[env].observation() for env in ids], ids)
        answers = zip(*(games[env].step() for env in ids), strict=True)
        repeated(session, refused, session.observe, *answers, ids)
    assert session.env_steps == sum(map(len, turns))
    assert "observe" in refused


def test_the_caller_may_change_the_actions_that_it_gets():
    agent = Recorded(RandomActionsConfig(batch_size=4))
    session, chosen = Session(agent, SPEC), []
    for step in range(40):
        seen = np.float32([[0, step]])
        action = session.act(seen)
        chosen.append(int(action[0]))
        action += 100
        session.observe(seen + np.float32([0, 1]), [0.0], False)
        session.learn()
    assert agent.learner.seen
    for data in agent.learner.seen:
        assert data.action.tolist() == [chosen[int(time)] for time in data.observation[:, 1]]


def test_the_steps_before_an_interrupted_one_count(monkeypatch):
    agent = Recorded(RandomActionsConfig(batch_size=1))
    session = Session(agent, SPEC)
    for n in range(3):
        session.act(np.float32([[0, n]]))
        session.observe(np.float32([[0, n + 1]]), [0.0], False)
    results = [StepResult({}, None), StepResult({}, None), KeyboardInterrupt]
    monkeypatch.setattr(agent.learner, "step", mock.Mock(side_effect=results))
    with pytest.raises(KeyboardInterrupt):
        session.learn()
    assert session.learner_steps == 2


@pytest.mark.parametrize("agent", [MAML, MBMPO, PPODQN])
def test_agents_that_no_session_can_drive_are_refused(agent):
    with pytest.raises(ValueError, match=f"session: got {agent.__name__}, which"):
        agent().session(SPEC)


def test_learning_too_seldom_is_refused_and_not_queued_without_a_bound():
    settings = {"samples_per_insert": 16.0, **LEARNS, "min_replay_size": 32}
    session, game, refused = DQN(DQNConfig(**settings)).session(SPEC), Game(0, 7), []
    for _ in range(300):
        repeated(session, refused, session.act, [game.observation()], max_steps=1)
        answers = [np.array([part]) for part in game.step()]
        repeated(session, refused, session.observe, *answers, max_steps=1)
        session.learn(max_steps=1)
        assert sum(adder._out.writer.num_pending for adder in session._adders) <= 2 * settings["insert_burst"]
    assert refused


@pytest.mark.parametrize("steps", [1, 2])
def test_a_refused_call_takes_nothing_also_with_the_smallest_blocks(steps, monkeypatch):
    monkeypatch.setattr(block, "_MAX_BLOCK_STEPS", steps)
    session, refused = AGENTS["ppo"]().session(SPEC), []
    # Each episode ends with an unroll of 4 steps; resets are steps, too, except for the first.
    for length in (4, 3, 3, 3, 3, 3, 3, 3):
        game = Game(0, length)
        for _ in range(length):
            repeated(session, refused, session.act, [game.observation()])
            observation, reward, _, over = game.step()
            repeated(session, refused, session.observe, [observation], [reward], False, over)
    assert session.env_steps == 25 and refused
