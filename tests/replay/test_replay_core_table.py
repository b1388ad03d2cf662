"""Tables, embedded: what is drawn, removed, waited for and counted."""

import functools

import numpy as np
import pytest
from background import Background, until
from embedded_table import drain, insert, make
from hypothesis import given, settings
from hypothesis import strategies as st
from served_table import counts, num_rows

from framework import replay
from framework.replay import rate_limiters as rl
from framework.replay import selectors
from framework.replay.rows.layout import LayoutBuilder
from framework.replay.tables.rate_limiters import INSERTERS, SAMPLERS
from framework.replay.writers import NewItems


def test_sample_info():
    client = make(sampler=selectors.Prioritized(1.0))
    keys = insert(client, [0, 1], [1.0, 3.0])
    sample = client.sample_batch("t", 64)
    which, info = sample.data, sample.info
    assert (info.key == keys[which]).all()
    np.testing.assert_allclose(info.probability, np.array([0.25, 0.75])[which])
    np.testing.assert_allclose(info.priority, np.array([1.0, 3.0])[which])
    for value in (0, 1):  # the k-th sample of an item says k
        times = info.times_sampled[which == value]
        assert times.tolist() == list(range(1, len(times) + 1))
    assert [a.dtype for a in info] == [np.uint64, np.float64, np.int64, np.float64, np.int32]
    assert client.server_info()["t"].num_unique_samples == 2


@pytest.mark.parametrize("change", [lambda keys: keys.reshape(2, 2), lambda keys: keys.astype(np.float32)])
def test_wrong_keys_change_nothing(change):
    client = make(sampler=selectors.Prioritized(1.0))
    keys = change(insert(client, [1, 2, 3, 4], [1.0, 3.0, 1.0, 3.0]))
    wrong = pytest.raises((ValueError, TypeError), match=r"keys: got (shape \(2, 2\)|float32)")
    with wrong:
        client.update_priorities("t", keys, [5.0] * len(keys))
    with wrong:
        client.tables["t"].mutate(deletes=keys)
    assert client.server_info()["t"].current_size == 4
    assert set(client.sample_batch("t", 64).info.priority) == {1.0, 3.0}


def test_priority_whose_power_overflows_is_refused():
    client = make(sampler=selectors.Prioritized(2.0))
    with pytest.raises(ValueError, match="power 2"):
        insert(client, [1], [1e200])


def test_default_priority_is_the_largest_so_far():
    client = make(sampler=selectors.MaxHeap())
    insert(client, [0])
    keys = insert(client, [1], [4.0])
    insert(client, [3], [2.0])
    insert(client, [2])
    client.mutate_priorities("t", {int(keys[0]): 9.0, 12345: 10.0}, keys)  # deletes come first
    sample = client.sample_batch("t", 1)
    assert (sample.data[0], sample.info.priority[0]) == (2, 4.0)


def test_old_keys_do_not_hit_new_items():
    client = make(sampler=selectors.MaxHeap(), size=2)
    old = insert(client, [1, 2], [9, 9])
    new = insert(client, [3, 4], [1, 1])
    client.update_priorities("t", [old[0], new[0], old[1], new[1]], [50.0, 7.0, 60.0, 5.0])
    client.mutate_priorities("t", deletes=old)
    info = client.server_info()["t"]
    assert (info.current_size, info.max_priority) == (2, 9.0)
    for value, priority in ((3, 7.0), (4, 5.0)):  # Each has its own, not that of a key that is gone.
        sample = client.sample_batch("t", 1)
        assert (sample.data[0], sample.info.priority[0]) == (value, priority)
        client.mutate_priorities("t", deletes=[*old, sample.info.key[0]])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=30)),
        max_size=30,
    )
)
def test_keys_are_found_where_their_cells_collide(steps):
    """Keys of several writers, whose lowest bits are the same; read-only, as what came with a message is."""
    client = make(size=2000)
    table, writer, live = client.tables["t"], client.batch_writer(), set()
    items = table.items
    items.find(np.zeros(1, np.uint64))  # makes the map
    cells = len(items._key_map._cells)
    layout, index, _ = LayoutBuilder().build(writer.slice("s", "x", writer.append("s", {"x": np.arange(1)})))
    table.check_items(layout, NewItems(index, np.ones(1, np.uint64)))
    for adds, pairs in steps:
        numbers = {client * cells + number for client, number in pairs}
        keys = np.array(sorted(numbers - live if adds else numbers), np.uint64)
        if adds:
            assert table.insert_now(NewItems(index.repeat(len(keys), 0), keys)) == len(keys)
            live |= numbers
        else:
            assert table.mutate(deletes=keys) == len(live & numbers)
            live -= numbers
        asked = np.arange(3 * cells + 50, dtype=np.uint64)
        asked.flags.writeable = False
        slots = items.find(asked)
        np.testing.assert_array_equal(np.flatnonzero(slots >= 0), sorted(live))
        np.testing.assert_array_equal(items.keys[slots[slots >= 0]], sorted(live))
    assert len(table) == len(live)


def test_an_item_takes_few_bytes_beside_its_rows():
    client, writer, n = make(size=3000), None, 500
    for begin in range(0, 4000, n):  # the last ones replace the first ones
        writer = writer or client.batch_writer()
        insert(client, np.arange(begin, begin + n), writer=writer)
    items = client.tables["t"].items
    kept = [*vars(items).values(), *vars(items.sampler).values(), *vars(items.remover).values()]
    assert sum(array.nbytes for array in kept if isinstance(array, np.ndarray)) / 3000 <= 52


# Whose calls wait, what happens to a table of the items `keys`, and whether it ends the calls.
WAKES = {
    "insert": (SAMPLERS, lambda client, keys, held: insert(client, [2]), False),
    "give back": (SAMPLERS, lambda client, keys, held: client.tables["t"].give_back(held), False),
    "sample": (INSERTERS, lambda client, keys, held: client.tables["t"].sample(1), False),
    "delete": (INSERTERS, lambda client, keys, held: client.mutate_priorities("t", deletes=keys), False),
    "reset": (INSERTERS, lambda client, keys, held: client.reset("t"), False),
    "close, samplers": (SAMPLERS, lambda client, keys, held: client.tables["t"].waiting.close(), True),
    "close, inserters": (INSERTERS, lambda client, keys, held: client.tables["t"].waiting.close(), True),
    "interrupt, samplers": (SAMPLERS, lambda client, keys, held: client.interrupt(), True),
    "interrupt, inserters": (INSERTERS, lambda client, keys, held: client.interrupt(), True),
}


@pytest.mark.parametrize("name", WAKES)
def test_calls_that_wait_are_woken(name):
    side, change, ends = WAKES[name]
    client = make(limiter=rl.SampleToInsertRatio(1.0, 1, (0.0, 2.0)))
    table, outcome = client.tables["t"], []
    keys = insert(client, [0, 1])
    held = table.sample(2) if side == SAMPLERS else None

    def wait():
        call = table.wait_to_insert if side == INSERTERS else functools.partial(table.sample, 1)
        try:
            call(None, client.is_interrupted)
            outcome.append("through")
        except replay.ServerClosed:
            outcome.append("ended")

    waiting = Background(wait)
    until(lambda: table.waiting.counts[side])
    change(client, keys, held)
    waiting.result(10)
    assert outcome == ["ended" if ends else "through"]


@pytest.mark.parametrize("flushes", [True, False])
def test_an_item_that_comes_between_a_draw_and_its_wait_is_seen(flushes, monkeypatch):
    client = make()
    table, writer = client.tables["t"], client.batch_writer()
    draw, item = table.draw, {"x": writer.slice("s", "x", writer.append("s", {"x": np.zeros(1)}))}

    def draw_before_the_item_comes(n, delivery):
        complete = draw(n, delivery)
        if not writer._created:
            writer.create_items("t", item)
            writer.flush(keep=not flushes)
        return complete

    monkeypatch.setattr(table, "draw", draw_before_the_item_comes)
    table.sample(1, timeout=20.0)
    assert table.waiting.seconds[SAMPLERS] < 10.0


def test_alone_it_does_not_wait_for_ever():
    client = make(concurrent=False)
    with pytest.raises(replay.WouldBlockError, match="size 0 < min_size_to_sample 1"):
        client.sample_batch("t", 1)


def test_same_seed_same_samples():
    def samples(seed):
        client = make(sampler=selectors.Prioritized(0.6), seed=seed)
        insert(client, range(50), np.arange(50))
        return client.sample_batch("t", 64).data.tolist()

    assert samples(3) == samples(3) != samples(4)
    client = make(seed=9)
    client.tables["t"].set_seed(3)
    insert(client, range(50))
    again = make(seed=3)
    insert(again, range(50))
    assert client.sample_batch("t", 8).data.tolist() == again.sample_batch("t", 8).data.tolist()


def test_replace_is_new_and_empty():
    client = make(sampler=selectors.Prioritized(0.7), times=3)
    insert(client, [1])
    twin = client.tables["t"].replace(name="u", max_size=7)
    assert (twin.name, twin.max_size, twin.max_times_sampled, len(twin)) == ("u", 7, 3, 0)
    assert twin.sampler.priority_exponent == 0.7
    assert twin.rate_limiter.inserts == 0


@pytest.mark.parametrize(
    ("make_table", "order"), [(replay.Table.queue, [0, 1, 2]), (replay.Table.stack, [2, 1, 0])]
)
def test_queue_and_stack(make_table, order):
    client = replay.EmbeddedClient([make_table("t", 3)])
    insert(client, [0, 1, 2])
    assert not client.can_insert("t")
    assert drain(client, 3) == order
    assert not client.can_sample("t")


def test_large_tables_grow():
    client = make(size=5000, sampler=selectors.Fifo(), times=1)
    writer = client.batch_writer()
    keys = np.concatenate([insert(client, np.arange(700) + 700 * i, writer=writer) for i in range(9)])
    assert len(set(keys.tolist())) == 6300
    assert client.sample_batch("t", 5000).data.tolist() == list(range(1300, 6300))


@pytest.mark.parametrize("interference", ["delete", "reset", "evict"])
def test_what_was_drawn_before_a_wait_may_be_removed_during_it(interference):
    client = make(sampler=selectors.Fifo(), size=2, limiter=rl.SampleToInsertRatio(1.0, 1, (0.0, 100.0)))
    keys = insert(client, [1])
    reading = Background(lambda: client.sample_batch("t", 3, timeout=20))
    until(lambda: client.tables["t"].waiting.counts[SAMPLERS])
    if interference == "delete":
        client.mutate_priorities("t", deletes=keys)
    elif interference == "reset":
        client.reset("t")
    insert(client, [7, 8, 9] if interference == "reset" else [7, 8])
    values = reading.result().data.tolist()
    assert set(values[interference != "reset" :]) <= {7, 8, 9}, "no row was used again under the reader"
    assert interference == "reset" or values[0] == 1
    assert counts(client)[1] == 3
    client.reset("t")
    assert num_rows(client) == 0


@pytest.mark.parametrize("used", [True, False])
def test_the_age_of_samples_counts_those_that_were_used(used):
    client = make(selectors.Fifo())
    insert(client, range(10))
    table = client.tables["t"]
    delivery = table.sample(2)
    insert(client, range(5))  # the age is that at the draw
    (table.release if used else table.give_back)(delivery)
    assert table.info.sampled_age == (20 if used else 0)
    client.sample_batch("t", 1)
    assert table.info.sampled_age == (35 if used else 15)
    client.reset("t")
    assert table.info.sampled_age == 0


def test_the_message_of_a_timeout_is_only_that():
    client = replay.EmbeddedClient([replay.Table.queue("t", 3)])
    with pytest.raises(replay.DeadlineExceededError) as error:
        client.sample_batch("t", 1, timeout=0.01)
    assert client.server_info()["t"].rate_limiter_info.sample_stats.pending == 0
    assert str(error.value).startswith("table 't': cannot sample 1 items (0 went through): size 0 <")


def test_items_that_were_sampled_more_often_than_a_restored_limit_leave_with_their_next_sample():
    client = make(times=2)
    table = client.tables["t"]
    insert(client, range(20))
    # What a checkpoint of a table without a limit leaves behind.
    table.items.times[:20] = 5
    assert table.can_sample(20)
    assert sorted(drain(client, 20)) == list(range(20))
    assert table.info.current_size == 0
