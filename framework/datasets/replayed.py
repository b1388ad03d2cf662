"""Episodes from replay tables in a checkpoint: what the actors did, in the order in which they did it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tree

from framework.adders import REPLAY_TABLE
from framework.checkpoints import CheckpointReader
from framework.datasets.episodes import EpisodeDataset, step_of
from framework.replay.rows.layout import Layout
from framework.replay.tables.items import LIVE
from framework.specs import EnvironmentSpec, leaves, path_name
from framework.types import Step, Transition


def replayed(
    tables: Sequence[CheckpointReader],
    spec: EnvironmentSpec,
    *,
    n_step: int = 1,
    last: int | None = None,
) -> EpisodeDataset:
    """The episodes of the table `replay`, by their first step. Values are read when they are asked for.

    An episode has the transitions that the table holds. Its first ones may have been removed, and one that
    was open ends as if it was truncated there. Rewards are the adder's: clipped, if it clips them. Items of
    hindsight, whose goals nothing followed, are left out.

    Args:
      tables: what each replay server wrote.
      spec: the spec of one env.
      n_step: steps of the adder's transitions. Sequences have single steps.
      last: number of episodes, the newest; None for all.

    Raises:
      ValueError: There is no such table, it is empty, or its transitions are sums over several steps.
    """
    found: list[tuple[int, Transition, np.ndarray]] = []
    for reader in tables:
        for items, stamps in _items(reader, spec):
            steps = items
            if isinstance(items, Step):
                steps, stamps = _steps(items, stamps)
            elif n_step > 1:
                raise ValueError(
                    f"{reader.path}: got transitions of n_step {n_step}, expected 1: sums of rewards are no "
                    "episodes. Train the run with --n-step 1, or record what its policy does."
                )
            found += [(int(stamps[chain[0]]), steps, chain) for chain in _chains(steps)]
    found = sorted(found, key=lambda each: each[0])[-(last or 0) :]

    def episode(number: int) -> Step:
        _, steps, chain = found[number]
        observation = tree.map_structure(
            lambda now, after: np.concatenate([now.take(chain), after.take(chain[-1:])]),
            *(steps.observation, steps.next_observation),
        )
        fields = zip((steps.action, steps.reward, steps.discount), spec[1:], strict=True)
        cast = [
            tree.map_structure(lambda leaf, of: leaf.take(chain).astype(of.dtype, copy=False), *pair)
            for pair in fields
        ]
        return step_of(observation, *cast)

    path = ", ".join(str(reader.path) for reader in tables)
    return EpisodeDataset(path, episode, [len(chain) for _, _, chain in found], spec)


@dataclasses.dataclass(frozen=True, eq=False)
class _ItemLeaf:
    """A leaf of items: rows `[items, ...]` of `column`, and in each item the number of rows that count."""

    name: str
    column: np.ndarray
    rows: np.ndarray
    counts: np.ndarray | int

    def take(self, index: Any) -> np.ndarray:
        return np.asarray(self.column[self.rows[index]])


def _items(reader: CheckpointReader, spec: EnvironmentSpec) -> Iterator[tuple[Any, np.ndarray]]:
    """The items of each layout, `Transition`s or `Step`s of `_ItemLeaf`s, and their order of insertion."""
    note = reader.manifest["note"]
    metas = {meta["name"]: meta for meta in note.get("tables", ())}
    if REPLAY_TABLE not in metas:
        raise ValueError(
            f"{reader.path}: got the tables {sorted(metas)}, expected {REPLAY_TABLE!r}, which off-policy "
            "agents have. Record what the policy does."
        )
    with np.load(reader.part(metas[REPLAY_TABLE]["file"])) as table:
        arrays = dict(table)
    observed = [path_name("observation", path) for path, _ in leaves(spec.observations)]
    for number, wire in enumerate(metas[REPLAY_TABLE]["layouts"]):
        layout = Layout.from_wire(wire)
        slots = np.flatnonzero((arrays["state"] == LIVE) & (arrays["layouts"] == number))
        if not len(slots):
            continue
        made = []
        for leaf in layout.leaves:
            group, (begin, end) = layout.groups[leaf.group], layout.spans[leaf.group]
            rows = arrays["index"][slots, begin:end]
            stream = note["streams"][group.stream]
            name, dtype, shape = stream["columns"][leaf.column]
            size = (stream["rows"], *shape)
            file = reader.part(name)
            column = np.zeros(size, dtype) if 0 in size else np.memmap(file, dtype, "r", shape=size)
            counts = arrays["lengths"][slots, leaf.group] if group.ragged else group.length
            made.append(_ItemLeaf(leaf.column, column, rows if leaf.time else rows[:, 0], counts))
        items = layout.pack(made)
        if [
            leaf.name for leaf in tree.flatten(items.observation)
        ] == observed:  # Items of hindsight have other leaves.
            yield items, arrays["stamps"][slots]


def _steps(items: Step, stamps: np.ndarray) -> tuple[Transition, np.ndarray]:
    """The transitions in sequences, each once, and the order of the first item with it."""
    rows, length = items.mask.rows, items.mask.rows.shape[1]
    counted = np.arange(1, length) < np.reshape(items.mask.counts, (-1, 1))  # With a row after it.
    item, at = np.nonzero((items.mask.take(slice(None))[:, :-1] > 0) & counted)
    order = np.argsort(stamps[item], kind="stable")
    first = order[np.unique(rows[item[order], at[order]], return_index=True)[1]]
    item, at = item[first], at[first]

    def taken(leaf: _ItemLeaf, later: int = 0) -> _ItemLeaf:
        own = leaf.rows.reshape(len(rows), length, -1)[item, at + later]  # Each row has its frames.
        return dataclasses.replace(leaf, rows=own if own.shape[1] > 1 else own[:, 0])

    observation, action, reward, discount = (tree.map_structure(taken, field) for field in items[:4])
    after = tree.map_structure(lambda leaf: taken(leaf, 1), items.observation)
    return Transition(observation, action, reward, discount, after), stamps[item]


def _chains(steps: Transition) -> Iterator[np.ndarray]:
    """The parts of episodes: each step's next observation is the following one's observation, as a row."""
    rows = [tree.flatten(nest)[0].rows for nest in (steps.observation, steps.next_observation)]
    before, after = (each.reshape(len(each), -1)[:, -1] for each in rows)  # The newest frame of a stack.
    order = np.argsort(before)
    place = np.searchsorted(before, after, sorter=order).clip(max=len(order) - 1)
    following = np.where(before[order[place]] == after, order[place], -1)
    begins = np.ones(len(following), np.bool_)
    begins[following[following >= 0]] = False
    then = following.tolist()
    for step in np.flatnonzero(begins).tolist():
        chain = [step]
        while (step := then[step]) >= 0:
            chain.append(step)
        yield np.array(chain)
