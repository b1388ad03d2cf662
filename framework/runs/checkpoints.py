"""The checkpoints of a run: what writes them, and what continues from them."""

from __future__ import annotations

import functools
import os
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import launch
from framework.checkpoints import Checkpointer, CheckpointError, CheckpointReader, Part, torch_part
from framework.checkpoints.state import pack
from framework.clock import Clock
from framework.replay.checkpointers import DefaultCheckpointer
from framework.runs.run_config import RunConfig
from framework.runs.services import Counter

PROGRAM = "program"  # The part of a checkpoint that `Snapshot` writes.
CALLBACKS = "callbacks"  # The part with the states of the callbacks.


class RunCheckpointer:
    """Keeps the newest state of every part of a run and writes all parts as one checkpoint.

    Workers `put` their state between steps and when they stop. The checkpointer asks the counter and the
    replay servers when it writes. It closes after the workers and before replay, and then writes the last
    checkpoint of a run, however the run ends.

    Args:
      config: the run's settings. Checkpoints go to `checkpoints/` in its directory.
      counter: the counter, whose counts are part of every checkpoint.
      clock: its count names the checkpoint.
      monitor: takes the folder of each checkpoint.
      replays: replay clients by part. Each server writes its own part.
      learners: names of the learners, which `commit` periodic checkpoints.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        counter: Any,
        clock: Clock | None = None,
        monitor: Any = None,
        replays: Mapping[str, Any] | None = None,
        learners: Sequence[str] = (),
    ):
        self._config, self._checkpointer = config, run_checkpoints(config)
        self._about: dict[str, Any] = {}  # The last checkpoint's note has this, too.
        self._counter, self._clock, self._monitor = counter, clock or Clock(), monitor
        self._replays, self._learners = dict(replays or {}), frozenset(learners)
        self._due: set[str] = set()  # Learners that have put their state for the next periodic checkpoint.
        self._lock = threading.Lock()  # Guards the states; not held while a checkpoint is written.
        self._writing = threading.Lock()
        self._puts = self._saved_puts = 0
        self._bytes: dict[str, Part] = {}
        reader = self._checkpointer.newest_intact()
        self._states: dict[str, Any] = {}
        if reader is not None:
            files = [name for name in reader.names if name != PROGRAM and reader.part(name).is_file()]
            self._states = {name: reader.state(name) for name in files}

    def get(self, part: str) -> Any:
        """The newest state of `part`, from this run or from the checkpoint that it resumes; None without."""
        with self._lock:
            return self._states.get(part)

    def put(self, part: str, state: Any) -> None:
        """Takes the newest state of `part`: dicts, lists and tuples of tensors, arrays and scalars.

        Raises:
          TypeError: The state contains something else.
        """
        pack(state, part)
        with self._lock:
            self._states[part] = state
            self._puts += 1

    def put_bytes(self, part: str, data: bytes) -> None:
        """Adds a part to the next checkpoint only."""
        with self._lock:
            self._bytes[part] = data
            self._puts += 1

    def commit(self, reason: str, learner: str | None = None) -> str | None:
        """Writes a checkpoint of all parts now and returns its folder; None if nothing has changed.

        A call of one of several learners writes when the others have called too, so that their states are of
        about the same time, or when that learner calls for the second time.
        """
        with self._writing:
            with self._lock:
                if learner is not None and learner not in self._due:
                    self._due.add(learner)
                    if self._learners - self._due:
                        return None
                self._due.clear()
                states, puts = dict(self._states), self._puts
                others, self._bytes = self._bytes, {}
            if puts == self._saved_puts:
                return None
            states["counter"] = self._counter.save()
            if self._monitor is not None and (of_callbacks := self._monitor.callback_states()):
                states[CALLBACKS] = of_callbacks
            # First, because actors go on: replay should have little more than what is counted.
            parts: dict[str, Part] = {
                name: functools.partial(_move_checkpoint, replay) for name, replay in self._replays.items()
            }
            parts |= {**others, **{name: torch_part(state) for name, state in states.items()}}
            # The steps of the saved state: replay may have taken long, and actors go on.
            steps = int(self._clock.now(states["counter"]["counts"]))
            path = self._checkpointer.save(steps, parts, {"reason": reason, **self._about})
            self._saved_puts = puts
            if self._monitor is not None:
                self._monitor.checkpointed(os.fspath(path))
            return os.fspath(path)

    def close(self) -> None:
        """Writes the last checkpoint. On `serial`, a run at its end says under which limits it ended."""
        if launch.get_node_context().engine == "serial":
            limits = self._config.limits
            if self._monitor is not None and self._monitor.snapshot()["result"] is not None:
                self._about["ended_at"] = limits
            elif self._counter.is_ending():  # It was interrupted, and goes on exactly to the same limit.
                self._about["ended_at"] = {"max_env_steps": limits["max_env_steps"]}
        self.commit("end of the run")


def _move_checkpoint(replay: Any, path: Path) -> None:
    """Moves a new checkpoint of a replay server to `path`, as a part; see `Checkpointer.save`."""
    shutil.move(replay.checkpoint(), path)


def run_checkpoints(config: RunConfig) -> Checkpointer:
    """The checkpoints of the run in `config.directory`."""
    assert config.directory is not None
    return Checkpointer(Path(config.directory) / "checkpoints", keep=config.keep_checkpoints)


def make_counter(config: RunConfig) -> Counter:
    """The run's counter, which continues from the newest intact checkpoint."""
    counter = Counter(max_steps=config.max_env_steps)
    launch.register_loss_handler(counter.release)
    reader = newest_checkpoint(config)
    if reader is not None and "counter" in reader.names:
        counter.restore(reader.state("counter"))
    return counter


def replay_parts(name: str, shards: int) -> list[str]:
    """The parts of a checkpoint that the servers of the replay `name` write."""
    return [name] if shards == 1 else [f"{name}-{index}" for index in range(shards)]


def replay_checkpointer(
    config: RunConfig, name: str = "replay", index: int = 0, shards: int = 1
) -> DefaultCheckpointer:
    """The checkpointer of the server `index` of the run's replay `name`.

    It writes a folder beside the run's checkpoints, and `RunCheckpointer` moves the folder into a checkpoint.
    It restores the replay part of the newest intact checkpoint, so that all parts of a run come from the same
    checkpoint.
    """
    assert config.directory is not None
    parts = replay_parts(name, shards)
    aside = Path(config.directory) / "checkpoints" / f".{parts[index]}"
    shutil.rmtree(aside, ignore_errors=True)  # From a killed server; part of no checkpoint.
    reader = newest_checkpoint(config)
    kept = (
        []
        if reader is None
        else [part for part in reader.names if re.fullmatch(rf"{re.escape(name)}(-\d+)?", part)]
    )
    if reader is not None and kept and sorted(kept) != sorted(parts):
        raise CheckpointError(
            f"replay_shards: got {shards}, expected {len(kept)}: the checkpoint {reader.path} has the parts "
            f"{', '.join(kept)}. Resume the run with its number of shards."
        )
    part = reader.part(parts[index]) if reader is not None and kept else None
    return DefaultCheckpointer(aside, fallback_checkpoint_path=part)


def newest_checkpoint(config: RunConfig) -> CheckpointReader | None:
    """The newest intact checkpoint of the run; None if there is none."""
    return None if config.directory is None else run_checkpoints(config).newest_intact()
