"""The service that collects the state of all nodes of a run in checkpoints."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

from framework.checkpoints import Checkpointer, CheckpointReader, Part, torch_part
from framework.programs.run_config import RunConfig
from framework.replay.checkpointers import DefaultCheckpointer

_REPLAY = "replay"  # The part that the replay server writes.


class RunCheckpointer:
    """Keeps the newest state of every part of a run and writes all parts as one checkpoint.

    Workers `put` their state between steps and when they stop. The checkpointer asks the counter and the
    replay server when it writes. It closes after the workers and before replay, and then writes the last
    checkpoint of a run, however the run ends.

    Args:
      config: the run's settings. Checkpoints go to `checkpoints/` in its directory.
      counter: the counter, whose counts are part of every checkpoint. `env_steps` names the checkpoint.
      replay: a replay client, whose server writes its own part. None for an agent without replay.
    """

    def __init__(self, config: RunConfig, *, counter: Any, replay: Any = None):
        self._checkpointer = run_checkpoints(config)
        self._counter, self._replay = counter, replay
        self._lock = threading.Lock()  # Guards the states; not held while a checkpoint is written.
        self._writing = threading.Lock()
        self._puts = self._saved_puts = 0
        reader = self._checkpointer.newest_intact()
        names = () if reader is None else reader.names
        self._states = {name: reader.state(name) for name in names if reader is not None and name != _REPLAY}

    def get(self, part: str) -> Any:
        """The newest state of `part`, from this run or from the checkpoint that it resumes; None without."""
        with self._lock:
            return self._states.get(part)

    def put(self, part: str, state: Any) -> None:
        """Takes the newest state of `part`: dicts, lists and tuples of tensors, arrays and scalars."""
        with self._lock:
            self._states[part] = state
            self._puts += 1

    def commit(self, reason: str) -> str | None:
        """Writes a checkpoint of all parts now and returns its folder; None if nothing has changed."""
        with self._writing:
            with self._lock:
                states, puts = dict(self._states), self._puts
            if puts == self._saved_puts:
                return None
            states["counter"] = self._counter.save()
            parts: dict[str, Part] = {name: torch_part(state) for name, state in states.items()}
            if self._replay is not None:
                written = str(self._replay.checkpoint())
                parts[_REPLAY] = lambda path: shutil.move(written, path)
            steps = int(self._counter.get_counts().get("env_steps", 0))
            path = self._checkpointer.save(steps, parts, {"reason": reason})
            self._saved_puts = puts
            return os.fspath(path)

    def close(self) -> None:
        """Writes the last checkpoint."""
        self.commit("end of the run")


def run_checkpoints(config: RunConfig) -> Checkpointer:
    """The checkpoints of the run in `config.directory`."""
    assert config.directory is not None
    return Checkpointer(Path(config.directory) / "checkpoints", keep=config.keep_checkpoints)


def saved_part(config: RunConfig, part: str) -> Any:
    """The state of `part` in the newest intact checkpoint of the run, or None."""
    reader = _newest(config)
    return reader.state(part) if reader is not None and part in reader.names else None


def replay_checkpointer(config: RunConfig) -> DefaultCheckpointer:
    """The checkpointer of the run's replay server.

    It writes a folder beside the run's checkpoints, and `RunCheckpointer` moves the folder into a checkpoint.
    It restores the replay part of the newest intact checkpoint, so that all parts of a run come from the same
    checkpoint.
    """
    assert config.directory is not None
    aside = Path(config.directory) / "checkpoints" / ".replay"
    shutil.rmtree(aside, ignore_errors=True)  # From a killed server; part of no checkpoint.
    reader = _newest(config)
    part = reader.part(_REPLAY) if reader is not None and _REPLAY in reader.names else None
    return DefaultCheckpointer(aside, fallback_checkpoint_path=part)


def _newest(config: RunConfig) -> CheckpointReader | None:
    return None if config.directory is None else run_checkpoints(config).newest_intact()
