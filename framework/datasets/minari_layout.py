"""Episodes in Minari's folders. Minari reads and writes the files (extra `minari`); nothing is downloaded.

Observations, actions and rewards get the dtypes of the specs of Minari's spaces; see `specs.from_spaces`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tree

from framework import specs
from framework.datasets.episodes import EpisodeDataset, step_of
from framework.types import Nest, Step
from launch.extras import install

INDEX = "metadata.json"
_ABOUT = ("dataset_id", "algorithm_name", "author", "code_permalink", "description", "env_spec")


def index_of(path: Path) -> Path | None:
    """The metadata of the data set in `path`, or in `path/data`; None without one."""
    return next((file for file in (path / "data" / INDEX, path / INDEX) if file.is_file()), None)


def read(index: Path) -> EpisodeDataset:
    """Opens the folder of a metadata file; see `read_episodes`."""
    minari = _minari()
    try:
        data = minari.MinariDataset(index.parent)
        spec = specs.from_spaces(data.observation_space, data.action_space)
        lengths = [
            int(each["total_steps"]) for each in data.storage.get_episode_metadata(data.episode_indices)
        ]
        about = {key: str(data.storage.metadata[key]) for key in _ABOUT if key in data.storage.metadata}
    except (KeyError, ValueError, AssertionError, OSError, TypeError) as error:
        raise ValueError(f"{index}: got a data set that Minari cannot read: {error}") from error
    offsets = [specs.discrete_offsets(each) for each in (data.observation_space, data.action_space)]

    def episode(number: int) -> Step:
        found = data[number]
        where = f"{index.parent}, episode {number}"
        length = lengths[number]
        observation = _cast(
            f"{where}: observations", spec.observations, found.observations, length + 1, offsets[0]
        )
        action = _cast(f"{where}: actions", spec.actions, found.actions, length, offsets[1])
        reward = _cast(f"{where}: rewards", spec.rewards, found.rewards, length)
        ended = np.asarray(found.terminations, np.bool_)
        return step_of(observation, action, reward, (~ended).astype(np.float32))

    return EpisodeDataset(str(index.parent), episode, lengths, spec, about)


def write(path: Path, episodes: Iterable[Step], spec: specs.EnvironmentSpec, about: dict[str, Any]) -> None:
    """Writes Minari's files into the empty folder `path`; see `write_episodes`."""
    minari = _minari()
    from minari.data_collector.episode_buffer import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    spaces = [specs.to_space(each) for each in spec[:2]]
    (path / "data").mkdir()
    storage = MinariStorage.new(path / "data", *spaces, jpeg_encoding=False)
    name = about.get("dataset_id", "recorded-v0")
    known = {key: str(about[key]) for key in _ABOUT[1:-1] if key in about}
    storage.update_metadata({"dataset_id": name, "minari_version": minari.__version__, **known})
    for number, episode in enumerate(episodes):
        rows = len(episode.reward) - 1
        ended = np.asarray(episode.discount[:-1]) == 0
        cut = np.arange(rows) == rows - 1
        buffer = EpisodeBuffer(
            id=number,
            observations=episode.observation,
            actions=tree.map_structure(lambda leaf: leaf[:-1], episode.action),
            rewards=list(episode.reward[:-1]),
            terminations=list(ended),
            truncations=list(cut & ~ended),
            infos={},
        )
        storage.update_episodes([buffer])


def _cast(name: str, spec: Nest, values: Nest, length: int, offsets: list[int] | None = None) -> Nest:
    """`values` as arrays `[length, ...]` of the spec's dtypes; discrete ones count from 0."""
    if offsets and any(offsets):
        leaves = zip(tree.flatten_up_to(spec, values, check_types=False), offsets, strict=True)
        values = tree.unflatten_as(spec, [np.asarray(leaf) - offset for leaf, offset in leaves])
    return specs.batch(name, spec, values, length)


def _minari() -> Any:
    try:
        import minari
    except ImportError as error:
        raise ImportError(f"minari: {error}. Install it with {install('minari')}") from error
    return minari
