"""Episodes, and what makes items of replay of them.

An episode of T transitions is a `Step` of T + 1 rows: row t has the observation at time t, the action taken
there, and the reward and discount that resulted from it. The last row holds the last observation, with zero
action, reward and discount. The discount is 0 for a transition that terminates the episode, else 1.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import dm_env
import numpy as np
import tree

from framework.adders import Adder
from framework.specs import Array, EnvironmentSpec
from framework.types import FIRST, LAST, MID, Nest, Step

FIELDS = Step._fields[:4]  # Files hold these.
_STREAMS = 64  # Most episodes that one adder takes side by side.
_CHUNK = 64 << 20  # Bytes of the episodes that are played at a time.


class EpisodeDataset(Sequence[Step]):
    """The episodes of a file, a folder or a function.

    Attributes:
      path: where they are, for errors.
      spec: the `EnvironmentSpec` of one env; None if the file does not say it.
      lengths: int64`[episodes]`, the transitions of each.
      about: what else the file says of itself, such as the policy, the seeds and the commit.
    """

    def __init__(
        self,
        path: str,
        episode: Callable[[int], Step],
        lengths: Sequence[int],
        spec: EnvironmentSpec | None = None,
        about: Mapping[str, Any] | None = None,
    ):
        self.path, self._episode, self.spec, self.about = path, episode, spec, dict(about or {})
        self.lengths = np.asarray(lengths, np.int64)
        if not len(self.lengths) or self.lengths.min() < 1:
            raise ValueError(
                f"{path}: got episodes of {self.lengths.tolist()[:10]} transitions, expected at least one "
                "episode, each with a transition. Record them with framework.datasets.record."
            )

    @property
    def num_steps(self) -> int:
        """Transitions of all episodes."""
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Step: ...

    @overload
    def __getitem__(self, index: slice) -> list[Step]: ...

    def __getitem__(self, index: int | slice) -> Step | list[Step]:
        if isinstance(index, slice):
            return [self._episode(each) for each in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"episode {index}: {self.path} has {len(self)}.")
        return self._episode(index % len(self))

    def check(self, spec: EnvironmentSpec) -> None:
        """Raises ValueError unless the episodes have the structure, shapes and dtypes of `spec`."""
        for index in range(len(self)) if self.spec is None else (0,):  # A file has one dtype for all.
            checked_episode(index, self[index], spec, f"{self.path}, ")


def checked_episode(index: int, episode: Step, spec: EnvironmentSpec, where: str = "") -> Step:
    """Returns `episode`; raises ValueError unless it has the structure, shapes and dtypes of `spec`."""
    length = len(episode.start_of_episode)
    for field, expected in zip(FIELDS, spec, strict=True):
        wanted = tree.map_structure(lambda leaf: f"{leaf.dtype}{[length, *leaf.shape]}", expected)
        found = tree.map_structure(lambda leaf: f"{leaf.dtype}{[*leaf.shape]}", getattr(episode, field))
        if found != wanted:
            raise ValueError(
                f"{where}episode {index}: got the {field} {found}, expected {wanted} as in the environment. "
                "Record them in the same environment, with the same wrappers and options."
            )
    if length < 2:
        raise ValueError(
            f"{where}episode {index}: got {length} rows, expected a transition and a closing row at least."
        )
    return episode


def plain_spec(episode: Step) -> EnvironmentSpec:
    """Specs without bounds, of the shapes and dtypes of an episode."""
    return EnvironmentSpec(
        *[tree.map_structure(lambda leaf: Array(leaf.shape[1:], leaf.dtype), each) for each in episode[:4]]
    )


def step_of(observation: Nest, action: Nest, reward: Nest, discount: Nest) -> Step:
    """An episode from its T + 1 observations and its T actions, rewards and discounts."""
    actions, rewards, discounts = (
        tree.map_structure(lambda leaf: np.concatenate([leaf, np.zeros_like(leaf[:1])]), each)
        for each in (action, reward, discount)
    )
    starts = np.zeros(len(tree.flatten(rewards)[0]), np.bool_)
    starts[0] = True
    return Step(observation, actions, rewards, discounts, starts)


def play(episodes: Sequence[Step], make_adder: Callable[[], Adder], client: Any = None) -> None:
    """Writes episodes through adders, as an actor's loop would: up to 64 envs play some of them each.

    Args:
      episodes: the episodes.
      make_adder: makes an adder, which is closed at the end.
      client: the client of the adders. Each server of a `ShardedClient` gets an equal part of the episodes.
    """
    shards = min(len(getattr(client, "shards", "1")), len(episodes))
    for shard in range(shards):  # Each adder writes to the next of several servers.
        mine = range(shard, len(episodes), shards)
        _play((episodes[index] for index in mine), min(_STREAMS, len(mine)), make_adder())


def _play(episodes: Iterable[Step], width: int, adder: Adder) -> None:
    for chunk in _chunks(episodes):
        rows = tree.map_structure(lambda *leaves: np.concatenate(leaves), *[each[:4] for each in chunk])
        index, kinds = _schedule([len(each.start_of_episode) for each in chunk], width)
        observation, action, reward, discount = (functools.partial(_take, each) for each in rows)
        adder.add_first(dm_env.TimeStep(kinds[0], None, None, observation(index[0])))
        for now, then, kind in zip(index, index[1:], kinds[1:], strict=False):
            begins = kind == FIRST  # The action is ignored then.
            step = dm_env.TimeStep(kind, reward(now, begins, 0), discount(now, begins, 1), observation(then))
            adder.add(action(now), step)
    adder.close()


def _chunks(episodes: Iterable[Step]) -> Iterator[list[Step]]:
    """Some episodes at a time: their rows are copied."""
    chunk: list[Step] = []
    size = 0
    for episode in episodes:
        chunk.append(episode)
        size += sum(leaf.nbytes for leaf in tree.flatten(episode[:4]))
        if size > _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _schedule(lengths: Sequence[int], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Which row of the concatenated episodes each env plays when, and its step type: int64 `[t, width]`.

    An env that has played all of its episodes stays at the first step of one.
    """
    begins, queues = np.cumsum([0, *lengths[:-1]]), [[0, env] for env in range(width)]
    turns: list[list[int]] = [[] for _ in range(width)]
    for episode, length in enumerate(lengths):  # Each goes to the env that is free first.
        rows, env = heapq.heappop(queues)
        turns[env].append(episode)
        heapq.heappush(queues, [rows + length, env])
    steps = max(rows for rows, _ in queues)
    index, kinds = np.zeros((steps, width), np.int64), np.full((steps, width), FIRST)
    for env, mine in enumerate(turns):
        at = 0
        for episode in mine:
            end = at + lengths[episode]
            index[at:end, env] = begins[episode] + np.arange(lengths[episode])
            kinds[at + 1 : end, env], kinds[end - 1, env] = MID, LAST
            at = end
    return index, kinds


def _take(nest: Nest, rows: np.ndarray, where: np.ndarray | None = None, value: float = 0) -> Nest:
    def take(leaf: np.ndarray) -> np.ndarray:
        taken = leaf[rows]
        if where is not None:
            taken[where] = value
        return taken

    return tree.map_structure(take, nest)
