"""What a program that cannot go on says of replay."""

import pytest

import launch
from agents.impala import IMPALA, IMPALAConfig
from framework import replay
from framework.environments.testing import FakeEnvironment
from framework.programs import RunConfig, make_program


class Narrow(IMPALA):
    """Its queue holds less than a batch."""

    def make_tables(self, spec):
        return [replay.Table.queue("queue", self.config.batch_size - 1)]


def test_a_queue_that_never_holds_a_batch_is_one_clear_error():
    agent = Narrow(IMPALAConfig(batch_size=4, unroll_length=5, hidden_sizes=(8,)))
    run = RunConfig(envs_per_actor=9, max_env_steps=500, evaluate_period=None)
    program = make_program(agent, FakeEnvironment, run)
    with pytest.raises(launch.LaunchError) as raised:
        launch.launch(program, engine="serial")
    text = str(raised.value)
    assert "actor-0" in text and "a step of its 9 envs" in text and "Use fewer envs" in text
    assert "table 'queue' holds 3 items after 3 inserts and 0 samples" in text
    assert "min_size_to_sample 1, samples_per_insert 1, min_diff 0, and max_diff 3" in text
