"""What a program that cannot go on says of replay."""

import numpy as np
import pytest

import launch
from agents.impala import IMPALA, IMPALAConfig
from framework import replay
from framework.environments.testing import FakeEnvironment
from framework.programs import RunConfig, make_program
from framework.workers.worker import describe_tables


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
    assert "table 'queue' holds 3 items, can take 0 more" in text
    assert "and can give 3 samples" in text


ratio = replay.rate_limiters.SampleToInsertRatio
LIMITERS = {
    # limiter, items, samples, room, stock
    "queue": (replay.rate_limiters.Queue(5), 2, 1, "take 4 more", "give 1 samples"),
    "minimum": (replay.rate_limiters.MinSize(3), 2, 0, "take any number of more", "give 0 samples"),
    "minimum reached": (replay.rate_limiters.MinSize(2), 2, 0, "take any number of", "give any number of"),
    "ratio": (ratio(2.0, 2, 6.0), 3, 4, "take 4 more", "give 4 samples"),
    "filling": (replay.rate_limiters.SampleToInsertRatio(2.0, 9, 4.0), 3, 0, "take 8 more", "give 0 samples"),
}


@pytest.mark.parametrize("name", LIMITERS)
def test_room_and_stock_are_what_the_limiter_lets_through(name):
    limiter, items, samples, room, stock = LIMITERS[name]
    table = replay.Table("t", replay.selectors.Fifo(), replay.selectors.Fifo(), 1000, limiter)
    client = replay.EmbeddedClient([table])
    for value in range(items):
        client.insert([np.array(value)], {"t": 1.0})
    for _ in range(samples):
        client.sample_batch("t", 1, timeout=0)
    text = describe_tables(client)
    assert room in text and stock in text and f"'t' holds {items} items" in text
    if "any" not in room:
        most = int(room.split()[1])
        assert table.can_insert(most) and not table.can_insert(most + 1)
    if "any" not in stock:
        most = int(stock.split()[1])
        assert (most == 0 or table.can_sample(most)) and not table.can_sample(most + 1)
