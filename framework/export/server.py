"""The policy of a run over HTTP: `POST /act`, `GET /spec`, `/health` and `/metrics`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import tree
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import launch
from framework import specs
from framework.export.steps import PolicyStep
from framework.export.writing import describe
from framework.programs.loading import LoadedPolicy
from framework.runs.run_folder import RunError
from framework.types import Nest
from launch.errors import message_of

MAX_ROWS = 1024  # In one request.
_PATIENCE_S = 30.0  # Seconds for a request, its body, and its answer.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)  # Buckets of the time of a request.


class _Loaded(NamedTuple):
    """A policy, its greedy step, and the step that a seed decides, or why there is none."""

    policy: LoadedPolicy
    greedy: PolicyStep
    sampling: PolicyStep | str

    @classmethod
    def of(cls, policy: LoadedPolicy) -> _Loaded:
        greedy = PolicyStep(policy)
        try:
            return cls(policy, greedy, PolicyStep(policy, greedy=False))
        except ValueError as error:
            return cls(policy, greedy, str(error))


class PolicyService:
    """Acts for requests, all that wait in one batch, and takes newer checkpoints.

    Rows of several requests share a batch: those that come while one is computed make the next.

    Args:
      load: returns the policy of the newest checkpoint.
      max_batch: largest number of rows in a batch.
      max_body: largest number of bytes in the body of a request.
      reload_seconds: time between two looks for a newer checkpoint. None keeps the first.

    Attributes:
      app: the ASGI application.
    """

    def __init__(
        self,
        load: Callable[[], LoadedPolicy],
        max_batch: int = 64,
        max_body: int = 4_000_000,
        reload_seconds: float | None = 2.0,
    ):
        self._load, self._loaded = load, _Loaded.of(load())
        self._max_body, self._reload_seconds = max_body, reload_seconds
        batched = launch.batched_handler(batch_size=max_batch, timeout=0.0)
        self._greedy, self._sampled = batched(self._act_greedily), batched(self._act_by_noise)
        self._requests: Counter[int] = Counter()  # By status.
        self._counts: Counter[str] = Counter()
        self._seconds: Counter[float] = Counter()  # By the bound of the bucket.
        self._closing, self._error = threading.Event(), ""
        routes = [Route("/act", self.act, methods=["POST"])]
        routes += [Route(f"/{name}", getattr(self, name)) for name in ("spec", "health", "metrics")]
        self.app = Starlette(routes=routes, lifespan=self._lifespan)

    async def act(self, request: Request) -> Response:
        """Answers `{"observations", "state", "seed"}` with `{"actions", "state"}`."""
        begin = time.perf_counter()
        try:
            code, answer = 200, await asyncio.wait_for(self._answer(request), _PATIENCE_S)
        except _TooLarge as error:
            code, answer = 413, {"error": str(error)}
        except ValueError as error:
            code, answer = 422, {"error": str(error)}
        except asyncio.TimeoutError:
            code, answer = 503, {"error": f"the request took more than {_PATIENCE_S:.0f} seconds"}
        except ClientDisconnect:
            return Response(status_code=400)
        self._requests[code] += 1
        seconds = time.perf_counter() - begin
        self._counts["request_seconds_sum"] += seconds  # type: ignore[assignment]
        self._seconds[next((bound for bound in _SECONDS if seconds <= bound), float("inf"))] += 1
        return JSONResponse(answer, code)

    async def spec(self, request: Request) -> Response:
        """What is known of the policy, the specs of observations and actions, and what a state is."""
        policy, greedy, sampling = self._loaded
        sampled = sampling.initial if isinstance(sampling, PolicyStep) else []
        shapes = {
            "state": [[None, *leaf.shape[1:]] for leaf in greedy.initial],
            "state_with_seed": [[None, *leaf.shape[1:]] for leaf in sampled],
        }
        return JSONResponse(_finite({**describe(policy, greedy, greedy=True), **shapes}))

    async def health(self, request: Request) -> Response:
        """The checkpoint that acts, and why a newer one could not be read."""
        policy = self._loaded.policy
        about = {"status": "ok", "step": policy.step, "checkpoint": policy.checkpoint.name}
        return JSONResponse({**about, **({"reload_error": self._error} if self._error else {})})

    async def metrics(self, request: Request) -> Response:
        """Counts in the text format of Prometheus."""
        lines = ["# TYPE repertory_requests_total counter"]
        lines += [f'repertory_requests_total{{code="{c}"}} {n}' for c, n in sorted(self._requests.items())]
        for name in ("rows", "batches", "reloads", "reload_errors"):
            lines += [
                f"# TYPE repertory_{name}_total counter",
                f"repertory_{name}_total {self._counts[name]}",
            ]
        lines += ["# TYPE repertory_policy_step gauge", f"repertory_policy_step {self._loaded.policy.step}"]
        lines += ["# TYPE repertory_request_seconds histogram"]
        total = 0
        for bound in (*_SECONDS, float("inf")):
            total += self._seconds[bound]
            label = "+Inf" if bound == float("inf") else bound
            lines.append(f'repertory_request_seconds_bucket{{le="{label}"}} {total}')
        lines += [f"repertory_request_seconds_sum {self._counts['request_seconds_sum']}"]
        lines += [f"repertory_request_seconds_count {total}", ""]
        return PlainTextResponse("\n".join(lines), media_type="text/plain; version=0.0.4")

    async def _body(self, request: Request) -> bytes:
        """The body; `_TooLarge` as soon as it is known to be."""
        told, parts, size = request.headers.get("content-length", "0"), [], 0
        if told.isdecimal() and int(told) > self._max_body:
            raise _TooLarge(told, self._max_body)
        async for part in request.stream():
            size += len(part)
            if size > self._max_body:
                raise _TooLarge(f"more than {self._max_body}", self._max_body)
            parts.append(part)
        return b"".join(parts)

    async def _answer(self, request: Request) -> dict[str, Any]:
        body = await self._body(request)
        policy, greedy, sampling = self._loaded
        try:
            data = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"body: got {body[:80]!r}, expected JSON: {error}") from None
        names = ("observations", "state", "seed")
        if not isinstance(data, dict) or not {"observations"} <= set(data) <= set(names):
            got = sorted(data) if isinstance(data, dict) else type(data).__name__
            raise ValueError(
                f"body: got {got}, expected an object with observations, and maybe state and seed."
            )
        seed = data.get("seed")
        if seed is not None and (type(seed) is not int or not 0 <= seed < 2**63):
            raise ValueError(f"seed: got {seed!r:.80}, expected a whole number from 0 on, or null.")
        step = greedy if seed is None else sampling
        if isinstance(step, str):
            raise ValueError(f"seed: got {seed}, expected null, since {step}")
        given = _read(policy.spec.observations, data["observations"], "observations")
        leaves = tree.flatten(specs.batch("observations", policy.spec.observations, given))
        rows = len(leaves[0])
        if not 0 < rows <= MAX_ROWS:
            raise ValueError(f"observations: got {rows} rows, expected 1 to {MAX_ROWS}.")
        leaves += _states(step, data.get("state"), rows)
        if seed is not None:
            leaves.append(np.random.default_rng(seed).random((rows, step.noise_size), np.float32))
        submit = (self._greedy if seed is None else self._sampled).submit
        futures = [submit((tuple(leaf[row] for leaf in leaves),), {}) for row in range(rows)]
        found = await asyncio.gather(*map(asyncio.wrap_future, futures))
        arrays = [np.stack(each).tolist() for each in zip(*found, strict=True)]
        count = len(arrays) - len(step.initial)
        actions = tree.unflatten_as(policy.spec.actions, arrays[:count]) if arrays[:count] else []
        return {"actions": actions, "state": arrays[count:] or None}

    def _act_greedily(self, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        return self._run(self._loaded.greedy, inputs)

    def _act_by_noise(self, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        step = self._loaded.sampling
        assert isinstance(step, PolicyStep)
        return self._run(step, inputs if step.noise_size else inputs[:-1])

    def _run(self, step: PolicyStep, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        self._counts["batches"] += 1
        self._counts["rows"] += len(inputs[0])
        with self._loaded.policy.settings, torch.inference_mode():
            return tuple(output.numpy() for output in step(*map(torch.from_numpy, inputs)))

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Any) -> AsyncIterator[None]:
        thread = threading.Thread(target=self._follow, name="checkpoints", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._closing.set()
            thread.join(timeout=10.0)

    def _follow(self) -> None:
        """Takes newer checkpoints. Requests go on with the old one meanwhile."""
        checkpoints, seen = self._loaded.policy.folder.checkpointer, self._loaded.policy.checkpoint
        while self._reload_seconds is not None and not self._closing.wait(self._reload_seconds):
            newest = checkpoints.latest()
            if newest is None or newest == seen:
                continue
            try:
                self._loaded = _Loaded.of(self._load())
                seen, self._error = newest, ""
                self._counts["reloads"] += 1
            except (RunError, OSError, ValueError) as error:  # A training may delete it while it is read.
                self._counts["reload_errors"] += 1
                self._error = message_of(error)


class _TooLarge(Exception):
    def __init__(self, got: str, expected: int):
        super().__init__(f"body: got {got} bytes, expected at most {expected}. See --max-body.")


def _read(spec: Nest, value: Any, name: str) -> Nest:
    """Lists of numbers as arrays, in a nest like `spec`."""
    if isinstance(spec, dict):
        if not isinstance(value, dict) or set(value) != set(spec):
            got = sorted(value) if isinstance(value, dict) else f"{value!r:.80}"
            raise ValueError(f"{name}: got {got}, expected an object with {sorted(spec)}.")
        return {key: _read(child, value[key], f"{name}/{key}") for key, child in spec.items()}
    if isinstance(spec, tuple):
        if not isinstance(value, list) or len(value) != len(spec):
            raise ValueError(f"{name}: got {value!r:.80}, expected a list of {len(spec)} parts.")
        return tuple(_read(child, value[index], f"{name}/{index}") for index, child in enumerate(spec))
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name}: got {value!r:.80}, expected lists of numbers, [B, *{tuple(spec.shape)}].")
    if not array.size:  # An array without rows has no dtype either.
        return array.astype(spec.dtype)
    if array.dtype.kind in "iu" and spec.dtype.kind in "iu":  # JSON has one kind of integers.
        low, high = np.iinfo(spec.dtype).min, np.iinfo(spec.dtype).max
        if array.min() < low or array.max() > high:
            raise ValueError(f"{name}: got {array.min()} to {array.max()}, expected {low} to {high}.")
        array = array.astype(spec.dtype)
    return array


def _states(step: PolicyStep, value: Any, rows: int) -> list[np.ndarray]:
    """The arrays of a state; the initial ones for null."""
    if value is None:
        return [np.repeat(leaf, rows, 0) for leaf in step.initial]
    if not step.initial:
        raise ValueError(f"state: got {value!r:.80}, expected null: this policy has no memory.")
    spec = tuple(specs.Array(leaf.shape[1:], leaf.dtype) for leaf in step.initial)
    return list(specs.batch("state", spec, _read(spec, value, "state"), rows))


def _finite(nest: Any) -> Any:
    """`nest` with null in place of what JSON has no number for, such as an infinite bound."""
    if isinstance(nest, dict):
        return {key: _finite(child) for key, child in nest.items()}
    if isinstance(nest, list):
        return [_finite(child) for child in nest]
    return None if isinstance(nest, float) and not np.isfinite(nest) else nest
