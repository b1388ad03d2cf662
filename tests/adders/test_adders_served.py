"""The same items through a server: shared memory and messages only."""

import numpy as np
import pytest
import tree
from adder_steps import FIRST, MID, TABLE, feed, make_client, read, stacked_episodes, step

from framework import adders, replay
from framework.replay.client import ServedClient

MAKERS = {
    "transitions": lambda client: adders.NStepTransitionAdder(client, 3, 0.9),
    "pictures": lambda client: adders.NStepTransitionAdder(client, 2, 0.9, frame_stack=2),
    "sequences": lambda client: adders.SequenceAdder(client, 3, 2),
    "shorter sequences": lambda client: adders.SequenceAdder(client, 3, 3, "TRUNCATE"),
    "states of first rows": lambda client: adders.SequenceAdder(client, 3, 2, extras_of_first_row=["state"]),
    "episodes": lambda client: adders.EpisodeAdder(client, 12, np.zeros),
}


@pytest.mark.parametrize("local", [None, False], ids=["shared memory", "messages"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_server_gets_the_items_that_an_embedded_table_gets(make, local):
    embedded = make_client()
    feed(make(embedded), stacked_episodes(40))
    expected = read(embedded)
    assert expected
    with replay.Server([replay.Table.queue(TABLE, 1000)]) as server:
        client = ServedClient(server.address, local=local)
        adder = make(client)
        feed(adder, stacked_episodes(40))
        assert adder.ready()
        found = read(client)
        assert adder.close(timeout=10) == 0
        client.close()
    assert len(found) == len(expected)
    for want, got in zip(expected, found, strict=True):
        tree.map_structure(np.testing.assert_array_equal, want, got)


@pytest.mark.parametrize("how", ["shared memory", "messages"])
def test_an_adder_whose_server_is_gone_says_so_and_closes(how):
    server = replay.Server([replay.Table.queue(TABLE, 1000)])
    client = ServedClient(server.address, local=how == "shared memory", reconnect_timeout=0.5)
    adder = adders.NStepTransitionAdder(client, 1, 0.9, max_in_flight_items=1, max_delay=1e9)
    adder.add_first(step(FIRST, 0))
    adder.add(0, step(MID, 1))
    adder.flush(timeout=10)
    server.stop()
    with pytest.raises(replay.ServerClosed):
        for t in range(2, 10_000):
            adder.add(0, step(MID, t))
    assert adder.close(timeout=1) >= 0
    client.close()
