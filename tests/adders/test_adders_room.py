"""When what is staged is seen, and what adders do when a table is full."""

import threading
import types

import numpy as np
import pytest
from adder_steps import FIRST, MID, TABLE, make_client, observations, step
from background import Background, until
from served_table import table

from framework import adders, replay
from framework.replay.tables.rate_limiters import INSERTERS


def test_a_reader_sees_every_step_at_once():
    client = make_client(table(TABLE))
    adder = adders.NStepTransitionAdder(client, 1, 0.9, max_delay=1e9)
    adder.add_first(step(FIRST, 0))
    for i in range(1, 20):
        adder.add(0, step(MID, i))
        assert client.server_info()[TABLE].current_size == i


def test_priority_functions_that_read_do_not_wait_for_one_another(monkeypatch):
    monkeypatch.setattr("framework.replay.writer._READ_S", 1e9)
    client, both = make_client(table(TABLE)), threading.Barrier(2)

    def look(items):
        both.wait(30)
        return 1.0 + client.server_info()[TABLE].current_size

    def write():
        adder = adders.NStepTransitionAdder(client, 1, 0.9, priority_fns={TABLE: look}, max_delay=1e9)
        adder.add_first(step(FIRST, 0))
        adder.add(0, step(MID, 1))
        adder.flush(30)

    for writing in [Background(write) for _ in range(2)]:
        writing.result()
    assert client.server_info()[TABLE].current_size == 2


@pytest.mark.parametrize(("bound", "most"), [(8, 8), (2, 2), (1, 2), (None, 200)], ids=str)
def test_no_more_is_staged_than_may_be_in_flight_and_one_time_step_at_least(bound, most):
    client = make_client()
    adder = adders.NStepTransitionAdder(client, 1, 0.9, max_in_flight_items=bound, max_delay=1e9)
    adder._out.writer._before_read = None  # else a look at the table would write what is staged
    adder.add_first(step(FIRST, 0, envs=2))
    staged = []
    for i in range(1, 101):
        adder.add(np.zeros(2, np.int64), step(MID, i, envs=2))
        staged.append(2 * i - client.tables[TABLE].info.current_size)
    assert max(staged) <= most
    if bound is None:
        assert max(staged) > 8


@pytest.mark.parametrize("concurrent", [True, False])
def test_a_reader_never_waits_for_the_room_that_its_reading_makes(concurrent):
    client = make_client(replay.Table.queue(TABLE, 3), concurrent=concurrent)
    adder = adders.NStepTransitionAdder(client, 1, 0.9, max_delay=1e9)
    adder.add_first(step(FIRST, 0))
    for i in range(1, 9):
        adder.add(0, step(MID, i))
    # Three of the eight go in; each sample makes room for more, in order.
    assert client.server_info()[TABLE].current_size == 3
    assert not adder.ready()
    assert observations(client) == [[i, i + 1] for i in range(8)]
    assert adder.ready()


def test_ready_means_that_each_table_takes_an_item_and_none_waits():
    tables = [replay.Table.queue(TABLE, 3), replay.Table.queue("other", 7)]
    client = replay.EmbeddedClient(tables, concurrent=False)
    adder = adders.NStepTransitionAdder(client, 3, 0.9, priority_fns={TABLE: None, "other": None})
    adder.add_first(step(FIRST, 0, envs=2))
    steps = 0
    while adder.ready():
        adder.add(np.zeros(2), step(MID, 1, envs=2))
        steps += 1
    # Two items from each step; one of the second waits, and what comes after it too.
    assert steps == 2
    assert [info.current_size for info in client.server_info().values()] == [3, 2]
    client.sample_batch(TABLE, 2)
    assert adder.ready()
    assert [info.current_size for info in client.server_info().values()] == [2, 4]


def test_where_nothing_else_runs_waiting_is_an_error_and_loses_nothing():
    client = make_client(replay.Table.queue(TABLE, 2), concurrent=False)
    adder = adders.NStepTransitionAdder(client, 1, 0.9)
    adder.add_first(step(FIRST, 0))
    for i in range(1, 6):
        adder.add(0, step(MID, i))
    with pytest.raises(replay.WouldBlockError, match=r"ready\(\)"):
        adder.flush()
    assert observations(client) == [[i, i + 1] for i in range(5)]


def test_where_nothing_else_runs_only_so_many_items_wait():
    client = make_client(replay.Table.queue(TABLE, 3), concurrent=False)
    adder = adders.NStepTransitionAdder(client, 1, 0.9)
    adder.add_first(step(FIRST, 0))
    with pytest.raises(replay.WouldBlockError, match=r"ready\(\)"):
        for i in range(1, 10_000):
            adder.add(0, step(MID, i))
    assert i <= 3 * 256
    assert observations(client) == [[n, n + 1] for n in range(i - 1)], "nothing is lost"
    adder.add(0, step(MID, i))
    assert observations(client) == [[i - 1, i]]


def test_flush_and_close_say_what_found_no_room():
    client = make_client(replay.Table.queue(TABLE, 2))
    adder = adders.NStepTransitionAdder(client, 1, 0.9, max_delay=1e9)
    adder.add_first(step(FIRST, 0))
    for i in range(1, 6):
        adder.add(0, step(MID, i))
    with pytest.raises(replay.DeadlineExceededError, match="3 items"):
        adder.flush(timeout=0.01)
    assert adder.close(timeout=0.01) == 3
    assert observations(client) == [[0, 1], [1, 2]]
    assert all(stream.num_rows == 0 for stream in client.store.streams.values())


def test_a_writer_that_waits_is_woken_by_a_reader_in_another_thread():
    client = make_client(replay.Table.queue(TABLE, 4))
    adder = adders.NStepTransitionAdder(client, 2, 0.9, max_delay=0.0)
    count = 200

    def write():
        adder.add_first(step(FIRST, 0))
        for i in range(1, count + 1):
            adder.add(0, step(MID, i))

    writing = Background(write)
    got = [client.sample_batch(TABLE, 1, timeout=30).data.next_observation[0] for _ in range(count)]
    writing.result()
    assert got == list(range(1, count + 1))


@pytest.mark.parametrize("how", ["add", "before a step", "before a pause"])
def test_the_first_call_after_the_delay_writes_what_is_staged(how, monkeypatch):
    """The reader looks past the hook for readers of this process, as one in another process would."""
    clock = [100.0]
    monkeypatch.setattr(
        "framework.adders.block_adder.time", types.SimpleNamespace(monotonic=lambda: clock[0])
    )
    table = replay.Table.queue(TABLE, 10)
    adder = adders.NStepTransitionAdder(make_client(table), 1, 0.9, max_delay=5.0)
    adder._out.writer._before_read = None
    adder.add_first(step(FIRST, 0))
    adder.add(0, step(MID, 1))
    clock[0] += 4.0
    adder.add(0, step(MID, 2))
    adder.flush_pending(late=True)
    assert len(table) == 0
    if how == "before a pause":
        adder.flush_pending()
        assert len(table) == 2
    clock[0] += 1.0
    adder.add(0, step(MID, 3)) if how != "before a step" else adder.flush_pending(late=True)
    assert len(table) == {"add": 3, "before a step": 2, "before a pause": 2}[how]
    clock[0] += 5.0
    adder.flush_pending(late=True)
    assert len(table) == (2 if how == "before a step" else 3)
    adder.close()


def test_an_interrupted_client_ends_the_wait():
    client = make_client(replay.Table.queue(TABLE, 1))
    adder = adders.NStepTransitionAdder(client, 1, 0.9, max_delay=0.0)
    adder.add_first(step(FIRST, 0))
    writing = Background(lambda: [adder.add(0, step(MID, i)) for i in range(1, 10_000)])
    until(lambda: client.tables[TABLE].waiting.counts[INSERTERS])
    client.interrupt()
    with pytest.raises(replay.ServerClosed):
        writing.result()
    assert adder.close(timeout=1) >= 0
