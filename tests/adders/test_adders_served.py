"""The same items through a server: shared memory and messages only."""

import dm_env
import numpy as np
import pytest
import tree
from adder_steps import FIRST, MID, step

from framework import adders, replay
from framework.replay.remote.client import ServedClient

TABLE = adders.REPLAY_TABLE

MAKERS = {
    "transitions": lambda client: adders.NStepTransitionAdder(client, 3, 0.9),
    "pictures": lambda client: adders.NStepTransitionAdder(client, 2, 0.9, frame_stack=2),
    "sequences": lambda client: adders.SequenceAdder(client, 3, 2),
    "shorter sequences": lambda client: adders.SequenceAdder(client, 3, 3, "TRUNCATE"),
    "states of first rows": lambda client: adders.SequenceAdder(client, 3, 2, extras_of_first_row=["state"]),
    "episodes": lambda client: adders.EpisodeAdder(client, 12, np.zeros),
}


def play(adder, envs=3, length=40):
    rng = np.random.default_rng(0)
    kinds = np.zeros(envs, np.int64)
    observation = np.ones((envs, 2), np.float32)
    for t in range(length):
        reward = rng.normal(size=envs).astype(np.float32)
        timestep = dm_env.TimeStep(kinds, reward, np.ones(envs, np.float32), observation)
        if t == 0:
            adder.add_first(timestep)
        else:
            adder.add(rng.integers(0, 9, envs), timestep, {"state": rng.normal(size=(envs, 3))})
        kinds = np.where(kinds == 2, 0, np.where((t + np.arange(envs)) % 9 == 8, 2, 1))
        newest = rng.normal(size=envs).astype(np.float32)
        observation = np.stack([observation[:, 1], newest], axis=1)


def drain(client):
    items = []
    while client.can_sample(TABLE, 1):
        sample = client.sample_batch(TABLE, 1, timeout=10, pad=True)
        items.append((sample.data, getattr(sample, "lengths", ())))
    return items


@pytest.mark.parametrize("local", [None, False], ids=["shared memory", "messages"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_server_gets_the_items_that_an_embedded_table_gets(make, local):
    embedded = replay.EmbeddedClient([replay.Table.queue(TABLE, 1000)])
    play(make(embedded))
    expected = drain(embedded)
    assert expected
    with replay.Server([replay.Table.queue(TABLE, 1000)]) as server:
        client = replay.ServedClient(f"tcp://127.0.0.1:{server.port}", local=local)
        adder = make(client)
        play(adder)
        assert adder.ready()
        found = drain(client)
        assert adder.close(timeout=10) == 0
        client.close()
    assert len(found) == len(expected)
    for want, got in zip(expected, found, strict=True):
        tree.map_structure(np.testing.assert_array_equal, want, got)


@pytest.mark.parametrize("how", ["embedded", "shared memory", "messages"])
def test_adders_of_different_specs_share_a_server(how):
    tables = [replay.Table.queue(name, 100) for name in ("a", "b")]
    with replay.Server(tables) as server:
        client = server.localhost_client()
        if how != "embedded":
            client = ServedClient(server.address, local=how == "shared memory")
        first = adders.NStepTransitionAdder(client, 1, 0.9, priority_fns={"a": None})
        second = adders.NStepTransitionAdder(client, 1, 0.9, priority_fns={"b": None})
        first.add_first(step(FIRST, 0))
        second.add_first(step(FIRST, [0.0, 0.0]))
        for t in range(1, 4):
            first.add(t, step(MID, t))
            second.add(np.full(2, t, np.float32), step(MID, [t, -t]))
        first.close()
        second.close()
        reader = server.localhost_client()
        ours = reader.sample_batch("a", 3, timeout=10).data
        theirs = reader.sample_batch("b", 3, timeout=10).data
        assert (ours.action.tolist(), ours.next_observation.tolist()) == ([1, 2, 3], [1, 2, 3])
        assert theirs.action.tolist() == [[1, 1], [2, 2], [3, 3]]
        assert theirs.next_observation.tolist() == [[1, -1], [2, -2], [3, -3]]


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
