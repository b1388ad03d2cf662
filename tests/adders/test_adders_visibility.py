"""What readers see of the steps that were added: in this thread, in another one, and in another process."""

import itertools
import threading
import time

import pytest
from adder_steps import FIRST, MID, TABLE, step
from background import Background, until
from forked import Forked
from hypothesis import given, settings
from hypothesis import strategies as st
from served_table import connections, table

from framework import adders, replay

OPS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 9)),
    st.tuples(st.sampled_from(["size", "sample"]), st.sampled_from(["here", "thread"])),
    st.tuples(st.sampled_from(["ready", "pending", "flush"]), st.none()),
)


def call(where, function, *args):
    return function(*args) if where == "here" else Background(function, *args).result(20)


@pytest.mark.parametrize("way", ["embedded", "local", "remote"])
def test_every_reader_of_this_process_sees_every_step(way):
    """The model: items go in, in order, while there is room. A read, wherever it is, finds them all there."""

    @settings(max_examples=25, deadline=None)
    @given(st.lists(OPS, max_size=25), st.sampled_from([3, 10_000]), st.sampled_from([0.0, 0.01, 1e9]))
    def run(ops, room, max_delay):
        with connections(way) as connect:
            client = connect(replay.Table.queue(TABLE, room))
            adder = adders.NStepTransitionAdder(client, 1, 0.9, max_delay=max_delay)
            adder.add_first(step(FIRST, 0))
            added = sampled = 0
            for op, argument in ops:
                if op == "add":
                    for _ in range(argument):
                        added += 1
                        adder.add(0, step(MID, added))
                elif op == "pending":
                    adder.flush_pending()
                elif op == "ready":
                    assert adder.ready() == (added - sampled < room)
                elif op == "flush" and added - sampled > room:
                    with pytest.raises(replay.DeadlineExceededError):
                        adder.flush(timeout=0)
                elif op == "flush":
                    adder.flush(timeout=20)
                elif op == "sample" and added > sampled:
                    drawn = call(argument, client.sample_batch, TABLE, 1, 20)
                    sampled += 1
                    assert drawn.data.next_observation.tolist() == [sampled]
                elif op == "size":
                    info = call(argument, client.server_info)[TABLE]
                    assert info.current_size == min(room, added - sampled)
            assert adder.close(timeout=0) == max(0, added - sampled - room)
            assert client.server_info()[TABLE].current_size == min(room, added - sampled)

    run()


@pytest.mark.parametrize("way", ["embedded", "local"])
@pytest.mark.parametrize("max_delay", [0.0, 0.02, 1e9], ids=str)
def test_a_reader_beside_the_thread_that_adds_misses_no_step_that_was_added_before(way, max_delay):
    with connections(way) as connect:
        client = connect(table(TABLE, 10_000))
        adder = adders.NStepTransitionAdder(client, 1, 0.9, max_delay=max_delay)
        added, total = itertools.count(), 400
        seen = [0]

        def add():
            adder.add_first(step(FIRST, 0))
            for i in range(1, total + 1):
                adder.add(0, step(MID, i))
                seen[0] = next(added) + 1
                if i % 50 == 0:
                    time.sleep(0.002)

        adding = Background(add)
        while adding.running():
            before = seen[0]
            assert client.server_info()[TABLE].current_size >= before
        adding.result()
        assert client.server_info()[TABLE].current_size == total
        adder.close()


@pytest.mark.parametrize("room", [1, 4])
@pytest.mark.parametrize("in_flight", [1, None], ids=str)
@pytest.mark.parametrize("way", ["embedded", "local"])
def test_a_reader_that_waits_gets_each_step_in_order_while_the_adder_waits_for_room(way, in_flight, room):
    """The thread that adds ends without another call: what it staged last is the reader's, too."""
    total = 300
    with connections(way) as connect:
        client = connect(replay.Table.queue(TABLE, room))
        adder = adders.NStepTransitionAdder(client, 1, 0.9, max_in_flight_items=in_flight)

        def add():
            adder.add_first(step(FIRST, 0))
            for i in range(1, total + 1):
                adder.add(0, step(MID, i))

        adding = Background(add)
        seen = [
            client.sample_batch(TABLE, 1, timeout=20).data.next_observation.tolist() for _ in range(total - 1)
        ]
        adding.result(20)
        seen.append(client.sample_batch(TABLE, 1, timeout=20).data.next_observation.tolist())
        assert seen == [[i] for i in range(1, total + 1)]
        adder.close()


@pytest.mark.parametrize("way", ["embedded", "local", "remote"])
def test_a_reader_that_waits_already_gets_what_is_staged_without_another_call(way):
    with connections(way) as connect:
        client = connect(replay.Table.queue(TABLE, 10))
        adder = adders.NStepTransitionAdder(client, 1, 0.9, max_delay=1e9)
        adder.add_first(step(FIRST, 0))
        for i in (1, 3):
            reading = Background(client.sample_batch, TABLE, 2, 60)
            until(lambda: client.server_info()[TABLE].rate_limiter_info.sample_stats.pending)
            adder.add(0, step(MID, i))
            adder.add(0, step(MID, i + 1))
            assert reading.result(4).data.next_observation.tolist() == [i, i + 1]
        adder.close()


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 8),
    st.integers(0, 8),
    st.sampled_from(["here", "thread"]),
    st.sampled_from(["add", "flush", "close"]),
)
def test_an_error_of_a_write_is_the_adders_and_not_the_readers(bad, more, where, then):
    def fail(items):
        if (items.next_observation == bad).any():
            raise RuntimeError("no priority")
        return 1.0

    with connections("embedded") as connect:
        client = connect(table(TABLE))
        adder = adders.NStepTransitionAdder(client, 1, 0.9, priority_fns={TABLE: fail}, max_delay=1e9)
        adder.add_first(step(FIRST, 0))
        for i in range(1, bad + more + 1):
            adder.add(0, step(MID, i))
        assert call(where, client.server_info)[TABLE].current_size == 0
        with pytest.raises(RuntimeError, match="no priority"):
            if then == "add":
                adder.add(0, step(MID, 99))
            elif then == "flush":
                adder.flush()
            else:
                adder.close()
        if then != "close":
            adder.add_first(step(FIRST, 0))
            adder.add(0, step(MID, 100))
            assert call(where, client.server_info)[TABLE].current_size == 1
        assert adder.close(timeout=0) == 0


def test_nothing_waits_for_a_priority_function_that_waits_for_a_reader():
    """Two adders' functions read at the same time, and so does a thread that writes nothing."""
    with connections("embedded") as connect:
        client, both = connect(table(TABLE)), threading.Barrier(3)

        def look(items):
            both.wait(20)
            client.server_info()
            both.wait(20)
            return 1.0

        def write():
            adder = adders.NStepTransitionAdder(client, 1, 0.9, priority_fns={TABLE: look}, max_delay=1e9)
            adder.add_first(step(FIRST, 0))
            adder.add(0, step(MID, 1))
            adder.close(20)

        writing = [Background(write) for _ in range(2)]
        both.wait(20)
        both.wait(20)
        for each in writing:
            each.result(20)
        assert client.server_info()[TABLE].current_size == 2


def serve_and_read(pipe, count):
    """Serves a queue, and says when each of `count` items could be read."""
    with replay.Server([replay.Table.queue(TABLE, 1000)]) as server:
        pipe.send(server.address)
        client = server.localhost_client()
        arrived = []
        for _ in range(count):
            client.sample_batch(TABLE, 1, timeout=60)
            arrived.append(time.monotonic())
        pipe.send(arrived)
        pipe.recv()  # The adder is closed.


def test_another_process_sees_a_step_after_the_delay_and_one_step_of_the_environment():
    count, max_delay, env_step = 9, 0.1, 0.25
    reader = Forked(serve_and_read, count)
    try:
        client = replay.Client(reader.word())
        adder = adders.NStepTransitionAdder(client, 1, 0.9, max_delay=max_delay)
        adder.add_first(step(FIRST, 0))
        added = []
        for i in range(1, count + 1):
            adder.add(0, step(MID, i))
            added.append(time.monotonic())
            time.sleep(env_step)
        adder.flush(timeout=20)  # No step follows the last ones.
        arrived = reader.word()
        late = [there - here for here, there in zip(added, arrived, strict=True)]
        assert max(late) < max_delay + env_step + 0.5, late
        assert adder.close(timeout=20) == 0
        client.close()
        reader.tell("closed")
        reader.end()
    finally:
        reader.kill()
