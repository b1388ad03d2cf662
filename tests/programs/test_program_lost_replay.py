"""An actor whose replay server is lost goes on with a new adder, and says what was lost."""

import pytest

import launch
from agents.dqn import DQN
from agents.ppo_dqn import PPODQN, PPODQNConfig
from agents.random_actions import RandomActions
from framework.loggers import InMemoryLogger
from framework.programs import RunConfig, make_program
from framework.replay.errors import ServerClosed, ServerLost

LOG = InMemoryLogger()


class Losing:
    """An adder that loses its server at one of its calls, with three items on their way."""

    def __init__(self, adder, call, error):
        self._adder, self._call, self._error = adder, call, error
        self._calls = 0
        self._lost = False

    def add_first(self, timestep):
        self._adder.add_first(timestep)

    def add(self, *args):
        self._calls += 1
        if self._calls == self._call:
            self._lost = True
            raise self._error("the replay server of this writer was lost")
        self._adder.add(*args)

    def ready(self):
        return self._adder.ready()

    def flush(self, timeout=None):
        self._adder.flush(timeout=timeout)

    def close(self, timeout=None):
        return 3 * self._lost + self._adder.close(timeout=timeout)


class LosesAdders:
    """An agent whose n-th adder loses its server at call ``calls[n]`` of ``add``."""

    calls = ()
    error = ServerLost

    def make_adder(self, client, spec):
        adder = super().make_adder(client, spec)
        if not self.calls:
            return adder
        call, *type(self).calls = self.calls
        return Losing(adder, call, self.error)


class LosesReplay(LosesAdders, RandomActions):
    pass


class LosingDQN(LosesAdders, DQN):
    pass


def run(calls, error=ServerLost, inference="local", max_env_steps=600, directory=None):
    LOG.rows.clear()
    LosesReplay.calls, LosesReplay.error = list(calls), error
    settings = {"max_env_steps": max_env_steps, "inference": inference, "directory": directory}
    config = RunConfig(envs_per_actor=2, evaluate_period=None, **settings)
    program = make_program(LosesReplay(), "gymnasium:CartPole-v1", config, logger_factory=lambda: LOG)
    return launch.launch(program, engine="threads")


@pytest.mark.parametrize(("inference", "calls"), [("local", [20, 30, 10]), ("alternating+server", [20])])
def test_it_goes_on_and_counts_what_was_lost_from_the_beginning_of_the_run(inference, calls, tmp_path):
    for calls_of_run, steps in ((calls, 600), ([], 800)):
        assert run(calls_of_run, inference=inference, max_env_steps=steps, directory=str(tmp_path))
        last = [row for row in LOG.rows if row["label"] == "actor-0"][-1]
        assert (last["lost_items"], last["steps"]) == (3 * len(calls), steps)


def test_a_server_that_does_not_come_back_ends_the_program():
    with pytest.raises(launch.NodeError, match="was lost"):
        run([20, 1, 1])


def test_a_server_that_was_stopped_ends_the_program():
    with pytest.raises(launch.NodeError, match="was lost"):
        run([20], ServerClosed)


@pytest.mark.parametrize("call", [11, 16], ids=["within an unroll", "with complete unrolls of the others"])
def test_a_worker_of_several_policies_collects_its_unrolls_again(call, monkeypatch):
    monkeypatch.setattr(LosingDQN, "calls", [call])
    LOG.rows.clear()
    config = PPODQNConfig(ppo={"unroll_length": 8}, dqn={"min_replay_size": 50, "batch_size": 16})
    agent = PPODQN(config)
    agent.parts["dqn"] = LosingDQN(config.dqn_config())
    run = RunConfig(envs_per_actor=2, max_env_steps=300, evaluate_period=None, learner_log_period=1)
    program = make_program(agent, "multi_agent:CartPole", run, logger_factory=lambda: LOG)
    assert launch.launch(program, engine="threads")["env_steps"] == 300
    assert [row for row in LOG.rows if row["label"] == "actor-0"][-1]["lost_items"] == 3
    # Each batch was collected with the newest parameters: nothing of the lost unroll is in a table.
    staleness = {row["ppo/staleness"] for row in LOG.rows if "ppo/staleness" in row}
    assert staleness == {0.0}
