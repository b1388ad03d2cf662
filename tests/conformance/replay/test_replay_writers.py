"""Writers of steps: programs that once gave other values here than on dm-reverb.

Ours runs them embedded and as a client of another process would.
"""

from __future__ import annotations

import importlib

import dm_env.specs
import numpy as np
import pytest

I64, F32 = np.int64, np.float32


def lists(leaves):
    return [np.asarray(leaf).tolist() for leaf in leaves]


def items(client, table="t"):
    """The leaves of every item of a table, oldest first; takes them out."""
    size = client.server_info()[table].current_size
    samples = client.sample(table, size, emit_timesteps=False) if size else []
    return [lists(sample.data) for sample in samples]


# Columns of one step.


def test_an_open_step_counts_in_every_column(rig):
    writer = rig.client().trajectory_writer(5)
    for i in range(3):
        writer.append({"obs": I64(i)}, partial_step=True)
        writer.append({"act": I64(10 + i)})
    writer.append({"obs": I64(3)}, partial_step=True)
    history = writer.history
    assert history["obs"][-3:-1].numpy().tolist() == [1, 2]
    assert history["act"][-3:-1].numpy().tolist() == [11, 12]
    assert [len(history["obs"]), len(history["act"]), writer.episode_steps] == [4, 4, 3]
    assert [column is None for column in history["act"]] == [False, False, False, True]
    with pytest.raises(ValueError, match="None"):
        history["act"][-1]
    writer.append(data={"act": I64(13)})
    assert writer.history["act"][-1].numpy() == 13 and writer.episode_steps == 4


def test_columns_that_begin_late_or_pause_count_every_step(rig):
    client = rig.client()
    writer = client.trajectory_writer(6)
    writer.append({"a": I64(0)})
    writer.append({"a": None})
    writer.append({"a": I64(2), "b": I64(20)})
    writer.append({"b": I64(30)})
    assert [len(writer.history["a"]), len(writer.history["b"]), writer.episode_steps] == [4, 4, 4]
    writer.create_item(
        "t",
        1.0,
        {"a": writer.history["a"][[0, 2]], "b": writer.history["b"][-2:], "c": writer.history["a"][2]},
    )
    writer.flush()
    assert items(client) == [[[0, 2], [20, 30], 2]]


@pytest.mark.parametrize("kind", [tuple, list])
def test_sequences_grow(rig, kind):
    client = rig.client()
    writer = client.trajectory_writer(5)
    writer.append(kind([I64(1), {"a": I64(5)}]))
    writer.append(kind([I64(2), {"a": I64(6), "b": F32(7)}, I64(8)]))
    writer.append(kind([I64(3)]))
    first, second, third = writer.history
    assert type(writer.history) is kind
    writer.create_item("t", 1.0, [first[:], second["b"][1], third[1]])
    writer.flush()
    assert items(client) == [[[1, 2, 3], 7.0, 8]]


def test_a_leaf_alone_is_data(rig):
    client = rig.client(times=1)
    client.insert(1.5, {"t": 1.0, "u": 1.0})
    assert [items(client), items(client, "u")] == [[[[1.5]]], [[[1.5]]]]
    with client.writer(2) as writer:
        writer.append(np.full(2, 3, F32))
        writer.append(np.full(2, 4, F32))
        writer.create_item("t", 2, 1.0)
    assert items(client) == [[[[3, 3], [4, 4]]]]
    writer = client.trajectory_writer(3)
    for i in range(3):
        writer.append(I64(i))
    writer.create_item("t", 1.0, writer.history[-2:])
    writer.flush()
    assert items(client) == [[[1, 2]]]


def test_parts_of_no_history_are_refused(rig):
    client = rig.client()
    writer = client.trajectory_writer(2)
    writer.append({"a": I64(0)})
    for item in ({"a": 1}, {"a": writer.history["a"]}):
        with pytest.raises(TypeError):
            writer.create_item("t", 1.0, item)


def test_items_may_go_unvalidated_and_modules_have_their_names(rig):
    client = rig.client()
    writer = client.trajectory_writer(2, validate_items=False)
    writer.append({"a": I64(7)})
    writer.create_item(table="t", priority=1.0, trajectory={"a": writer.history["a"][-1]})
    writer.flush(block_until_num_items=0, timeout_ms=60_000)
    assert items(client) == [[7]]
    assert rig.reverb.client.Writer is rig.reverb.Writer
    if rig.real:
        return  # whose submodules are there once something imports them
    assert rig.reverb.item_selectors.Uniform is rig.reverb.selectors.Uniform
    assert rig.reverb.reverb_types.SpecNest is not None


def test_writers_of_different_specs_share_a_server(rig):
    client = rig.client(times=1)
    for _ in range(2):
        writers = []
        for action in (I64(3), np.ones(2, F32)):  # both begin with the same observation
            writer = client.trajectory_writer(2)
            writer.append({"o": F32(0)}, partial_step=True)
            writers.append((writer, action))
        for table, (writer, action) in zip("tu", writers, strict=True):
            writer.append({"a": action})
            writer.append({"a": action, "o": F32(1), "b": action})
            history = writer.history
            writer.create_item(table, 1.0, [history["o"][:], history["a"][-1], history["b"][-1:]])
            writer.flush()
        assert items(client) == [[[0, 1], 3, [3]]]
        assert items(client, "u") == [[[0, 1], [1, 1], [[1, 1]]]]


def test_what_was_created_before_a_reset_is_gone(rig):
    client = rig.client()
    writer = client.trajectory_writer(2)
    writer.append({"a": I64(0)})
    writer.create_item("t", 1.0, {"a": writer.history["a"][-1]})
    writer.flush()
    writer.append({"a": I64(1)})
    writer.create_item("t", 1.0, {"a": writer.history["a"][-1]})
    if rig.real:
        writer.flush()  # it may still be on its way
    client.reset("t")
    writer.append({"a": I64(2)})
    writer.create_item("t", 1.0, {"a": writer.history["a"][-1]})
    writer.flush()
    assert items(client) == [[2]]


# Signatures.


def steps(client, n):
    with client.writer(3) as writer:
        for i in range(n):
            writer.append([I64(i)])
        writer.create_item("t", n, 1.0)
        writer.flush()  # dm-reverb's own close may drop an item that its server has not confirmed


def trajectory(client, n):
    writer = client.trajectory_writer(3)
    for i in range(n):
        writer.append({"x": I64(i)})
    writer.create_item("t", 1.0, {"y": writer.history["x"][-n:]})
    writer.flush()


# name: (shape of the one leaf of the signature, what writes n steps, n, whether it fits)
FITS = {
    "the signature of a step, one step": ([], steps, 1, True),
    "the signature of a step, three": ([], steps, 3, True),
    "any number of steps": ([None], steps, 3, True),
    "three steps": ([3], steps, 3, True),
    "another number of steps": ([1], steps, 3, False),
    "a trajectory is not checked by the step": ([], trajectory, 3, False),
    "a trajectory of any length": ([None], trajectory, 3, True),
    "a trajectory of another length": ([2], trajectory, 3, False),
}


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("nest", [lambda spec: [spec], lambda spec: {"named": spec}], ids=["list", "dict"])
def test_signatures_of_steps_and_items(rig, name, nest):
    shape, write, n, fits = FITS[name]
    client = rig.client(nest(rig.spec(shape, I64)))
    if fits:
        write(client, n)
        assert items(client) == [[list(range(n))]]
    else:
        with pytest.raises(ValueError, match="signature"):
            write(client, n)


def test_signatures_match_by_order_and_name_what_is_read(rig):
    client = rig.client({"a": rig.spec([2], F32), "b": rig.spec([], I64)})
    client.insert([np.ones(2, F32), I64(1)], {"t": 1.0})
    client.insert({"y": np.ones(2, F32), "z": I64(1)}, {"t": 1.0})
    for sample in client.sample("t", 2, emit_timesteps=False, unpack_as_table_signature=True):
        assert {key: np.asarray(leaf).tolist() for key, leaf in sample.data.items()} == {
            "a": [[1, 1]],
            "b": [1],
        }
    for step in ([I64(1), np.ones(2, F32)], [np.ones(2), I64(1)], [np.ones(2, F32)]):
        with pytest.raises(ValueError, match="signature"):
            client.insert(step, {"t": 1.0})


def test_the_older_writer_matches_by_order(rig):
    client = rig.client()
    with client.writer(2) as writer:
        writer.append({"a": I64(1)})
        writer.append({"z": I64(2)})
        writer.create_item("t", 2, 1.0)
    assert items(client) == [[[1, 2]]]
    writer = client.writer(2)
    writer.append([I64(1)])
    with pytest.raises(ValueError):
        writer.append([I64(1), I64(2)])


# Patterns.

STEP = {"a": None, "b": None}


def run(rig, make_configs, steps, episodes=1, clear=True):
    client = rig.client(times=1)
    structured = rig.reverb.structured
    writer = client.structured_writer(make_configs(structured, structured.create_reference_step(STEP)))
    for _ in range(episodes):
        for step in steps:
            part = isinstance(step, tuple)  # in a tuple: the next one goes on with it
            writer.append(step[0] if part else step, partial_step=part)
        writer.end_episode(clear_buffers=clear)
    return items(client)


# name: (the leaves and conditions of each config, what they give)
PARTS = {
    "each item once it has its data": (
        lambda s, a, b: [([b], []), ([a], [])],
        [[0], [0], [1], [10], [2], [20]],
    ),
    "both": (lambda s, a, b: [([a, b], [])], [[0, 0], [1, 10], [2, 20]]),
    "each step counts once": (
        lambda s, a, b: [([leaf], [s.Condition.steps_since_applied() >= 2]) for leaf in (b, a)],
        [[1], [10]],
    ),
    "the index of an open step": (
        lambda s, a, b: [([a], [s.Condition.step_index() % 2 == 0])],
        [[0], [2]],
    ),
    "an episode that ends in a step": (
        lambda s, a, b: [([a], []), ([a, a], [s.Condition.is_end_episode()])],
        [[0], [1], [2], [2, 2]],
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_patterns_and_parts_of_steps(rig, name):
    describe, expected = PARTS[name]

    def configs(s, step):
        return [s.create_config(v, "t", c) for v, c in describe(s, step["a"][-1], step["b"][-1])]

    steps = [part for i in range(3) for part in [({"a": I64(i), "b": None},), {"a": None, "b": I64(10 * i)}]]
    assert run(rig, configs, steps[:-1] if "ends" in name else steps) == expected


def numbers(n):
    return [{"a": I64(i), "b": I64(10 * i)} for i in range(n)]


@pytest.mark.parametrize(("clear", "length"), [(True, 5), (False, 5), (True, 2)])
def test_steps_since_applied_go_on_across_episodes(rig, clear, length):
    def configs(s, step):
        return [s.create_config({"v": step["a"][-1]}, "t", [s.Condition.steps_since_applied() >= 3])]

    expected = [2, 0, 3, 1, 4] if length == 5 else [0, 1]
    assert run(rig, configs, numbers(length), 3, clear) == [[value] for value in expected]


def test_patterns_reach_across_episodes_if_the_history_does(rig):
    def configs(s, step):
        return [s.create_config({"v": step["a"][-3:]}, "t")]

    assert run(rig, configs, numbers(2), 2, clear=False) == [[[0, 1, 0]], [[1, 0, 1]]]
    assert run(rig, configs, numbers(2), 2, clear=True) == []


@pytest.mark.parametrize(
    ("compare", "expected"),
    [
        (lambda b: b >= 0, [0, 2]),
        (lambda b: b != 5, [0]),
        (lambda b: b % 2 == 0, [0]),
        (lambda b: b < 5, [0]),
    ],
    ids=["at least", "not", "modulo", "less"],
)
def test_conditions_on_missing_data_do_not_hold(rig, compare, expected):
    steps = [{"a": I64(0), "b": I64(0)}, {"a": I64(1), "b": None}, {"a": I64(2), "b": I64(5)}]

    def configs(s, step):
        return [s.create_config({"v": step["a"][-1]}, "t", [compare(s.Condition.data(STEP)["b"])])]

    assert run(rig, configs, steps) == [[value] for value in expected]


SKIPS = {
    "no column of the pattern": (lambda s: [], -2, [[0], [3]]),
    "a column of a condition": (lambda s: [s.Condition.data(STEP)["b"] >= 0], -2, [[0], [1], [3]]),
    "steps that count": (lambda s: [s.Condition.steps_since_applied() >= 2], -1, [[1], [4]]),
}


@pytest.mark.parametrize("name", SKIPS)
def test_configs_skip_steps_without_their_columns(rig, name):
    conditions, at, expected = SKIPS[name]

    def configs(s, step):
        return [s.create_config({"v": step["a"][at]}, "t", conditions(s))]

    steps = [{"a": None if i == 2 else I64(i), "b": I64(i)} for i in range(5)]
    assert run(rig, configs, steps) == expected


@pytest.mark.parametrize("kind", [lambda a, b: [a, b], lambda a, b: {"x": a, "y": b}], ids=["list", "dict"])
def test_patterns_match_steps_by_order(rig, kind):
    def configs(s, step):
        return [s.create_config({"v": step["b"][-1], "w": step["a"][-2:]}, "t")]

    assert run(rig, configs, [kind(I64(i), I64(10 + i)) for i in range(3)]) == [[11, [0, 1]], [12, [1, 2]]]


def test_steps_of_patterns_have_one_number_of_leaves(rig):
    def configs(s, step):
        return [s.create_config({"v": step["a"][-1]}, "t")]

    with pytest.raises(ValueError, match="1"):
        run(rig, configs, [[I64(0), I64(1)], [I64(0)]])


def specs(rig):
    if rig.real:
        return {"a": rig.spec([], I64), "b": rig.spec([3], F32)}
    return {"a": dm_env.specs.Array((), I64), "b": dm_env.specs.Array((3,), F32)}


def test_inferred_signatures_leave_lengths_open(rig):
    structured = rig.reverb.structured
    step = structured.create_reference_step(STEP)
    configs = [
        structured.create_config({"v": step["b"][-n:], "w": step["a"][-1], "x": step["a"][-3:-1]}, "t")
        for n in (3, 2)
    ]
    signature = structured.infer_signature(configs, specs(rig))
    found = {
        name: (tuple(spec.shape), np.dtype(getattr(spec.dtype, "as_numpy_dtype", spec.dtype)).name)
        for name, spec in signature.items()
    }
    assert found == {"v": ((None, 3), "float32"), "w": ((), "int64"), "x": ((2,), "int64")}
    client = rig.client(signature)
    writer = client.structured_writer(configs)
    for i in range(3):
        writer.append({"a": I64(i), "b": np.zeros(3, F32)})
    writer.flush()
    assert client.server_info()["t"].current_size == 2
    again = client.server_info()["t"].signature
    assert [tuple(spec.shape) for spec in (again["v"], again["w"])] == [(None, 3), ()]


def test_specs_of_tensorflow_are_understood():
    """Anything with `shape` and `dtype`, whose dtype knows numpy's."""
    from framework import replay

    class DType:
        as_numpy_dtype = np.float32

    class Spec:
        shape, dtype, name = (3,), DType(), None

    step = replay.structured.create_reference_step({"a": None})
    config = replay.structured.create_config({"v": step["a"][-1]}, "t")
    assert replay.structured.infer_signature([config], {"a": Spec()})["v"].dtype == np.float32


def test_the_field_of_td_errors_has_its_keyword(rig):
    structured = rig.reverb.structured
    if not hasattr(structured, "td_error"):
        pytest.skip("this dm-reverb has no priorities of patterns")
    assert structured.td_error(
        max_priority_weight=0.5, step_structure=STEP, get_field_from_step_fn=lambda step: step["b"]
    )


@pytest.mark.parametrize(
    ("max_size", "expected"), [(1, [(1, 0), (2, 0), (2, 0)]), (9, [(1, 0), (2, 0), (2, 0)])]
)
def test_episodes_are_those_of_the_steps_of_items(rig, max_size, expected):
    reverb, found = rig.reverb, []
    fifo = reverb.selectors.Fifo
    client = rig.serve([reverb.Table("t", fifo(), fifo(), max_size, reverb.rate_limiters.MinSize(1))])
    with client.trajectory_writer(num_keep_alive_refs=4) as writer:
        for ends, length in [(False, 1), (True, 2), (True, 2)]:
            if ends:
                writer.end_episode(clear_buffers=False)
            if len(found) < 2:
                writer.append({"x": np.float32(0)})
            for _ in range(3):
                writer.create_item("t", 1.0, {"x": writer.history["x"][-length:]})
                writer.flush()
            info = client.server_info()["t"]
            found.append((info.num_episodes, info.num_deleted_episodes))
    assert found == expected


def test_samples_have_plain_numbers_and_priorities_are_numbers(rig):
    client = rig.client()
    client.insert([np.float32(1)], {"t": 1.0})
    (step,) = next(iter(client.sample("t")))
    assert [type(field) for field in step.info] == [int, float, int, float, int]
    assert list(client.sample("t", -1)) == []
    with pytest.raises(TypeError):
        client.insert([np.float32(1)], {"t": "1"})
    with pytest.raises(TypeError):
        client.mutate_priorities("t", {step.info.key: "1"})


def test_modules_are_imported_by_their_names(backend):
    for module, name in [
        *(
            ("server", "Server"),
            ("structured_writer", "create_config"),
            ("trajectory_writer", "TrajectoryWriter"),
        ),
        *(("replay_sample", "SampleInfo"), ("pybind", "FifoSelector"), ("rate_limiters", "MinSize")),
        *(("item_selectors", "Fifo"), ("reverb_types", "SelectorType")),
    ]:
        assert hasattr(importlib.import_module(f"{backend.__name__}.{module}"), name)
