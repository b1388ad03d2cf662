"""Rows as a run of Weights & Biases."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.foreign import close
from framework.loggers.base import Logger, to_scalars
from framework.runs import config_file
from launch import extras

_ID = "id.txt"


class WandbLogger(Logger):
    """Writes the numbers and strings of each row under `label/name`, against `env_steps`.

    The account and the server are what `wandb login` set. `WANDB_MODE=offline`, or `mode="offline"`, writes
    to `directory`/wandb only; `wandb sync` sends it later. A resumed run continues the same run of wandb.

    Args:
      directory: folder of the run. Its name is the name of the run of wandb.
      **settings: arguments of `wandb.init`, such as `project`, `entity`, `mode` and `tags`.

    Raises:
      ImportError: wandb is not installed. The message names the extra.
    """

    def __init__(self, directory: str | os.PathLike[str], **settings: Any):
        try:
            import wandb
        except ImportError as error:
            raise ImportError(f"loggers: wandb is not installed. Run {extras.install('wandb')}.") from error
        self._directory, self._settings = Path(directory), settings
        folder = self._directory / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / _ID
        if not file.exists():
            file.write_text(secrets.token_hex(4), encoding="utf-8")
        known = {"project": "repertory", "name": self._directory.name, "config": _config(self._directory)}
        fixed = {"dir": self._directory, "id": file.read_text(encoding="utf-8"), "resume": "allow"}
        self._run = wandb.init(**{**known, **settings, **fixed})
        self._run.define_metric("*", step_metric="env_steps")

    def __getstate__(self) -> tuple[Path, dict[str, Any]]:
        return self._directory, self._settings

    def __setstate__(self, state: tuple[Path, dict[str, Any]]) -> None:
        self.__init__(state[0], **state[1])  # type: ignore[misc]

    def write(self, row: Mapping[str, Any]) -> None:
        plain = to_scalars(row)
        label = str(plain.pop("label", ""))
        values = {f"{label}/{name}" if label else name: value for name, value in plain.items()}
        steps = plain.get("env_steps", plain.get("learner_steps", plain.get("steps")))
        self._run.log(values if steps is None else {**values, "env_steps": steps})

    def close(self) -> None:
        close(self._run.finish, "Weights & Biases")


def _config(directory: Path) -> dict[str, Any]:
    """The run's settings."""
    file = directory / "config.yaml"
    return config_file.read(file) if file.exists() else {}
