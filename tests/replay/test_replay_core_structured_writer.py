"""StructuredWriter: patterns, conditions, priorities, signatures."""

import dm_env.specs
import numpy as np
import pytest

from framework import replay
from framework.replay import rate_limiters as rl
from framework.replay import selectors, structured
from framework.replay.reverb_api.structured import Condition

STEP = structured.create_reference_step({"a": None, "b": {"c": None}})


def make(signature=None):
    tables = [
        replay.Table(name, selectors.Fifo(), selectors.Fifo(), 100, rl.MinSize(1), 1, signature=signature)
        for name in "tu"
    ]
    return replay.EmbeddedClient(tables)


def run(configs, steps, end=False, client=None):
    client = client or make()
    with client.structured_writer(configs) as writer:
        for i in range(steps):
            writer.append({"a": i, "b": {"c": np.full(2, i, np.float32)}})
        if end:
            writer.end_episode()
    return client


def contents(client, table="t"):
    n = client.server_info()[table].current_size
    samples = client.sample(table, n, emit_timesteps=False, unpack_as_table_signature=True) if n else []
    return [(sample.data, sample.info.priority) for sample in samples]


def config(index, *conditions, table="t", priority=None):
    return structured.create_config({"v": STEP["a"][index]}, table, conditions, priority)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (-1, [0, 1, 2, 3, 4]),
        (-3, [0, 1, 2]),
        (slice(-2, None), [[0, 1], [1, 2], [2, 3], [3, 4]]),
        (slice(-3, -1), [[0, 1], [1, 2], [2, 3]]),
        (slice(-4, None, 2), [[0, 2], [1, 3]]),
        (slice(-6, None), []),
    ],
    ids=str,
)
def test_patterns(index, expected):
    assert [item["v"].tolist() for item, _ in contents(run([config(index)], 5))] == expected


def test_conditions_are_all_needed_and_episodes_begin_anew():
    made = config(slice(-2, None), Condition.step_index() % 2 == 1, Condition.step_index() > 1)
    client = run([made], 5, end=True)
    run([made], 5, client=client)
    assert [item["v"].tolist() for item, _ in contents(client)] == [[2, 3], [2, 3]]


def test_priorities():
    td = structured.td_error(0.75, {"a": None, "b": {"c": None}}, lambda step: step["a"])
    client = run([config(slice(-3, None), priority=td)], 4)
    assert [priority for _, priority in contents(client)] == [0.75 * 2 + 0.25 * 1, 0.75 * 3 + 0.25 * 2]
    client = run([config(-1, priority=structured.constant_priority_fn(2.5))], 1)
    assert contents(client)[0][1] == 2.5


SPEC = {"a": dm_env.specs.Array((), np.int64), "b": {"c": dm_env.specs.Array((2,), np.float32)}}
create, infer = structured.create_config, structured.infer_signature
OF_C = create(STEP["b"]["c"][-1], "t")


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: STEP["a"][0], "negative"),
        (lambda: STEP["a"][:], "negative start"),
        (lambda: STEP["a"][-1:-3], "later"),
        (lambda: STEP["a"][-3::-1], "stride"),
        (lambda: create({}, "t"), "without leaves"),
        (lambda: create({"v": STEP["a"]}, "t"), "'v': got Reference"),
        (lambda: config(-1, True), "conditions: got bool"),
        (lambda: structured.constant_priority_fn(-1.0), "priority"),
        (lambda: structured.td_error(2.0, {"a": None}, lambda s: s["a"]), "max_priority_weight"),
        (lambda: infer([], SPEC), "got none"),
        (lambda: infer([config(-1), config(-1, table="u")], SPEC), "one table"),
        (lambda: infer([config(-1), config(slice(-2, None))], SPEC), "one kind"),
        (lambda: infer([config(-1), create([STEP["a"][-1]], "t")], SPEC), "different nests"),
        (
            lambda: infer([OF_C], {"z": SPEC["a"]}),
            "'b/c': got leaf 1, expected one of 1",
        ),
        (lambda: make().structured_writer([]), "configs"),
        (
            lambda: make().structured_writer([OF_C]).append({"a": 1}),
            r"1 leaves \['a'\], expected 2",
        ),
    ],
)
def test_wrong_arguments(make_it, message):
    with pytest.raises(ValueError, match=message):
        make_it()
