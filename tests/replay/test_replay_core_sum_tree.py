"""The sum tree: weights that add up, and leaves drawn in proportion to them."""

import numpy as np
import pytest

from framework.replay.tables.sum_tree import SumTree


def test_weights_of_very_different_sizes_add_up():
    tree = SumTree()
    tree.set(np.arange(5000), np.full(5000, 1e-9))
    for _ in range(1000):  # a tree that adds differences would be off by about 1e-4 now
        tree.set(np.array([17]), np.array([1e12]))
        tree.set(np.array([17]), np.array([1e-9]))
    assert tree.total == pytest.approx(5e-6, rel=1e-12)


def test_mass_beyond_the_total_does_not_leave_the_tree():
    tree = SumTree(2064)  # 129 nodes above, padded to 144
    tree.set(np.arange(2064), np.ones(2064))
    mass = np.array([0.0, 2063.5, 2064.0, 1e9])
    leaves, _ = tree._descend(tree._running_sums(), mass)
    assert leaves[0] == 0 and leaves[1] == 2063 and (leaves < 2064).all() and (leaves >= 0).all()


def test_tree_that_grows_keeps_its_weights():
    tree = SumTree()
    for leaf in (3, 40, 5_000, 70_000):
        tree.set(np.array([leaf]), np.array([2.0]))
    leaves, probabilities = tree.sample(64, np.random.default_rng(0))
    assert set(leaves.tolist()) == {3, 40, 5_000, 70_000} and (probabilities == 0.25).all()


@pytest.mark.parametrize("size", [1, 16, 17, 2048, 2049, 300_000])
def test_tree_agrees_with_an_array(size):
    tree, array = SumTree(size), np.zeros(size)
    rng = np.random.default_rng(size)
    for _ in range(6):
        # Sums of small integers are exact in any order; leaves come repeatedly, the last weight holds.
        leaves = rng.integers(0, size, 300)
        weights = rng.integers(0, 8, 300).astype(np.float64)
        weights[0] = 1.0
        tree.set(leaves, weights)
        array[leaves] = weights
        assert tree.total == array.sum()
        if not tree.total:
            continue
        seed = int(rng.integers(1 << 30))
        chosen, probabilities = tree.sample(256, np.random.default_rng(seed))
        mass = np.random.default_rng(seed).random(256) * tree.total
        np.testing.assert_array_equal(chosen, array.cumsum().searchsorted(mass, side="right"))
        np.testing.assert_allclose(probabilities, array[chosen] / array.sum())
