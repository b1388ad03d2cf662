"""Selectors: distributions by chi-squared with fixed seeds, order for the rest."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.replay import selectors
from framework.replay.tables.selectors import Selector

# The 99.9% quantile of chi-squared with k degrees of freedom (Wilson and Hilferty's approximation).
Z999 = 3.0902


def assert_distributed(counts, probabilities):
    expected = probabilities * counts.sum()
    assert (counts[expected == 0] == 0).all()
    here = expected > 0
    if here.sum() == 1:
        return
    statistic = ((counts[here] - expected[here]) ** 2 / expected[here]).sum()
    k = here.sum() - 1
    assert statistic < k * (1 - 2 / (9 * k) + Z999 * np.sqrt(2 / (9 * k))) ** 3


def fill(selector, priorities):
    slots = np.arange(len(priorities))
    selector.reserve(len(slots))
    selector.insert(slots, np.asarray(priorities, np.float64), slots)
    return selector


@pytest.mark.parametrize("size", [1, 2, 10, 1000, 40_000])
@pytest.mark.parametrize("exponent", [None, 0.0, 0.6, 1.0])
def test_distribution(size, exponent):
    rng = np.random.default_rng(size)
    priorities = rng.integers(0, 5, size).astype(np.float64)
    priorities[0] = 1.0
    if exponent is None:
        selector, weights = selectors.Uniform(), np.ones(size)
    else:
        selector = selectors.Prioritized(exponent)
        weights = np.where(priorities > 0, np.power(np.maximum(priorities, 1e-300), exponent), 0.0)
    fill(selector, priorities)
    counts = np.zeros(size)
    for _ in range(20 if size <= 1000 else 25):
        slots, probabilities = selector.sample(20_000, rng)
        np.testing.assert_allclose(probabilities, (weights / weights.sum())[slots], rtol=1e-9)
        counts += np.bincount(slots, minlength=size)
    assert_distributed(counts, weights / weights.sum())


@pytest.mark.parametrize("exponent", [0.0, 0.5])
def test_distribution_after_many_changes(exponent):
    rng = np.random.default_rng(5)
    selector = selectors.Prioritized(exponent) if exponent else selectors.Uniform()
    selector.reserve(3000)
    weights = np.append(np.full(500, 0.5), np.zeros(2500))
    selector.insert(np.arange(500), weights[:500], np.arange(3000))  # in order, as a table begins
    for _ in range(300):
        slots = rng.choice(3000, rng.integers(1, 100), replace=False)
        new, old = slots[weights[slots] == 0], slots[weights[slots] > 0]
        selector.delete(old[::2])
        weights[old[::2]] = 0.0
        priorities = rng.random(len(old[1::2])) + 0.1
        selector.update(old[1::2], priorities)
        weights[old[1::2]] = priorities
        priorities = rng.random(len(new)) + 0.1
        selector.insert(new, priorities, np.arange(3000))
        weights[new] = priorities
    assert len(selector) == np.count_nonzero(weights)
    counts = np.bincount(selector.sample(500_000, rng)[0], minlength=3000)
    weights = np.where(weights > 0, weights**exponent, 0.0)
    assert_distributed(counts, weights / weights.sum())


def test_negative_exponent_inverts():
    selector = fill(selectors.Prioritized(-1.0), [1.0, 4.0, 0.0])
    _, probabilities = selector.sample(100, np.random.default_rng(0))
    np.testing.assert_allclose(np.unique(probabilities), [0.2, 0.8])


@pytest.mark.parametrize("priorities", [[1.0, 1e-310], [0.0, 1e-310, 1.0]])
def test_infinite_weights_are_refused_also_beside_a_priority_of_zero(priorities):
    selector = selectors.Prioritized(-1.0)
    with pytest.raises(ValueError, match="would overflow"):
        selector.check(np.array(priorities))
    selector.check(np.array([0.0, 1e-200, 1.0]))
    selector.check(np.zeros(2))


class Listed:
    """The order selectors as a list of (slot, priority, turn)."""

    def __init__(self, kind):
        self.kind, self.entries, self.turn = kind, {}, 0

    def insert(self, slot, priority):
        self.turn += 1
        self.entries[slot] = [priority, self.turn, self.turn]

    def update(self, slot, priority):
        self.turn += 1
        self.entries[slot][:2] = [priority, self.turn]

    def order(self):
        key = {
            "Fifo": lambda entry: entry[2],
            "Lifo": lambda entry: -entry[2],
            "MinHeap": lambda entry: (entry[0], entry[1]),
            "MaxHeap": lambda entry: (-entry[0], entry[1]),
        }[self.kind]
        return sorted(self.entries, key=lambda slot: key(self.entries[slot]))


@pytest.mark.parametrize("kind", ["Fifo", "Lifo", "MinHeap", "MaxHeap"])
@settings(max_examples=40, deadline=None)
@given(
    operations=st.lists(
        st.tuples(st.sampled_from(["insert", "delete", "update"]), st.integers(0, 7), st.integers(0, 3)),
        min_size=20,
        max_size=120,
    )
)
def test_order(kind, operations):
    selector, reference, stamps = getattr(selectors, kind)(), Listed(kind), np.zeros(8, np.int64)
    selector.reserve(8)
    for operation, slot, priority in operations:
        one, value = np.array([slot]), np.array([float(priority)])
        if operation == "insert" and slot not in reference.entries:
            reference.insert(slot, priority)
            stamps[slot] = reference.turn
            selector.insert(one, value, stamps)
        elif operation == "delete" and slot in reference.entries:
            del reference.entries[slot]
            selector.delete(one)
        elif operation == "update" and slot in reference.entries:
            reference.update(slot, priority)
            selector.update(one, value)
        order = reference.order()
        assert len(selector) == len(order)
        if order:
            slots, probabilities = selector.sample(2, np.random.default_rng(0))
            assert slots.tolist() == [order[0]] * 2 and probabilities.tolist() == [1.0, 1.0]
            assert selector.first(min(4, len(order))).tolist() == order[:4]


@pytest.mark.parametrize("kind", ["Fifo", "Lifo", "MinHeap", "MaxHeap", "Uniform"])
def test_memory_stays_bounded(kind):
    selector = getattr(selectors, kind)()
    selector.reserve(9)
    zero, stamps = np.zeros(1), np.zeros(9, np.int64)
    selector.insert(np.array([0]), zero, stamps)  # the oldest stays
    for turn in range(1, 5000):
        stamps[1 + turn % 8] = turn
        selector.insert(np.array([1 + turn % 8]), zero, stamps)
        selector.update(np.array([0]), zero)
        selector.delete(np.array([1 + turn % 8]))
    held = [v for v in vars(selector).values() if isinstance(v, (np.ndarray, list, dict))]
    assert max(map(len, held)) <= 1024


class OldestFirst(Selector):
    """The selector of a user, who writes the abstract methods only."""

    def __init__(self):
        super().__init__()
        self.held = []

    def insert(self, slots, priorities, stamps):
        self.held += slots.tolist()

    def delete(self, slots):
        self.held = [slot for slot in self.held if slot not in slots]

    def sample(self, n, rng):
        return np.full(n, self.held[0]), np.ones(n)

    def __len__(self):
        return len(self.held)


def test_the_first_slots_of_a_selector_of_ones_own():
    selector = OldestFirst()
    selector.insert(np.array([4, 2, 9]), np.ones(3), np.arange(10))
    assert selector.first(2).tolist() == [4, 2] and selector.first(0).tolist() == []
    assert selector.held == [4, 2, 9]
