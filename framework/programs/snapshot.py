"""The exact state of a program on the serial engine, so that an interrupted run continues bit for bit.

A program on the serial engine is a graph of objects in one process, and between two turns nothing runs. Its
state is therefore one pickle of all nodes' objects: replay, networks, optimizers, random generators, open
episodes, environments. No class needs code for this. The exceptions are what is tied to the process (locks,
clients, the run's settings), and arrays that share memory, which a plain pickle would separate.

An interrupted run stores the pickle in its last checkpoint, as the part `program`. It resumes from it if it
runs on the serial engine with the same versions, agent and settings. Otherwise it resumes from the other
parts of the checkpoint, as on every engine: with the same parameters and replay, and new episodes.
"""

from __future__ import annotations

import copyreg
import hashlib
import hmac
import io
import json
import logging
import math
import os
import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

import launch
from framework.checkpoints import package_versions
from framework.config_checks import RaisedAs
from framework.environments.rows import TimeStepChecker
from framework.loggers import Logger
from framework.pickling import ObjectPickler, pickle_module
from framework.runs.callbacks import CallbackHost
from framework.runs.checkpoints import PROGRAM, newest_checkpoint
from framework.runs.run_config import RunConfig
from framework.runs.run_folder import RunFolder, differences, plain
from framework.variables import VariableBlock
from framework.workers.actor_worker import ActorWorker
from framework.workers.evaluator import Evaluator
from framework.workers.learner_worker import LearnerNode
from framework.workers.worker import keep_freed_memory, prepare_process
from launch import context
from launch.engines.in_process import LocalInstance, LocalRuntime
from launch.process_state import generators, set_generators
from launch.program import ProgramState
from launch.rpc.sockets import read_secret

_LOG = logging.getLogger(__name__)
_KEY_BYTES = 32
# May differ when a run resumes: its limits, and its folder, which may have been moved.
_MAY_DIFFER = ("max_env_steps", "max_learner_steps", "target_return", "directory")


class Snapshot:
    """Saves and loads the state of a run's program; see `launch.Program.snapshot`.

    Args:
      run: the run's folder.
      callbacks: the new `Monitor`'s.
      logger_factory: makes the logger of the new `Monitor`. None continues the files of the saved one.

    Attributes:
      num_nodes: number of nodes of the program by group.
    """

    def __init__(
        self,
        run: RunFolder,
        callbacks: CallbackHost | None = None,
        logger_factory: Callable[[], Logger | None] | None = None,
    ):
        self._run, self._config, self._callbacks = run, run.config, callbacks
        self._logger_factory = logger_factory
        self.num_nodes: dict[str, int] = {}

    def save(self, state: ProgramState) -> None:
        """Adds the state to the checkpoint that the run writes when it closes.

        A part that cannot be pickled (an environment in another process, a compiled loss) is logged. The run
        then resumes with new episodes.
        """
        _current.config = self._config
        file, monitor = io.BytesIO(), state.objects["monitor-0"]
        logger = monitor.logger
        states = generators()
        try:
            if self._logger_factory is not None:
                monitor.logger = None  # It may be impossible to pickle, and the next run makes its own.
            torch.save((states, state), file, pickle_module=pickle_module(_Pickler))
            about = json.dumps({**self._about(), **_progress(state)}).encode() + b"\n"
            signature = _signature(about, file.getbuffer())
        except Exception as error:
            _LOG.warning(
                "The exact state of the run was not saved, so a resumed run begins new episodes: %s: %s",
                type(error).__name__,
                error,
            )
            return
        finally:
            monitor.logger = logger
        # Joined at once: with a large replay, each copy counts.
        data = b"".join((signature, about, file.getbuffer()))
        state.objects["checkpointer-0"].put_bytes(PROGRAM, data)

    def load(self) -> ProgramState | None:
        """The state in the newest checkpoint; None if the run does not continue from one."""
        reader = newest_checkpoint(self._config)
        if reader is None:
            return None
        self._run.check_exact(reader)
        if PROGRAM not in reader.names:
            _LOG.warning(
                "%s holds no exact state: its run was killed, or ran on another engine. New "
                "episodes begin, so this run is not bit for bit the one that would have gone on.",
                reader.path,
            )
            return None
        try:
            return self._load(reader.part(PROGRAM).read_bytes())
        except Exception as error:
            _LOG.warning(
                "The exact state cannot be loaded, so new episodes begin: %s: %s", type(error).__name__, error
            )
            return None

    def _load(self, content: bytes) -> ProgramState | None:
        signature, data = content[:64], memoryview(content)[64:]
        if not hmac.compare_digest(signature, _signature(data)):
            _LOG.warning("The exact state was saved by another user or machine, so new episodes begin.")
            return None
        file = io.BytesIO(data)
        about, now = json.loads(file.readline()), self._about()
        changed = [differences(about[part], now[part]) for part in now]
        if any(changed):
            _LOG.warning(
                "The run's nodes, settings or packages have changed, so new episodes begin: %s.",
                "; ".join(filter(None, changed)),
            )
            return None
        limit = self._config.max_env_steps
        if limit != about["limit"] and (about["finished"] or (limit or math.inf) < about["granted"]):
            # Finished actors would not act again, and granted steps would exceed a lower limit.
            _LOG.warning("max_env_steps has changed at the end of the budget, so new episodes begin.")
            return None
        prepare_process(self._config.seed)
        keep_freed_memory()
        _current.config = self._config
        pickled = io.BytesIO(file.read())
        states, state = torch.load(pickled, pickle_module=pickle_module(_Pickler), weights_only=False)
        state.objects["counter-0"].max_steps = limit
        monitor = state.objects["monitor-0"]
        if self._logger_factory is not None:
            monitor.logger = self._logger_factory()
        self._run.record("serial")
        monitor.attach(self._callbacks)
        set_generators(states)
        return state

    def _about(self) -> dict[str, Any]:
        """What has to be equal when the run resumes."""
        about = {
            "versions": package_versions(),
            "config": {key: value for key, value in vars(self._config).items() if key not in _MAY_DIFFER},
            "agent": self._run.agent_config,
            "nodes": {f"nodes of {group}": count for group, count in self.num_nodes.items()},
            "run": {"environment": self._run.environment, "own_logger": self._logger_factory is not None},
        }
        return cast(dict[str, Any], plain(about))


def _progress(state: ProgramState) -> dict[str, Any]:
    """How far the program is in its budget of env steps."""
    counter = state.objects["counter-0"]
    # The others may have ended for another reason.
    kinds = (ActorWorker, Evaluator, LearnerNode)
    workers = [worker for label in state.order if isinstance(worker := state.objects[label], kinds)]
    return {
        "limit": counter.max_steps,
        "granted": counter.get_counts().get("env_steps", 0) + counter.granted(),
        "finished": any(worker.finished() for worker in workers),
    }


# What objects refer to that belongs to the program that is saved or loaded: `config`, its settings.
_current = threading.local()


class _Pickler(ObjectPickler):
    """Also leaves out what belongs to the process: the engine, clients of nodes, the run's settings."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is socket.socket:
            return socket.socket, (obj.family, obj.type)  # Nothing waits at its other end.
        if kind is LocalRuntime:
            return context.current_runtime, ()
        if kind is LocalInstance:
            return _instance, (obj.label,)
        if kind is RunConfig:
            return _config, ()
        if isinstance(obj, Path) and obj.is_relative_to(_directory()):  # The folder may be moved.
            return _in_directory, (os.fspath(obj.relative_to(_directory())),)
        if isinstance(obj, threading.Event) and obj is launch.stop_event():
            return launch.stop_event, ()
        if kind is VariableBlock:
            return obj.reduce_private()
        if kind is TimeStepChecker:  # Elsewhere, it leaves out the rows, which are the actor's.
            return copyreg.__newobj__, (kind,), vars(obj)  # type: ignore[attr-defined]
        if kind is launch.NodeClient:  # The class's own reduction is for other processes.
            return copyreg.__newobj__, (kind,), vars(obj)  # type: ignore[attr-defined]
        return super().reducer_override(obj)


def _instance(label: str) -> LocalInstance:
    runtime = context.current_runtime()
    assert isinstance(runtime, LocalRuntime)
    return next(instance for instance in runtime.instances.values() if instance.label == label)


def _config() -> RunConfig:
    return _current.config


def _directory() -> Path:
    return Path(_current.config.directory)


def _in_directory(path: str) -> Path:
    return _directory() / path


def _signature(*data: Any) -> bytes:
    """64 bytes that only this user on this machine can compute: a pickle can run code when it is loaded."""
    digest = hmac.new(_signature_key(), digestmod=hashlib.sha256)
    for part in data:
        digest.update(part)
    return digest.hexdigest().encode()


def _signature_key() -> bytes:
    """The user's key of 32 bytes. It is in no run's folder, which may be copied, shared, or ignore modes."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "repertory"
    path = folder / "snapshot-key"
    elsewhere = (
        "If that is not possible, set XDG_CACHE_HOME to a folder of your own, on a file system with "
        "permissions and hard links."
    )
    with RaisedAs(ValueError, (ValueError, OSError), after=f" {elsewhere}"):
        folder.mkdir(parents=True, exist_ok=True)
        key = read_secret(os.fspath(path), secrets.token_bytes(_KEY_BYTES))
    owner, user = path.stat().st_uid, os.geteuid()
    if (owner, len(key)) != (user, _KEY_BYTES):  # Anybody knows an empty key.
        raise ValueError(
            f"{path}: got a key of {len(key)} bytes of user {owner}, expected {_KEY_BYTES} of user {user}. "
            f"Delete it: the next run makes a new one. {elsewhere}"
        )
    return key
