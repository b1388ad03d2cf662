"""Our tables, adders, datasets and agents on a real dm-reverb server."""

from __future__ import annotations

import pathlib
import threading

import dm_env
import numpy as np
import pytest
from adder_steps import feed, stacked_episodes
from background import Background
from served_table import table

pytest.importorskip("reverb", reason="dm-reverb is not installed")

import launch
from framework import adders, environments, nest, replay, specs
from framework.datasets import Dataset
from framework.environments.wrappers import FrameStack
from framework.replay import dm_reverb
from framework.replay.dm_reverb import writer as dm_reverb_writer
from framework.types import Step, Transition

pytestmark = pytest.mark.reverb
PATIENCE = 30.0


def make_table(**options):
    return table(**{"sampler": replay.selectors.Fifo(), **options})


@pytest.fixture
def serve():
    """Makes servers that are stopped at the end."""
    servers = []

    def make(*tables, **options):
        server = dm_reverb.Server(list(tables), **options)
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.stop()


def write(writer, values, table="t", **options):
    values = np.asarray(values, np.int64)
    rows = writer.append("steps", {"x": values})
    writer.create_items(table, {"x": writer.slice("steps", "x", rows)}, **options)
    writer.release("steps", rows)


def on_both(serve):
    """A table of ours and one of dm-reverb, whose items are sampled once: their clients."""
    tables = [make_table(max_times_sampled=1) for _ in range(2)]
    return replay.EmbeddedClient(tables[:1]), serve(tables[1]).localhost_client()


def everything(client):
    size = client.server_info()["t"].current_size
    return client.sample_batch("t", size, timeout=PATIENCE)


def read(client, n, table="t", **options):
    return client.sample_batch(table, n, **options).data["x"].tolist()


@pytest.mark.parametrize("selector", ["Uniform", "Fifo", "Lifo", "MinHeap", "MaxHeap", "Prioritized"])
def test_tables_say_the_same_of_themselves(serve, selector):
    def make():
        cls = getattr(replay.selectors, selector)
        limiter = replay.rate_limiters.SampleToInsertRatio(2.0, 3, 4.0)
        chosen = cls(0.75) if selector == "Prioritized" else cls()
        return replay.Table("t", chosen, replay.selectors.Lifo(), 7, limiter, max_times_sampled=5)

    ours = replay.EmbeddedClient([make()]).server_info()["t"]
    theirs = serve(make()).localhost_client().server_info()["t"]
    times = type(ours.table_worker_time)()
    assert theirs._replace(table_worker_time=times) == ours._replace(table_worker_time=times)


TO_T = {"priority_fns": {"t": None}}
ADDERS = {
    "transitions": (lambda client: adders.NStepTransitionAdder(client, 3, 0.9, **TO_T), Transition),
    "sequences": (lambda client: adders.SequenceAdder(client, 4, 2, **TO_T), Step),
}


def contents(data):
    """The items of a batch as a sorted list of what is in them."""
    leaves, structure = nest.flatten(data)
    flat = [np.asarray(leaf, np.float64).reshape(len(leaf), -1) for leaf in leaves]
    return structure, np.sort(
        np.concatenate(flat, axis=1).view(f"V{8 * sum(f.shape[1] for f in flat)}"), axis=0
    )


@pytest.mark.parametrize("name", ADDERS)
@pytest.mark.parametrize("window", [None, 16], ids=["default", "rows are sent again"])
def test_adders_write_the_same_items(serve, monkeypatch, name, window):
    if window is not None:
        monkeypatch.setattr(dm_reverb_writer, "_WINDOW", window)
    make_adder, kind = ADDERS[name]
    clients = on_both(serve)
    for client in clients:
        adder = make_adder(client)
        feed(adder, stacked_episodes(40))
        adder.close()
    ours, theirs = map(everything, clients)
    assert type(theirs.data) is kind and len(theirs.info.key) > 40
    structure, items = contents(ours.data)
    assert contents(theirs.data)[0] == structure
    np.testing.assert_array_equal(contents(theirs.data)[1], items)
    for array, other in zip(theirs.info[1:], ours.info[1:], strict=True):
        np.testing.assert_array_equal(array, other)
        assert array.dtype == other.dtype


def test_stacks_of_frames_are_the_same(serve):
    """Each frame is stored once; agents ask for it where the environment's spec says that it stacks."""
    clients = on_both(serve)
    for client in clients:
        environment = FrameStack(environments.make("gymnasium:CartPole-v1", num_envs=2, seed=1), 3)
        stack = specs.frame_stack(environment.observation_spec())
        adder = adders.NStepTransitionAdder(client, 2, 0.9, priority_fns={"t": None}, frame_stack=stack)
        adder.add_first(environment.reset())
        for step in range(60):
            action = np.full(2, step % 3 > 0, np.int64)
            adder.add(action, environment.step(action))
        adder.close()
        environment.close()
    ours, theirs = (everything(client).data for client in clients)
    assert ours.observation.shape[1:] == (3, 4) and len(ours.reward) > 100
    for array, other in zip(ours[:5], theirs[:5], strict=True):
        np.testing.assert_array_equal(array, other)


def test_ragged_items_are_padded(serve):
    client = serve(make_table(max_times_sampled=1)).localhost_client()
    with client.batch_writer() as writer:
        rows = writer.append("steps", {"x": np.arange(1, 5)})
        index = np.stack([rows[:3], np.repeat(rows[3], 3)])
        writer.create_items("t", {"x": writer.slice("steps", "x", index, lengths=[3, 1])})
        with pytest.raises(ValueError, match="different lengths"):
            client.sample_batch("t", 2, timeout=PATIENCE)
        writer.create_items("t", {"x": writer.slice("steps", "x", index, lengths=[3, 1])})
        sample = client.sample_batch("t", 2, timeout=PATIENCE, pad=True)
    assert sample.data["x"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert sample.lengths["x"].tolist() == [3, 1]


def test_a_signature_keeps_the_structure_without_a_description(serve):
    spec = dm_env.specs.Array((), np.int64)
    signature = Transition(spec, {"move": spec}, spec, spec, spec)
    client = serve(make_table(signature=signature)).localhost_client()
    with client.batch_writer() as writer:
        rows = writer.append("steps", {"x": np.array([5])})
        leaf = writer.slice("steps", "x", rows)
        writer.create_items("t", Transition(leaf, {"move": leaf}, leaf, leaf, leaf))
    native = next(iter(client.native.sample("t", 1, emit_timesteps=False)))
    assert [int(leaf) for leaf in native.data] == [5] * 5
    sample = client.sample_batch("t", 1, timeout=PATIENCE)
    assert type(sample.data) is Transition and sample.data.action["move"].tolist() == [5]


def test_bad_priorities_do_not_reach_the_server(serve):
    client = serve(make_table(sampler=replay.selectors.Prioritized(1.0))).localhost_client()
    writer = client.batch_writer()
    for bad in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="priorities"):
            write(writer, [1], priorities=[bad])
    write(writer, [1], priorities=[2.0])
    key = client.sample_batch("t", 1, timeout=PATIENCE).info.key
    for bad in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="priorities"):
            client.update_priorities("t", key, [bad])
        with pytest.raises(ValueError, match="priorities"):
            client.mutate_priorities("t", updates={int(key[0]): bad})
    assert client.sample_batch("t", 1, timeout=PATIENCE).info.priority.tolist() == [2.0]
    client.update_priorities("t", key, [7.0])
    assert client.sample_batch("t", 1, timeout=PATIENCE).info.priority.tolist() == [7.0]
    write(writer, [2])  # gets the largest so far
    client.mutate_priorities("t", deletes=[int(key[0])])
    assert client.sample_batch("t", 1, timeout=PATIENCE).info.priority.tolist() == [7.0]


def test_unknown_tables(serve):
    client = serve(make_table()).localhost_client()
    with pytest.raises(replay.UnknownTableError, match="'u'"):
        client.sample_batch("u", 1)
    with pytest.raises(ValueError, match="'u'"):
        write(client.batch_writer(), [1], table="u")


def test_items_that_a_limiter_refuses_wait_and_are_counted(serve):
    client = serve(replay.Table.queue("t", 4)).localhost_client()
    writer = client.batch_writer(max_in_flight_items=2)
    assert writer.can_insert("t", 4) and not writer.can_insert("t", 5)
    with pytest.raises(replay.DeadlineExceededError):
        write(writer, range(10), timeout=0.05)
    assert writer.num_pending == 6 and not writer.can_insert("t")
    assert read(client, 4, timeout=PATIENCE) == [0, 1, 2, 3]
    with pytest.raises(replay.DeadlineExceededError):
        writer.flush(timeout=0.05, keep=1)
    writer.flush(timeout=PATIENCE, keep=2)
    assert read(client, 6, timeout=PATIENCE) == [4, 5, 6, 7, 8, 9]
    writer.flush(timeout=PATIENCE)
    assert writer.num_pending == 0 and writer.can_insert("t", 4)
    with pytest.raises(replay.DeadlineExceededError):
        write(writer, range(9), timeout=0.05)
    assert writer.close(timeout=0.05) == 5
    writer.show()  # by a reader that saw the writer just before it was closed


@pytest.mark.parametrize("in_flight", [1, 2, 5, None])
@pytest.mark.parametrize("chunk", [1, 7])
def test_no_item_is_lost_or_overtaken_while_the_limiter_waits(serve, in_flight, chunk):
    client = serve(replay.Table.queue("t", 3)).localhost_client()
    writer = client.batch_writer(max_in_flight_items=in_flight)
    most, total = [], 42

    def write_all():
        for begin in range(0, total, chunk):
            write(writer, range(begin, begin + chunk))
            most.append(writer.num_pending)
        writer.flush(timeout=PATIENCE)

    writing = Background(write_all)
    found = []
    while len(found) < total:
        found += read(client, 2, timeout=PATIENCE)
    writing.result(PATIENCE)
    assert found == list(range(total)) and writer.num_pending == 0
    assert max(most) <= (in_flight or dm_reverb_writer.DEFAULT_IN_FLIGHT)


def test_what_the_caller_holds_back_is_read_too(serve):
    client = serve(make_table()).localhost_client()
    writer = client.batch_writer()

    class Caller:
        def hand_over(self):
            write(writer, [7])

    caller = Caller()
    writer.before_read(caller.hand_over)
    assert client.can_sample("t") and read(client, 1, timeout=PATIENCE) == [7]


def test_items_take_as_long_after_thousands_of_rows_as_at_first(serve):
    """dm-reverb names every step that its writer keeps in each message: thousands took 5 ms an item."""
    writer = serve(make_table()).localhost_client().batch_writer()
    write(writer, range(3000))
    kept = writer._writer.history["steps/x"]
    assert sum(step is not None for step in kept._data_references) <= 128


def test_waiting_ends_with_timeout_interrupt_and_stop(serve):
    server = serve(make_table())
    client = server.localhost_client()
    with pytest.raises(replay.DeadlineExceededError):
        client.sample_batch("t", 1, timeout=0.02)
    for end in (client.interrupt, server.stop):
        waiting = client if end == client.interrupt else server.localhost_client()
        call = Background(waiting.sample_batch, "t", 1)
        end()
        with pytest.raises(replay.ServerClosed):
            call.result(PATIENCE)


def test_nobody_else_runs(serve):
    client = serve(make_table(), concurrent=False).localhost_client()
    with pytest.raises(replay.WouldBlockError):
        client.sample_batch("t", 1)
    dataset = Dataset(client, "t", 2)
    assert not dataset.ready()
    write(client.batch_writer(), [1, 2])
    threads = {*threading.enumerate()}
    assert dataset.ready() and next(dataset).data["x"].tolist() == [1, 1]
    assert {*threading.enumerate()} <= threads
    assert client.server_info()["t"].rate_limiter_info.sample_stats.completed == 2


def test_batches_fetched_ahead_are_not_lost(serve):
    client = serve(make_table(max_times_sampled=1)).localhost_client()
    write(client.batch_writer(), range(12))
    with Dataset(client, "t", 2, prefetch=2) as dataset:
        assert next(dataset).data["x"].tolist() == [0, 1]
    assert sorted(read(client, 10, timeout=PATIENCE)) == list(range(2, 12))


def test_the_checkpoint_has_a_folder_of_its_own(serve, tmp_path):
    (tmp_path / "results.csv").write_text("dear")
    server = serve(make_table(), checkpointer=tmp_path)
    client = server.localhost_client()
    write(client.batch_writer(), [3])
    path = pathlib.Path(client.checkpoint())
    client.checkpoint()
    assert (tmp_path / "dm-reverb") in path.parents
    assert (tmp_path / "results.csv").read_text() == "dear"
    server.stop()
    for checkpointer in (tmp_path, replay.checkpointers.DefaultCheckpointer(str(tmp_path))):
        again = serve(make_table(), checkpointer=checkpointer).localhost_client()
        assert read(again, 1, timeout=PATIENCE) == [3]
    with pytest.raises(ValueError, match="checkpointer"):
        serve(make_table(), checkpointer=7)


def test_another_process_finds_the_port(tmp_path):
    address = f"ipc://{tmp_path}/replay"
    finding = Background(dm_reverb.connect_node, address)
    options = {"embedded": False, "concurrent": True, "address": address, "curve": None}
    server = dm_reverb.serve_node([make_table()], **options)
    client = finding.result(PATIENCE)
    write(client.batch_writer(), [4, 5])
    assert client.can_sample("t") and read(client, 1, timeout=PATIENCE) == [4]
    server.stop()
    again = dm_reverb.serve_node([make_table()], **options)
    assert again.port == server.port
    again.stop()


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_dqn_trains(engine):
    pytest.importorskip("torch")
    from agents.dqn import DQN, DQNConfig
    from framework import programs

    settings = {"min_replay_size": 64, "batch_size": 16, "samples_per_insert": 4.0, "insert_burst": 16}
    agent = DQN(DQNConfig(**settings, prioritized=engine == "threads"))
    run = {"max_env_steps": 400, "evaluate_period": 400, "num_evaluation_episodes": 2}
    config = programs.RunConfig(**run, replay_backend="reverb")
    program = programs.make_program(agent, "gymnasium:CartPole-v1", config)
    result = launch.launch(program, engine=engine)
    assert result["env_steps"] == 400 and result["learner_steps"] >= 40
