"""The service that gathers the state of all nodes of a run into checkpoints."""

from __future__ import annotations

import pathlib
import threading
from typing import Any

from framework.checkpointing import Checkpointer, torch_part
from framework.programs.run_config import RunConfig


class RunCheckpointer:
    """Keeps the newest state of every part of a run and writes them together.

    Workers ``put`` their state when it suits them and once more when they stop; the counter and the replay
    server are asked at the moment of writing. Being closed after the workers and before replay, it writes the
    last checkpoint of a run, however the run ends.

    Args:
      config: the run's settings. Checkpoints go to ``checkpoints/`` in its directory.
      counter: its counts are part of every checkpoint, and ``env_steps`` names it.
      replay: a replay client, whose server checkpoints itself; None for an agent without replay.
    """

    def __init__(self, config: RunConfig, *, counter: Any = None, replay: Any = None):
        assert config.directory is not None
        self._checkpointer = Checkpointer(
            pathlib.Path(config.directory) / "checkpoints", keep=config.keep_checkpoints
        )
        self._counter, self._replay = counter, replay
        self._lock = threading.Lock()
        self._states: dict[str, Any] = {}
        self._new = False
        if self._checkpointer.latest() is not None:
            reader = self._checkpointer.restore(fall_back=True)
            self._states = {name: reader.state(name) for name in reader.names}

    def get(self, part: str) -> Any:
        """The newest state of ``part``, of this run or of the checkpoint it goes on from; None if none."""
        with self._lock:
            return self._states.get(part)

    def put(self, part: str, state: Any) -> None:
        """Takes the newest state of ``part``: dicts, lists and tuples of tensors, arrays and scalars."""
        with self._lock:
            self._states[part] = state
            self._new = True

    def commit(self, reason: str) -> str | None:
        """Writes a checkpoint of everything now and returns its folder; None if nothing is new."""
        with self._lock:
            if not self._new:
                return None
            states = dict(self._states)
            self._new = False
        counts: dict[str, Any] = {}
        note: dict[str, Any] = {"reason": reason}
        if self._counter is not None:
            states["counter"] = self._counter.save()
            counts = self._counter.get_counts()
        if self._replay is not None:
            note["replay"] = str(self._replay.checkpoint())
        parts = {name: torch_part(state) for name, state in states.items()}
        return str(self._checkpointer.save(int(counts.get("env_steps", 0)), parts, note))

    def close(self) -> None:
        """Writes the last checkpoint."""
        self.commit("end of the run")


def saved_part(directory: str | None, part: str) -> Any:
    """The state of ``part`` in the newest intact checkpoint of the run in ``directory``, or None."""
    if directory is None:
        return None
    checkpointer = Checkpointer(pathlib.Path(directory) / "checkpoints")
    if checkpointer.latest() is None:
        return None
    reader = checkpointer.restore(fall_back=True)
    return reader.state(part) if part in reader.names else None
