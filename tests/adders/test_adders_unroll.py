"""Items of whole unrolls, against envs played by hand."""

import dm_env
import numpy as np
import pytest
from background import Background, until

from framework import adders, replay
from framework.replay.client import ServedClient

TABLE = adders.QUEUE_TABLE
FIRST, MID, LAST = 0, 1, 2


def make_client(size=1000, **options):
    return replay.EmbeddedClient([replay.Table.queue(TABLE, size)], **options)


def timestep(kinds, observations):
    kinds = np.asarray(kinds)
    moved = kinds != FIRST
    observations = np.asarray(observations, np.float32)
    return dm_env.TimeStep(
        kinds, (observations * moved).astype(np.float32), (kinds != LAST).astype(np.float32), observations
    )


def play(adder, kinds, start=0):
    """Steps of kinds ``[time][env]``: env b observes 100 b + t, acts -t, its extra is 1000 + t."""
    envs = len(kinds[0])
    for t, kind in enumerate(kinds, start):
        here = timestep(kind, 100 * np.arange(envs) + t)
        if t == start:
            adder.add_first(here)
        else:
            adder.add(np.full(envs, 1 - t), here, {"x": np.full(envs, 999 + t)})


def items(client):
    result = []
    while client.can_sample(TABLE, 1):
        data = client.sample_batch(TABLE, 1, timeout=0).data
        columns = (data.observation, data.action, data.reward, data.extras["x"], data.start_of_episode)
        result.append([np.asarray(c)[0].astype(int).tolist() for c in (*columns, data.mask)])
    return result


def test_the_drawing_in_the_docstring():
    client = make_client()
    adder = adders.UnrollAdder(client, 4)
    env_0 = [FIRST, MID, MID, MID, MID, MID, MID, MID, MID]
    env_1 = [FIRST, MID, LAST, FIRST, MID, MID, MID, LAST, FIRST]
    play(adder, list(zip(env_0, env_1, strict=True)))
    assert items(client) == [
        # observation, action, reward, extras, start, mask
        [[0, 1, 2, 3, 4], [0, -1, -2, -3, 0], [1, 2, 3, 4, 0], [1000, 1001, 1002, 1003, 0], [1, 0, 0, 0, 0],
         [1, 1, 1, 1, 0]],
        [[100, 101, 102, 103, 104], [0, -1, 0, -3, 0], [101, 102, 0, 104, 0], [1000, 1001, 0, 1003, 0],
         [1, 0, 0, 1, 0], [1, 1, 0, 1, 0]],
        [[4, 5, 6, 7, 8], [-4, -5, -6, -7, 0], [5, 6, 7, 8, 0], [1004, 1005, 1006, 1007, 0], [1, 0, 0, 0, 0],
         [1, 1, 1, 1, 0]],
        [[104, 105, 106, 107, 108], [-4, -5, -6, 0, 0], [105, 106, 107, 0, 0], [1004, 1005, 1006, 0, 0],
         [1, 0, 0, 0, 1], [1, 1, 1, 0, 0]],
    ]  # fmt: skip


@pytest.mark.parametrize("concurrent", [False, True])
def test_is_there_when_the_last_step_is_made_and_not_before(concurrent):
    client = make_client(concurrent=concurrent)
    adder = adders.UnrollAdder(client, 3)
    adder.add_first(timestep([FIRST], [0]))
    seen = []
    for t in range(1, 10):
        adder.add(np.zeros(1, int), timestep([MID], [t]), {"x": np.zeros(1, int)})
        seen += [(t, item[0]) for item in items(client)]
    assert seen == [(3, [0, 1, 2, 3]), (6, [3, 4, 5, 6]), (9, [6, 7, 8, 9])]
    adder.close()


def test_an_episode_may_end_where_the_unroll_does():
    client = make_client()
    adder = adders.UnrollAdder(client, 2)
    play(adder, [[kind] for kind in (FIRST, MID, LAST, FIRST, LAST, FIRST, MID)])
    masks = [item[-1] for item in items(client)]
    # Behind the LAST step come its closing row, and the same again for the reset that takes a step.
    assert masks == [[1, 1, 0], [0, 1, 0], [0, 1, 0]]


def test_a_reset_in_the_middle_takes_the_place_of_a_step():
    client = make_client()
    adder = adders.UnrollAdder(client, 3)
    play(adder, [[FIRST], [MID]])
    adder.add_first(timestep([FIRST], [50]))
    adder.add(np.zeros(1, int), timestep([MID], [51]), {"x": np.zeros(1, int)})
    (item,) = items(client)
    assert item[0] == [0, 1, 50, 51] and item[-1] == [1, 0, 1, 0]


def test_a_dropped_unroll_begins_anew():
    client = make_client()
    adder = adders.UnrollAdder(client, 3)
    play(adder, [[FIRST], [MID], [MID]])
    adder.reset()
    play(adder, [[FIRST], [MID], [MID], [MID]], start=10)
    (item,) = items(client)
    assert item[0] == [10, 11, 12, 13] and item[-1] == [1, 1, 1, 0]


def test_is_ready_until_a_whole_unroll_has_no_room():
    client = make_client(size=2, concurrent=False)
    adder = adders.UnrollAdder(client, 3)
    play(adder, [[FIRST]] + [[MID]] * 6)
    ready = []
    for t in range(7, 9):
        ready.append((adder.ready(), adder.room()))
        adder.add(np.zeros(1, int), timestep([MID], [t]), {"x": np.zeros(1, int)})
    assert ready == [(True, 2), (True, 1)]  # There is no room for the last step of the unroll.
    assert not adder.ready()  # the next step makes the third item
    client.sample_batch(TABLE, 1)
    assert adder.ready() and adder.room() == 1
    adder.add(np.zeros(1, int), timestep([MID], [9]), {"x": np.zeros(1, int)})
    client.sample_batch(TABLE, 1)
    assert adder.ready() and adder.room() == 3  # There is room for the whole unroll.


@pytest.mark.parametrize("length", [1, 0, 2.5])
def test_says_which_lengths_there_are(length):
    with pytest.raises(ValueError, match=r"unroll_length: got .* at least 2"):
        adders.UnrollAdder(make_client(), length)


@pytest.mark.parametrize(("envs", "in_flight"), [(1, 1), (3, 1), (2, 2)])
def test_an_unroll_waits_for_its_place_in_the_table(envs, in_flight):
    client = make_client(size=2 * envs)
    adder = adders.UnrollAdder(client, 2, unrolls_in_flight=in_flight)
    made = []

    def act():
        adder.add_first(timestep([FIRST] * envs, [0] * envs))
        for t in range(1, 13):
            step = timestep([MID] * envs, [t] * envs)
            adder.add(np.zeros(envs, int), step, {"x": np.zeros(envs, int)})
            made.append(t)

    acting = Background(act)
    # Two unrolls are in the table, others wait, and the adder holds the actor up with the next.
    until(lambda: client.server_info()[TABLE].rate_limiter_info.insert_stats.pending)
    assert len(made) == 2 * (2 + in_flight) + 1
    drawn = [client.sample_batch(TABLE, envs, timeout=10).data.observation[:, 0].tolist() for _ in range(6)]
    assert drawn == [[t] * envs for t in (0, 2, 4, 6, 8, 10)]
    acting.result(10)


@pytest.mark.parametrize("served", [False, True])
def test_an_unroll_that_had_no_room_gets_in_though_no_step_follows(served):
    """Its actor may wait for parameters that are made of it, and the reader be another process."""
    with replay.Server([replay.Table.queue(TABLE, 1)]) as server:
        client = ServedClient(server.address) if served else server.localhost_client()
        reader = ServedClient(server.address)
        adder = adders.UnrollAdder(client, 2)
        # One fits into the table; the last waits, in the server or in the writer.
        acting = Background(play, adder, [[FIRST]] + [[MID]] * 6)
        seen = [reader.sample_batch(TABLE, 1, timeout=10).data.observation[0, 0] for _ in range(3)]
        assert seen == [0, 2, 4]
        acting.result(10)
        assert adder.close(timeout=10) == 0
        reader.close()
        client.close()


def test_resets_of_all_envs_before_the_first_transition_are_rows():
    """Agents that join an environment later than others begin so."""
    client = make_client()
    adder = adders.UnrollAdder(client, 4)
    play(adder, [[FIRST], [FIRST], [FIRST], [MID], [MID]])
    (item,) = items(client)
    assert item[0] == [0, 1, 2, 3, 4] and item[-1] == [0, 0, 1, 1, 0]
