"""A step of all envs may be more than the tables have room for at once; one thread goes on all the same."""

import pytest

import launch
from agents.dqn import DQN, DQNConfig
from agents.impala import IMPALA, IMPALAConfig
from framework import programs

TIGHT = DQNConfig(hidden_sizes=(16,), insert_burst=8, samples_per_insert=4.0, min_replay_size=20)
UNROLLS = IMPALAConfig(unroll_length=5, hidden_sizes=(16,), batch_size=4)

CASES = {
    "more unrolls than the queue holds": (IMPALA(UNROLLS), {}),
    "in halves": (IMPALA(UNROLLS), {"inference": "alternating+server"}),
    "fewer than a step until learning begins": (DQN(TIGHT), {}),
}


@pytest.mark.parametrize(("agent", "options"), CASES.values(), ids=CASES)
def test_one_thread_goes_on(agent, options):
    config = programs.RunConfig(envs_per_actor=64, max_env_steps=768, evaluate_period=None, **options)
    result = launch.launch(programs.make_program(agent, "gymnasium:CartPole-v1", config), "serial")
    assert result["env_steps"] == 768 and result["learner_steps"] > 0
