"""A step of all envs may be more than the tables have room for at once; one thread goes on all the same."""

import pytest

import launch
from agents.dqn import DQN, DQNConfig
from agents.impala import IMPALA, IMPALAConfig
from agents.sac import SAC, SACConfig
from framework import programs

SMALL = DQNConfig(
    hidden_sizes=(16,), batch_size=16, samples_per_insert=1.0, insert_burst=16, min_replay_size=100
)
TIGHT = DQNConfig(hidden_sizes=(16,), insert_burst=8, samples_per_insert=4.0, min_replay_size=20)

# Case: (agent, environment, envs, keyword arguments).
CASES = {
    "more unrolls than the queue holds": (
        IMPALA(IMPALAConfig(unroll_length=5, hidden_sizes=(16,), batch_size=8)),
        "gymnasium:CartPole-v1",
        64,
        {},
    ),
    "in halves": (
        IMPALA(IMPALAConfig(unroll_length=5, hidden_sizes=(16,), batch_size=4)),
        "gymnasium:CartPole-v1",
        64,
        {"inference": "alternating"},
    ),
    "more transitions than the burst": (DQN(SMALL), "gymnasium:CartPole-v1", 128, {}),
    "fewer than a step until learning begins": (DQN(TIGHT), "gymnasium:CartPole-v1", 64, {}),
    "continuous": (
        SAC(
            SACConfig(
                hidden_sizes=(16,), batch_size=16, samples_per_insert=3.2, min_replay_size=20, insert_burst=8
            )
        ),
        "gymnasium:Pendulum-v1",
        64,
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_thread_goes_on(case):
    agent, environment, envs, options = CASES[case]
    program = programs.make_program(
        agent,
        environment,
        programs.RunConfig(envs_per_actor=envs, max_env_steps=envs * 12, evaluate_period=None, **options),
    )
    result = launch.launch(program, "serial")
    assert result["env_steps"] == envs * 12
    assert result["learner_steps"] > 0
