"""Episodes in files.

```python
environment = environments.make("gymnasium:MountainCar-v0", num_envs=1, seed=0)
write_episodes("data/mountain-car", record(environment, act, 5), spec=environment.spec)
episodes = read_episodes("data/mountain-car")      # a sequence of `Step`, read when they are asked for
```

Two layouts of folders are read and written: `npz`, shards that are mapped into memory
(`framework.datasets.npz_layout`), and Minari's (`framework.datasets.minari_layout`).
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from framework.datasets import minari_layout, npz_layout
from framework.datasets.episodes import EpisodeDataset, checked_episode, plain_spec
from framework.objects import named
from framework.specs import EnvironmentSpec
from framework.types import Step

_LAYOUTS: dict[str, Any] = {"npz": npz_layout, "minari": minari_layout}


def read_episodes(path: str | os.PathLike[str]) -> EpisodeDataset:
    """The episodes of a folder that `write_episodes` or Minari wrote.

    Args:
      path: the folder; or `module:function`, which returns episodes, and `module:function(count=5)` passes
        arguments.

    Raises:
      ValueError: There are no episodes, or a file is broken or of another format. The text has the file, the
        field, what it holds and what was expected.
      ImportError: Minari is not installed.
    """
    text = os.fspath(path)
    place = Path(text).expanduser()
    if not place.exists() and ":" in text:
        made: Callable[..., Iterable[Step]] = named(text, {}, "episodes")
        episodes = list(made())
        return EpisodeDataset(
            text, episodes.__getitem__, [len(each.start_of_episode) - 1 for each in episodes]
        )
    for layout in _LAYOUTS.values():
        if (file := layout.index_of(place)) is not None:
            return layout.read(file)
    problem = "has neither" if place.is_dir() else "is not a folder with"
    raise ValueError(
        f"episodes: got {text!r}, which {problem} {npz_layout.INDEX} nor data/{minari_layout.INDEX}, "
        "expected a folder of framework.datasets.write_episodes or of Minari, or module:function."
    )


def write_episodes(
    path: str | os.PathLike[str],
    episodes: Iterable[Step],
    *,
    layout: Literal["npz", "minari"] = "npz",
    spec: EnvironmentSpec | None = None,
    about: Mapping[str, Any] | None = None,
    compress: bool = False,
) -> Path:
    """Writes episodes to a new folder, which is there only when it is complete. Returns its path.

    Args:
      path: the folder. It must not exist.
      episodes: `Step`s of T + 1 rows; see the module. They may be made one by one.
      layout: "npz" or "minari".
      spec: the `EnvironmentSpec` of one env. None is the spec of `episodes`, if they are an `EpisodeDataset`;
        else specs without bounds, with the shapes and dtypes of the first episode.
      about: values for JSON, such as the policy, the seeds and the commit.
      compress: whether arrays are compressed, for small data of pictures: reading then takes memory for all
        of it. Only with "npz".

    Raises:
      ValueError: There are no episodes, the layout is unknown, is not one that is compressed, or an episode
        differs from the spec.
      FileExistsError: There is something at `path`.
      ImportError: Minari is not installed.
    """
    if layout not in _LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, expected one of {', '.join(_LAYOUTS)}.")
    if compress and layout != "npz":
        raise ValueError(f"compress: got True with layout {layout!r}, expected False, or layout 'npz'.")
    place = Path(path).expanduser()
    if place.exists():
        raise FileExistsError(f"{place} exists. Write the episodes to a new folder, or remove it.")
    if isinstance(episodes, EpisodeDataset):
        spec, about = spec or episodes.spec, {**episodes.about, **(about or {})}
    rest = iter(episodes)
    first = next(rest, None)
    if first is None:
        raise ValueError(
            "episodes: got none, expected at least one. Record them with framework.datasets.record."
        )
    spec = spec or plain_spec(first)
    checked = (
        checked_episode(number, each, spec) for number, each in enumerate(itertools.chain([first], rest))
    )
    aside = place.with_name(f".{place.name}-{secrets.token_hex(4)}")
    aside.mkdir(parents=True)
    try:
        options = {"compress": True} if compress else {}
        _LAYOUTS[layout].write(aside, checked, spec, dict(about or {}), **options)
        aside.rename(place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return place
