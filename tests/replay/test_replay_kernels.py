"""The loops for numba do what numpy does: as plain Python always, compiled where numba is installed."""

import subprocess
import sys
from unittest import mock

import numpy as np
import pytest

from framework import replay
from framework.replay import kernels
from framework.replay.kernels import CompiledKernels, Kernels, SumTree


@pytest.fixture(params=["as written", "compiled"])
def loops(request):
    if request.param == "as written":
        return CompiledKernels(lambda signature, function: function, mock.MagicMock())
    pytest.importorskip("numba")
    found = kernels.load()
    return found if isinstance(found, CompiledKernels) else pytest.skip("REPERTORY_COMPILED=0")


@pytest.fixture
def use(monkeypatch):
    """What is made from then on has these kernels."""
    return lambda which: monkeypatch.setattr(kernels, "load", lambda: which)


def both(use, loops, make):
    """``make()`` with numpy and with the loops."""
    use(Kernels())
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


@pytest.mark.parametrize("plain", [True, False])
def test_mass_beyond_the_total_does_not_leave_the_tree(use, loops, plain):
    use(Kernels() if plain else loops)
    tree = SumTree(2064)  # 129 nodes above, padded to 144
    tree.set(np.arange(2064), np.ones(2064))
    mass = np.array([0.0, 2063.5, 2064.0, 1e9])
    leaves, _ = tree._kernels.tree_descend(tree, tree._running_sums(), mass)
    assert leaves[0] == 0 and leaves[1] == 2063 and (leaves < 2064).all() and (leaves >= 0).all()


def test_tables_agree(use, loops):
    """The same calls in the same order: the same samples, counts and orders."""

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
            seen += [*[each.tolist() for each in sample.info[1:]], sample.data["x"].tolist()]
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
        ("0", False, "Kernels"),
        ("", True, "Kernels"),
        ("1", True, "RuntimeError: REPERTORY_COMPILED=1 asks for numba"),
    ],
)
def test_switch(asked, hidden, expected):
    hide = "import sys; sys.modules['numba'] = None; " if hidden else ""
    code = f"{hide}from framework.replay import kernels; print(type(kernels.load()).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "/usr/bin:/bin", "REPERTORY_COMPILED": asked, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert any(line.startswith(expected) for line in (done.stdout + done.stderr).splitlines())


def test_no_folder_for_compiled_functions(monkeypatch, caplog):
    """An installation that cannot be written to, and no home either: compiled in each process, with a
    warning."""
    numba = pytest.importorskip("numba")

    def refuse(signature, cache):
        if cache:
            raise RuntimeError("cannot cache function 'f': no locator available for file 'kernels.py'")
        return lambda function: function

    monkeypatch.setattr(numba, "njit", refuse)
    monkeypatch.delenv("REPERTORY_COMPILED", raising=False)
    found = kernels.load.__wrapped__()
    assert isinstance(found, CompiledKernels)
    assert "NUMBA_CACHE_DIR" in caplog.text
