# ruff: noqa: B905, E402, UP035  (Python 3.8)
"""Serves environments to a run of Repertory from a separate process.

This file imports nothing of Repertory: copy it to where the environment is, another host or another Python.
It needs Python 3.8 or newer, numpy, pyzmq, msgpack, and the package of the environment:

    python environment_server.py gymnasium:CartPole-v1 --connect HOST:5555 --key environments.key --num-envs 8

The name is `gymnasium:ID`, `gym:ID` (the package before gymnasium), or `module:object` of a callable that
returns an environment with the methods of gymnasium's or dm_env's; its parameter `seed`, if it has one,
receives the env's seed. From a script:
`serve(EnvironmentsOf(make_one), ["HOST:5555"], "environments.key", num_envs=8)`.

Messages are msgpack lists `[kind, ...]` over a ZeroMQ DEALER socket with CURVE; nothing is unpickled:

    server to run    hello protocol envs spec    timestep leaves    fault text
    run to server    take envs seed    reset    step leaves    release    refuse text    ping

`leaves` are the bytes of arrays `[envs, ...]`; a dict's are in the order of its sorted keys. In `step`
they are the actions. In `timestep` they are the step type (int64), rewards, discounts and observations, and
with several agents the step type of each. An env whose last step was LAST begins an episode at the next
`step`, which ignores its action.
"""

from __future__ import annotations

import os
import signal
import sys


def _leave(*_: object) -> None:
    os.write(2, b"Interrupted.\n")
    os._exit(130)


if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)  # The imports take long, and leave nothing to clean up.

import argparse
import contextlib
import importlib
import inspect
import itertools
import time
import traceback
from typing import Any, Callable, Iterator, Sequence

import msgpack
import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

PROTOCOL = 1
FIRST, MID, LAST = 0, 1, 2
MAX_FRAME_BYTES = 1 << 28
_MAX_OBJECTS = 1 << 17  # lists and dicts in a message; an empty one takes 1 byte there, and 70 in memory
_ANSWER_SECONDS = 3.0  # for a run to answer an offer, and for the handshake before it
_TURNED_AWAY = 500  # the status of a run that needs no envs now; a wrong key has 400
_RETRY_SECONDS = (0.02, 0.25)  # shortest and longest pause between two offers
_AUTH_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_ENDED = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | _AUTH_FAILED


class UnreadableMessage(ValueError):
    """A peer sent something that is not a message of this protocol."""


def pack(kind: str, *content: Any) -> bytes:
    return msgpack.packb([kind, *content], use_bin_type=True)


def unpack(frame: Any) -> tuple[str, list[Any]]:
    """Returns the kind and the content of a message; raises UnreadableMessage."""
    left = [_MAX_OBJECTS]

    def count(made: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise ValueError(f"got more than {_MAX_OBJECTS} lists and dicts")
        return made

    try:
        message = msgpack.unpackb(frame, raw=False, list_hook=count, object_hook=count)
    except Exception as error:  # msgpack's errors have no common class
        raise UnreadableMessage(f"message: {type(error).__name__}: {error}") from None
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise UnreadableMessage(f"message: got {type(message).__name__}, expected a list [kind, ...].")
    return message[0], message[1:]


def _fields(kind: str, content: list[Any], count: int) -> list[Any]:
    if len(content) != count:
        raise UnreadableMessage(f"{kind}: got {len(content)} fields, expected {count}.")
    return content


def flatten(nest: Any) -> list[Any]:
    """Leaves of dicts, by their sorted keys, and of lists and tuples."""
    if isinstance(nest, dict) and not is_leaf(nest):
        return [leaf for key in sorted(nest) for leaf in flatten(nest[key])]
    if isinstance(nest, (list, tuple)):
        return [leaf for child in nest for leaf in flatten(child)]
    return [nest]


def is_leaf(data: Any) -> bool:
    """Whether spec data describes one array."""
    return isinstance(data, dict) and isinstance(data.get("dtype"), str)


def unflatten(data: Any, leaves: Iterator[Any]) -> Any:
    """A nest with the structure of spec data."""
    if is_leaf(data):
        return next(leaves)
    if isinstance(data, dict):
        children = {key: unflatten(data[key], leaves) for key in sorted(data)}
        return {key: children[key] for key in data}
    return tuple(unflatten(child, leaves) for child in data)


def to_bytes(arrays: Sequence[np.ndarray]) -> list[bytes]:
    return [array.tobytes() for array in arrays]


def from_bytes(content: Any, layout: Sequence[tuple[np.dtype, tuple[int, ...]]]) -> list[np.ndarray]:
    """Arrays of the dtypes and shapes of `layout`, read-only; raises UnreadableMessage."""
    sizes = [dtype.itemsize * int(np.prod(shape, dtype=np.int64)) for dtype, shape in layout]
    if not isinstance(content, list) or [len(x) if isinstance(x, bytes) else -1 for x in content] != sizes:
        got = content[:16] if isinstance(content, list) else [content]
        got = [len(x) if isinstance(x, bytes) else type(x).__name__ for x in got]
        raise UnreadableMessage(f"leaves: got {got}, expected bytes of the lengths {sizes}.")
    return [
        np.frombuffer(data, dtype).reshape(shape) if data else np.zeros(shape, dtype)
        for data, (dtype, shape) in zip(content, layout)
    ]


def layout_of(data: Any, num_envs: int) -> list[tuple[np.dtype, tuple[int, ...]]]:
    """Dtype and shape `[num_envs, ...]` of each leaf of spec data."""
    return [(np.dtype(leaf["dtype"]), (num_envs, *leaf["shape"])) for leaf in flatten(data)]


def describe_spec(spec: Any) -> Any:
    """Spec data of a nest of dm_env specs: plain lists, dicts, numbers and strings.

    A leaf is a dict of `shape`, `dtype`, and where they apply `minimum` and `maximum` (a number or nested
    lists), `num_values` (of a discrete value from 0) and `stacked`.
    """
    if isinstance(spec, dict):
        return {str(key): describe_spec(value) for key, value in spec.items()}
    if isinstance(spec, (list, tuple)):
        return [describe_spec(child) for child in spec]
    data = {"shape": list(spec.shape), "dtype": np.dtype(spec.dtype).str}
    if getattr(spec, "num_values", None) is not None:
        return {**data, "num_values": int(spec.num_values)}
    if getattr(spec, "minimum", None) is not None:
        data.update(minimum=np.asarray(spec.minimum).tolist(), maximum=np.asarray(spec.maximum).tolist())
    if type(spec).__name__ in ("StackedArray", "StackedBoundedArray"):
        data["stacked"] = True
    return data


def describe_space(space: Any) -> Any:
    """Spec data of a space of gymnasium or gym. A Discrete space counts from 0, and has its `start`, too."""
    kind = type(space).__name__
    if kind == "Dict":
        return {str(key): describe_space(child) for key, child in space.spaces.items()}
    if kind == "Tuple":
        return [describe_space(child) for child in space.spaces]
    if kind not in ("Box", "Discrete", "MultiDiscrete", "MultiBinary"):
        raise TypeError(
            f"space: got {space!r}, expected Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple."
        )
    data = {"shape": list(space.shape or ()), "dtype": np.dtype(space.dtype).str}
    if kind == "Discrete":
        return {**data, "num_values": int(space.n), "start": int(getattr(space, "start", 0))}
    if kind == "MultiBinary":
        return {**data, "minimum": 0, "maximum": 1}
    if kind == "MultiDiscrete":
        first = np.asarray(getattr(space, "start", np.zeros_like(space.nvec)))
        return {**data, "minimum": first.tolist(), "maximum": (first + space.nvec - 1).tolist()}
    low, high = np.asarray(space.low), np.asarray(space.high)
    if (_is_bound(low) | _is_bound(high)).any():
        alike = low.ndim > 1 and (low == low.flat[0]).all() and (high == high.flat[0]).all()
        data["minimum"] = (low.flat[0] if alike else low).tolist()
        data["maximum"] = (high.flat[0] if alike else high).tolist()
    return data


def _is_bound(bound: np.ndarray) -> np.ndarray:
    """`framework.specs` has the same: the largest float of a dtype, or half of it, is no bound."""
    largest = min(1e30, float(np.finfo(bound.dtype).max) / 2) if bound.dtype.kind == "f" else np.inf
    return abs(bound.astype(np.float64)) < largest


class _Gymnasium:
    """One environment of gymnasium, or of gym, whose `step` may return four values."""

    def __init__(self, env: Any, seed: int | None):
        self.env, self._seed = env, seed  # The seed is the first reset's.
        self.spec = {
            "observations": describe_space(env.observation_space),
            "actions": describe_space(env.action_space),
            "rewards": {"shape": [], "dtype": "<f4"},
            "discounts": {"shape": [], "dtype": "<f4", "minimum": 0.0, "maximum": 1.0},
        }
        self.starts = [
            [leaf.pop("start", 0) for leaf in flatten(self.spec[of])] for of in ("actions", "observations")
        ]

    def reset(self) -> Any:
        seed, self._seed = self._seed, None
        if seed is not None and callable(getattr(self.env, "seed", None)):  # gym before 0.26
            self.env.seed(seed)
            seed = None
        result = self.env.reset() if seed is None else self.env.reset(seed=seed)
        is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        return result[0] if is_pair else result

    def step(self, action: Any) -> tuple[Any, Any, Any, int]:
        observation, reward, ended, *more = self.env.step(action)
        if len(more) == 2:
            terminated, truncated = ended, more[0]
        else:
            truncated = more[0].get("TimeLimit.truncated", False)
            terminated = ended and not truncated
        terminated, truncated = _flag("terminated", terminated), _flag("truncated", truncated)
        return observation, reward, 0.0 if terminated else 1.0, LAST if terminated or truncated else MID

    def close(self) -> None:
        self.env.close()


def _flag(name: str, value: Any) -> bool:
    """A flag as a bool; text, None and NaN, which would count as one, raise ValueError."""
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "iubf" or array.item() not in (0, 1):
        raise ValueError(f"{name}: got {value!r}, expected a bool.")
    return bool(array.item())


class _DmEnv:
    """One environment of dm_env."""

    def __init__(self, env: Any):
        self.env = env
        keys = ("observations", "actions", "rewards", "discounts")
        self.spec = {key: describe_spec(getattr(env, f"{key[:-1]}_spec")()) for key in keys}
        for key in ("rewards", "discounts"):
            for leaf in flatten(self.spec[key]):
                leaf["dtype"] = "<f4"
        self.starts = [[0] * len(flatten(self.spec[of])) for of in ("actions", "observations")]

    def reset(self) -> Any:
        return self.env.reset().observation

    def step(self, action: Any) -> tuple[Any, Any, Any, int]:
        step_type, reward, discount, observation = self.env.step(action)
        return observation, reward, discount, int(step_type)

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()


class EnvironmentsOf:
    """Makes batches of new environments, which `make_one()` returns one by one.

    Its parameter `seed`, if it has one, receives the env's seed.
    """

    def __init__(self, make_one: Callable[..., Any]):
        self._make_one = make_one
        try:
            self._takes_seed = "seed" in inspect.signature(make_one).parameters
        except (TypeError, ValueError):  # a builtin, say
            self._takes_seed = False
        first = self._make(None)
        self.spec = first.spec
        first.close()

    def _make(self, seed: int | None) -> Any:
        env = self._make_one(seed=seed) if self._takes_seed else self._make_one()
        return _Gymnasium(env, seed) if hasattr(env, "observation_space") else _DmEnv(env)

    def __call__(self, num_envs: int, seed: int | None) -> _Batch:
        seeds: list[int | None] = [None] * num_envs
        if seed is not None:
            children = np.random.SeedSequence(seed).spawn(num_envs)
            seeds = [int(child.generate_state(1)[0]) for child in children]
        envs = [self._make(each) for each in seeds]
        if len({id(getattr(env.env, "unwrapped", env.env)) for env in envs}) < num_envs:
            raise ValueError(
                "environment: got the same one from two calls of the factory, expected a new one for each "
                "env. Make the environment, not only its wrappers, inside of the factory."
            )
        return _Batch(envs, self.spec)


class _Batch:
    """Envs that are stepped one after the other, as one batch."""

    def __init__(self, envs: list[Any], spec: Any):
        self._envs, self._spec = envs, spec
        self._step_types = [LAST] * len(envs)
        first = [np.zeros(leaf["shape"], np.float32) for leaf in flatten(spec["rewards"])]
        self._first = first, [np.ones(leaf["shape"], np.float32) for leaf in flatten(spec["discounts"])]
        # Agents begin and end together, and each has a step type.
        nests = [
            set(field) if isinstance(field, dict) and not is_leaf(field) else set() for field in spec.values()
        ]
        self._num_agents = len(nests[0]) if all(nest == nests[0] for nest in nests) else 0
        self._layout = [
            (field, *leaf)
            for field in ("rewards", "discounts", "observations")
            for leaf in layout_of(spec[field], len(envs))
        ]
        action_starts, starts = envs[0].starts
        self._action_starts = action_starts
        self._starts = [0] * (len(self._layout) - len(starts)) + list(starts)

    def reset(self) -> list[np.ndarray]:
        self._step_types = [LAST] * len(self._envs)
        return self._advance([None] * len(self._envs))

    def step(self, leaves: list[np.ndarray]) -> list[np.ndarray]:
        shifted = [leaf + start if start else leaf for leaf, start in zip(leaves, self._action_starts)]
        actions = []
        for env in range(len(self._envs)):
            parts = (
                int(leaf[env]) if leaf.ndim == 1 and leaf.dtype.kind in "iu" else leaf[env].copy()
                for leaf in shifted
            )
            actions.append(unflatten(self._spec["actions"], parts))
        return self._advance(actions)

    def _advance(self, actions: list[Any]) -> list[np.ndarray]:
        rows = []
        for index, env in enumerate(self._envs):
            if self._step_types[index] == LAST:
                rewards, discounts = self._first
                observation, self._step_types[index] = env.reset(), FIRST
            else:
                observation, reward, discount, self._step_types[index] = env.step(actions[index])
                rewards = _pick(self._spec["rewards"], reward)
                discounts = _pick(self._spec["discounts"], discount)
            rows.append([*rewards, *discounts, *_pick(self._spec["observations"], observation)])
        leaves = [np.array(self._step_types, np.int64)]
        for column, leaf, start in zip(zip(*rows), self._layout, self._starts):
            leaves.append(_to_array(column, start, *leaf))
        return leaves + leaves[:1] * self._num_agents

    def close(self) -> None:
        for env in self._envs:
            try:
                env.close()
            except Exception:  # The others must be closed, too.
                traceback.print_exc()


def _to_array(column: Sequence[Any], start: int, field: str, dtype: np.dtype, shape: Any) -> np.ndarray:
    """The values of all envs as an array that fits the spec; raises ValueError if a value would change."""
    array = np.asarray(column)
    # One number may come as an array of one number.
    fits = array.shape == shape or (len(shape) == 1 and array.size == shape[0])
    numbers = array.dtype.kind in ("iubf" if dtype.kind == "f" else "iub")
    if fits and numbers:
        array = (array - start if start else array).reshape(shape)
        converted = array.astype(dtype)
        if dtype.kind == "f" or array.dtype == dtype or (converted == array).all():
            return converted
    values = f" {array.tolist()}" if array.size <= 16 else ""
    raise ValueError(
        f"{field[:-1]}: got {array.dtype}{list(array.shape[1:])}{values}, expected {dtype}{list(shape[1:])}. "
        "Make the environment agree with its spec."
    )


def _pick(data: Any, value: Any) -> list[Any]:
    """The leaves of `value` in the order of `flatten(data)`."""
    if is_leaf(data):
        return [value]
    keys = sorted(data) if isinstance(data, dict) else range(len(data))
    return [leaf for key in keys for leaf in _pick(data[key], value[key])]


class _Session:
    """One connection: an offer of envs, and the batch that a run has taken of them."""

    def __init__(self, context: zmq.Context, address: str, keys: tuple[bytes, bytes], hello: bytes):
        self.address, self.begun = address, time.monotonic()
        self.batch: Any = None
        self.num_envs = 0
        self.actions: list[Any] = []
        self.socket = context.socket(zmq.DEALER)
        options: dict[str, Any] = {"linger": 0, "maxmsgsize": MAX_FRAME_BYTES, "reconnect_ivl": -1}
        options.update(tcp_keepalive=1, tcp_maxrt=60000)  # milliseconds
        options.update(tcp_keepalive_idle=30, tcp_keepalive_intvl=10, tcp_keepalive_cnt=3)
        options.update(curve_serverkey=keys[0], curve_publickey=keys[0], curve_secretkey=keys[1])
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.monitor = self.socket.get_monitor_socket(_ENDED)
        self.socket.connect(f"tcp://{address}")
        self.send(hello)

    def send(self, frame: bytes) -> None:
        # It would wait forever for a lost connection; the monitor tells of the loss.
        with contextlib.suppress(zmq.Again):
            self.socket.send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)
        if self.batch is not None:
            self.batch.close()


class Refused(Exception):
    """The run does not take these environments, and says why."""


class _Server:
    """Offers the free envs on one connection at a time; steps the envs of every run that took some."""

    def __init__(self, make_batch: Any, connect: Sequence[str], keys: tuple[bytes, bytes], num_envs: int):
        self._make_batch, self._keys, self._free = make_batch, keys, num_envs
        self._addresses = itertools.cycle(connect)
        self._context = zmq.Context()
        self._sessions: list[_Session] = []
        self._offer: _Session | None = None
        self._next_offer, self._pause = 0.0, _RETRY_SECONDS[0]
        self._said = ""
        self.last_used = time.monotonic()

    def step(self) -> None:
        """Makes an offer if one is due, and answers what arrives within a second."""
        now = time.monotonic()
        if self._offer is None and self._free and now >= self._next_offer:
            hello = pack("hello", PROTOCOL, self._free, self._make_batch.spec)
            self._offer = _Session(self._context, next(self._addresses), self._keys, hello)
            self._sessions.append(self._offer)
        offer = self._offer
        poller = zmq.Poller()
        for session in self._sessions:
            poller.register(session.socket, zmq.POLLIN)
            poller.register(session.monitor, zmq.POLLIN)
        waits_to_offer = self._offer is None and self._free
        wait = min(1.0, max(0.0, self._next_offer - now)) if waits_to_offer else 1.0
        ready = dict(poller.poll(int(1000 * wait) + 1))
        for session in list(self._sessions):
            if session.socket in ready:
                self._answer(session)
            elif session.monitor in ready:
                event = recv_monitor_message(session.monitor)
                refused = event["event"] & _AUTH_FAILED and event["value"] != _TURNED_AWAY
                self._end(session, "it refused the key" if refused else "it needs no envs, or is not running")
        # The answer may have arrived meanwhile: steps of other envs may have taken long.
        waits = offer if offer is self._offer else None
        if waits is not None and waits.socket not in ready and now > waits.begun + _ANSWER_SECONDS:
            self._end(waits, f"{waits.address} did not answer")
        if len(self._sessions) > (self._offer is not None):
            self.last_used = time.monotonic()

    def _answer(self, session: _Session) -> None:
        try:
            kind, content = unpack(session.socket.recv(zmq.NOBLOCK))
            self._take_message(session, kind, content)
        except zmq.Again:
            return
        except UnreadableMessage as error:
            self._end(session, f"received an invalid message: {error}")

    def _take_message(self, session: _Session, kind: str, content: list[Any]) -> None:
        if kind == "take" and session is self._offer:
            num_envs, seed = _fields(kind, content, 2)
            if type(num_envs) is not int or not 1 <= num_envs <= self._free:
                raise UnreadableMessage(f"take: got {num_envs!r} envs, expected 1 to {self._free}.")
            session.num_envs = num_envs
            self._free -= num_envs
            self._offer, self._pause = None, _RETRY_SECONDS[0]
            self._tell(f"{session.address} took {session.num_envs} envs, {self._free} are free")
            session.actions = layout_of(self._make_batch.spec["actions"], session.num_envs)
            self._reply(session, lambda: setattr(session, "batch", self._make_batch(num_envs, seed)))
        elif kind == "reset" and session.batch is not None:
            self._reply(session, lambda: session.batch.reset())
        elif kind == "step" and session.batch is not None:
            (leaves,) = _fields(kind, content, 1)
            actions = from_bytes(leaves, session.actions)
            self._reply(session, lambda: session.batch.step(actions))
        elif kind == "refuse":
            (text,) = _fields(kind, content, 1)
            if session is self._offer:
                raise Refused(text)
            self._end(session, f"the run has ended the connection: {text}")
        elif kind == "release":
            self._end(session, "no run needs envs")
        elif kind not in ("reset", "step", "ping"):  # An error of the first batch was told before.
            raise UnreadableMessage(f"message: got {kind!r}, expected take, reset, step, release or ping.")

    def _reply(self, session: _Session, call: Callable[[], Any]) -> None:
        try:
            leaves = call()
        except _Terminated:
            raise
        except (Exception, SystemExit) as error:
            text = f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"
            self._tell(text)
            session.send(pack("fault", text))
            return
        if leaves is not None:
            session.send(pack("timestep", to_bytes(leaves)))

    def _end(self, session: _Session, why: str) -> None:
        self._sessions.remove(session)
        self._free += session.num_envs
        if session is self._offer:
            self._offer = None
            self._next_offer = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, _RETRY_SECONDS[1])
            self._tell(f"waiting for a run at {session.address}: {why}")
        else:
            self._tell(f"{session.address} gave back {session.num_envs} envs: {why}")
        session.close()

    def _tell(self, text: str) -> None:
        if text != self._said:
            print(_printable(text), file=sys.stderr, flush=True)
        self._said = text

    def close(self) -> None:
        for session in self._sessions:
            session.close()
        self._context.destroy(linger=0)


def serve(
    make_batch: Any,
    connect: Sequence[str],
    key: str,
    num_envs: int = 1,
    idle_timeout: float | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Serves until an interrupt, or until no run has had envs for `idle_timeout` seconds.

    Args:
      make_batch: `EnvironmentsOf(make_one)`; or another object with the attribute `spec`, called with the
        number of envs and a seed or None, that returns a batch with `reset()`, `step(leaves)` and `close()`.
      connect: `HOST:PORT` of the hosts where the run's actors are, tried in turn.
      key: the file with the run's key.
      num_envs: number of envs that are offered.
      idle_timeout: seconds; None serves without a limit.
      stopped: called at least once a second; True ends the server.

    Raises:
      Refused: The run's environment has other specs.
    """
    server = _Server(make_batch, connect, read_key(key), num_envs)
    try:
        while not stopped() and (idle_timeout is None or time.monotonic() < server.last_used + idle_timeout):
            server.step()
    finally:
        server.close()


def read_key(path: str) -> tuple[bytes, bytes]:
    """The public and the secret key in a file of two lines that only its owner may read."""
    if os.name == "posix" and os.stat(path).st_mode & 0o077:
        raise ValueError(
            f"{path}: got a file that other users may read, expected mode 0600. Run chmod 600 {path}."
        )
    with open(path, "rb") as file:
        lines = file.read().split()
    if len(lines) != 2 or any(len(line) != 40 for line in lines):
        raise ValueError(f"{path}: got no keys, expected two lines of 40 characters. Copy the run's file.")
    return lines[0], lines[1]


def find(name: str) -> Callable[[], Any]:
    """The function that makes one environment of a name."""
    module, separator, rest = name.partition(":")
    if not separator:
        raise ValueError(f"environment: got {name!r}, expected gymnasium:ID, gym:ID or module:object.")
    if module in ("gymnasium", "gym"):
        make = importlib.import_module(module).make
        return lambda: make(rest)
    return getattr(importlib.import_module(module), rest)


def _printable(text: str) -> str:
    """`text` without the control characters of a peer, which a terminal would obey."""
    return "".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in text)


def make_parser(prog: str, *, names: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Serves environments to the actors of a run.")
    add = parser.add_argument
    add("environment", help=names)
    add("--connect", nargs="+", required=True, metavar="HOST:PORT", help="where the run's actors listen")
    add("--key", required=True, metavar="FILE", help="the run's environments.key, of mode 0600")
    add("--num-envs", type=int, default=1, help="number of envs (default: 1)")
    add(
        "--idle-timeout",
        type=float,
        metavar="SECONDS",
        help="exit after this many seconds without a run (default: never)",
    )
    return parser


class _Terminated(SystemExit):
    """A SIGTERM ends this server; another `SystemExit` is of an environment, and a fault of it."""


def _terminate(*_: object) -> None:
    raise _Terminated(0)


def run(make: Callable[[], Any], chosen: argparse.Namespace) -> int:
    """Serves what `make` returns until SIGTERM, or an interrupt; returns the exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        serve(make(), chosen.connect, chosen.key, chosen.num_envs, chosen.idle_timeout)
    except (OSError, ValueError, TypeError, ImportError, AttributeError, Refused) as error:
        print(_printable(f"error: {error}"), file=sys.stderr)
        return 2
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    names = "gymnasium:ID, gym:ID, or module:object of a function that returns an environment"
    chosen = make_parser("environment_server.py", names=names).parse_args(arguments)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())

    def make() -> EnvironmentsOf:
        make_one = find(chosen.environment)
        if signal.getsignal(signal.SIGINT) is _leave:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # There is something to close now.
        return EnvironmentsOf(make_one)

    try:
        return run(make, chosen)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
