"""The compiled loops do what numpy does: as plain Python always, compiled where numba is installed."""

import subprocess
import sys
import types

import numpy as np
import pytest

from framework import replay
from framework.replay import kernels
from framework.replay.rows.store import RowStore
from framework.replay.tables.items import Items, make_keys
from framework.replay.tables.sum_tree import SumTree

NAMES = [
    "tree_set",
    "running_sum",
    "tree_descend",
    "draw",
    "sum_at",
    "find",
    "bounds",
    "acquire",
    "drop",
    "consecutive",
    "let_go",
]
PLAIN = types.SimpleNamespace(**{name: getattr(kernels, name) for name in NAMES})


@pytest.fixture(params=["as written", "compiled"])
def loops(request):
    if request.param == "as written":
        return PLAIN
    pytest.importorskip("numba")
    return kernels.load() or pytest.skip("REPERTORY_COMPILED=0")


@pytest.fixture
def use(monkeypatch):
    """What is made from then on has these loops; None for numpy alone."""
    return lambda which: monkeypatch.setattr(kernels, "load", lambda: which)


def both(use, loops, make):
    """``make()`` with numpy alone and with the loops."""
    use(None)
    first = make()
    use(loops)
    return first, make()


@pytest.mark.parametrize("size", [1, 16, 17, 2048, 2049, 40_000])
def test_trees_agree(use, loops, size):
    numpy_tree, tree = both(use, loops, lambda: SumTree(size))
    rng = np.random.default_rng(size)
    for _ in range(6):
        # Sums of small integers are exact in any order; leaves come repeatedly, the last weight holds.
        leaves = rng.integers(0, size, 300)
        weights = rng.integers(0, 8, 300).astype(np.float64)
        weights[0] = 1.0
        for each in (numpy_tree, tree):
            each.set(leaves, weights)
        assert tree.total == numpy_tree.total
        if not tree.total:
            continue
        seed = int(rng.integers(1 << 30))
        a, b = [each.sample(256, np.random.default_rng(seed)) for each in (numpy_tree, tree)]
        np.testing.assert_array_equal(a[0], b[0])
        np.testing.assert_array_equal(a[1], b[1])


def test_trees_that_grow_agree(use, loops):
    numpy_tree, tree = both(use, loops, SumTree)
    for leaf in (3, 40, 5_000, 70_000):
        for each in (numpy_tree, tree):
            each.set(np.array([leaf]), np.array([2.0]))
    a, b = [each.sample(64, np.random.default_rng(0)) for each in (numpy_tree, tree)]
    np.testing.assert_array_equal(a[0], b[0])
    assert set(b[0].tolist()) <= {3, 40, 5_000, 70_000}


def test_mass_beyond_the_total_does_not_leave_the_tree(use, loops):
    use(loops)
    tree = SumTree(2064)  # 129 nodes above, padded to 144
    tree.set(np.arange(2064), np.ones(2064))
    leaves, _, _ = tree._descend(np.array([0.0, 2063.5, 2064.0, 1e9]))
    assert leaves[0] == 0 and leaves[1] == 2063 and (leaves < 2064).all() and (leaves >= 0).all()


def test_keys_are_found(use, loops):
    def found():
        items = Items(5000)
        slots = items.take(300)
        own = items.name(slots[:200], slots[:200], None)
        foreign = items.name(slots[200:], slots[200:], np.arange(100, dtype=np.uint64) + np.uint64(1 << 55))
        gone = own[:1] + np.uint64(1 << 40)
        asked = np.concatenate([own[::7], foreign[::3], gone, make_keys(1), np.array([2**64 - 1], np.uint64)])
        read_only = asked.copy()
        read_only.flags.writeable = False
        answers = [items.find(each) for each in (own, foreign, asked, read_only)]
        return [(slots.tolist(), bool(complete)) for slots, complete in answers]

    expected, got = both(use, loops, found)
    assert got == expected
    assert [complete for _, complete in expected] == [True, True, False, False]
    assert expected[2][0][-3:] == [-1, -1, -1]


def test_rows_are_counted(use, loops):
    def counted():
        stream = RowStore(capacity=4096).stream("s", {"x": ((), np.float32)})
        rows = stream.lease(1500)
        rng = np.random.default_rng(0)
        picks = rng.permutation(np.concatenate([rows, rows[:700], rows[:9]]))
        stream.acquire(picks)
        stream.acquire(rows[::2])  # not contiguous
        stream.drop(rows[::2])
        stream.release(rows)
        states = [stream.num_rows]
        for part in np.array_split(picks, 7):
            stream.drop(part)
            states.append(stream.num_rows)
        return states, np.sort(stream.lease(1500)).tolist(), stream.num_rows

    expected, got = both(use, loops, counted)
    assert got == expected
    assert expected[0][-1] == 0 and expected[0][0] == 1500


@pytest.mark.parametrize("rows", [[-1], [0, 4096], [1 << 40]])
def test_rows_out_of_range_change_nothing(use, loops, rows):
    use(loops)
    stream = RowStore(capacity=4096).stream("s", {"x": ((), np.float32)})
    mine = stream.lease(2)
    for call in (stream.acquire, stream.drop):
        with pytest.raises(IndexError, match=r"stream 's': got rows .* expected 0 to 4095"):
            call(np.array([*mine, *rows]))
    stream.release(mine)
    assert stream.num_rows == 0


@pytest.mark.parametrize(
    "values, expected",
    [([3.0, -1.0, 2.0], (-1.0, 3.0)), ([0.0], (0.0, 0.0)), ([1.0, np.inf], (1.0, np.inf))],
)
def test_bounds(loops, values, expected):
    assert tuple(loops.bounds(np.array(values))) == expected
    assert np.isnan(loops.bounds(np.array([*values, np.nan]))).all()


def test_writers_release_what_they_hold(use, loops):
    """Twice, others' rows and rows out of range are refused, and nothing is released then."""

    def refused():
        client = replay.EmbeddedClient([replay.Table.queue("t", 10)])
        writer, other = client.batch_writer(), client.batch_writer()
        rows = writer.append("s", {"x": np.arange(8)})
        theirs = other.append("s", {"x": np.arange(3)})
        writer.release("s", rows[:2])
        messages = []
        for bad in (rows[:3], [rows[3], theirs[0]], [rows[3], -1], [1 << 40], rows[::-1]):
            with pytest.raises(ValueError) as error:
                writer.release("s", bad)
            messages.append(str(error.value))
        writer.release("s", rows[2:][::2])
        left = client.store.streams["s"].num_rows
        client.close()
        return messages, left, client.store.streams["s"].num_rows

    expected, got = both(use, loops, refused)
    assert got == expected
    assert expected[1:] == (3 + 3, 0)


@pytest.mark.parametrize(
    "rows, expected", [([5], True), ([5, 6, 7], True), ([5, 7, 6, 8], False), ([3, 3, 5], False)]
)
def test_consecutive_rows_become_a_slice(use, loops, rows, expected):
    for which in (None, loops):
        use(which)
        stream = RowStore(capacity=64).stream("s", {"x": ((), np.float32)})
        assert isinstance(stream.span(np.array(rows)), slice) == expected
        assert isinstance(Items(100).span(np.array(rows)), slice) == expected


def test_tables_agree(use, loops):
    """The same calls in the same order: the same keys, samples, counts and orders."""

    def play():
        table = replay.Table(
            "t",
            replay.selectors.Prioritized(1.0),
            replay.selectors.Fifo(),
            600,
            replay.rate_limiters.MinSize(1),
            max_times_sampled=9,
            seed=3,
        )
        client = replay.EmbeddedClient([table])
        writer = client.batch_writer()
        rng = np.random.default_rng(0)
        seen = []
        for turn in range(30):
            rows = writer.append("s", {"x": np.arange(50) + 50 * turn})
            writer.create_items("t", {"x": writer.slice("s", "x", rows)}, rng.integers(0, 5, 50) + 1.0)
            writer.release("s", rows)
            sample = client.sample_batch("t", 128)
            seen += [*[each.tolist() for each in sample.info], sample.data["x"].tolist()]
            client.update_priorities("t", sample.info.key, rng.integers(0, 5, 128) + 1.0)
            with pytest.raises(ValueError, match="expected finite"):
                client.update_priorities("t", sample.info.key[:2], [1.0, np.nan])
        info = client.server_info()["t"]
        client.close()
        return (
            seen,
            info.current_size,
            info.num_unique_samples,
            info.sampled_age,
            client.store.streams["s"].num_rows,
        )

    expected, got = both(use, loops, play)
    assert got == expected


@pytest.mark.parametrize(
    "asked, hidden, expected",
    [
        ("0", False, "None"),
        ("", True, "None"),
        ("1", True, "RuntimeError: REPERTORY_COMPILED=1 asks for numba"),
    ],
)
def test_switch(asked, hidden, expected):
    hide = "import sys; sys.modules['numba'] = None; " if hidden else ""
    code = f"{hide}from framework.replay import kernels; print(kernels.load())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin:/bin", "REPERTORY_COMPILED": asked, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert expected in done.stdout + done.stderr


def test_nowhere_to_keep_compiled_functions(monkeypatch, caplog):
    """An installation that cannot be written to, and no home either: compiled anew, and said."""
    numba = pytest.importorskip("numba")

    def refuse(signature, cache):
        if cache:
            raise RuntimeError("cannot cache function 'f': no locator available for file 'kernels.py'")
        return lambda function: function

    monkeypatch.setattr(numba, "njit", refuse)
    monkeypatch.delenv("REPERTORY_COMPILED", raising=False)
    found = kernels.load.__wrapped__()
    assert found.bounds is kernels.bounds
    assert "NUMBA_CACHE_DIR" in caplog.text
