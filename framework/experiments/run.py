"""A run on disk, as an object."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from framework.commands.plot import draw_run
from framework.commands.shown import Shown
from framework.commands.video import record
from framework.config_checks import nearest
from framework.programs.loading import LoadedPolicy, load_policy
from framework.runs.run_config import RunConfig
from framework.runs.run_folder import RunError, RunFolder


class Run:
    """The run in a folder, ended or not. Each call reads what is there.

    ```python
    run = Run("runs/cartpole")                                      # or what framework.train() returned
    run.metrics("evaluator")["episode_return"]                      # float64 [evaluations]
    actions = run.policy()(observations)
    ```

    Args:
      path: the folder.
      allow: modules whose objects the run may name; see `load_policy`.

    Attributes:
      folder: its path.

    Raises:
      RunError: The folder holds no run.
    """

    def __init__(self, path: str | os.PathLike[str], allow: Collection[str] = ()):
        self.folder, self._allow = Path(os.path.expanduser(path)), allow
        self._read()

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def config(self) -> RunConfig:
        """The settings of the run, without the agent's."""
        return self._read().config

    @property
    def agent_config(self) -> dict[str, Any]:
        """The fields of the agent's config, as `config.yaml` has them."""
        return dict(self._read().agent_config)

    @property
    def result(self) -> dict[str, Any] | None:
        """Why the run ended, and the numbers of its last evaluation; None before its end."""
        return self._read().result

    def policy(self, checkpoint: str | int | os.PathLike[str] = "best") -> LoadedPolicy:
        """The greedy policy; see `load_policy` for `checkpoint`.

        Raises:
          RunError: There is no such checkpoint, or nothing was evaluated.
        """
        return load_policy(self.folder, checkpoint, self._allow)

    def metrics(self, label: str | None = None) -> dict[str, np.ndarray]:
        """The rows of metrics as columns, `[rows]` each: numbers are float64, with NaN where a row has none.

        Args:
          label: what wrote the rows: `evaluator`, `learner`, `actor-0`, or `actor` for all actors. None: all
            rows.

        Raises:
          RunError: No row has this label.
        """
        rows = self._read().rows()
        labels = dict.fromkeys(str(row["label"]) for row in rows)
        if label is not None:
            rows = [row for row in rows if label in (row["label"], row["label"].rpartition("-")[0])]
            if labels and not rows:
                raise RunError(
                    f"label: got {label!r}, expected one of {', '.join(labels)}.{nearest(label, labels)}"
                )
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: _column([row.get(name) for row in rows]) for name in names}

    def plot(self) -> Path:
        """Draws the returns in `curve.png` and returns its path. RunError if there are none yet."""
        path = draw_run(self._read())
        if path is None:
            raise RunError(f"{self.folder} has no returns yet. Wait for the first rows of metrics.")
        return path

    def video(
        self,
        output: str | os.PathLike[str] | None = None,
        *,
        checkpoint: str | int | os.PathLike[str] = "best",
        episodes: int = 1,
        max_steps: int = 5_000,
        fps: int = 30,
        seed: int = 0,
    ) -> Path:
        """Records greedy episodes as .mp4 or .gif, in `video.mp4` of the folder; returns the file's path."""
        path = self.folder / "video.mp4" if output is None else Path(output)
        record(self.policy(checkpoint), path, episodes, max_steps, fps, seed)
        return Shown(path)

    def _read(self) -> RunFolder:
        return RunFolder.open(self.folder)


def _column(values: list[Any]) -> np.ndarray:
    if all(value is None or isinstance(value, int | float) for value in values):
        return np.array([np.nan if value is None else value for value in values], np.float64)
    return np.array(values)
