"""Writes the policy of a run as a file that acts without Repertory."""

from __future__ import annotations

import io
import json
import logging
import os
import pathlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from framework.commands.curves import kept_rows
from framework.config_checks import RaisedAs
from framework.export import standalone
from framework.export.steps import PolicyStep
from framework.own_settings import OwnSettings
from framework.programs.loading import LoadedPolicy
from framework.runs import config_file, recorded_specs

SUFFIXES = {"torch": ".pt2", "onnx": ".onnx", "saved_model": ""}


def export(
    policy: LoadedPolicy, path: str | os.PathLike[str], *, format: str = "torch", greedy: bool = True
) -> pathlib.Path:
    """Writes a policy as one file, and beside it a `.py` that acts with it without Repertory.

    ```python
    export(load_policy("runs/cartpole"), "policy.onnx", format="onnx")
    action = load("policy.onnx")(observation)
    ```

    The file takes the observations of the environment, `[B, ...]` for any B, with the normalization, action
    masks and conversions inside, and gives actions of the environment. `PolicyStep` describes its inputs and
    outputs.

    Args:
      policy: the policy of a run.
      path: the file; in a folder that exists, `policy.pt2` or `policy.onnx`.
      format: "torch" (`torch.export`), "onnx", or for an agent on Keras with TensorFlow "saved_model", which
        is a folder without a `.py` (in a folder that exists, `policy`); see `framework.backends.saved_model`.
      greedy: whether it acts as evaluations do. Otherwise it explores, with noise as an input.

    Returns:
      The path of the file.

    Raises:
      ValueError: The format is unknown, the policy does not act with torch, torch cannot export it, or a
        SavedModel is to explore.
      ImportError: The packages of the extra `export` are missing.
      FileExistsError: The place of the `.py` has another file.
    """
    if format not in SUFFIXES:
        raise ValueError(f"format: got {format!r}, expected {' or '.join(SUFFIXES)}.")
    if format == "onnx":
        try:
            import onnx  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"format onnx needs the package {error.name}, which is not installed: "
                "pip install 'repertory[export]'"
            ) from error
    file = pathlib.Path(path)
    is_parent = file.is_dir() and not (file / "saved_model.pb").exists()
    file = file / f"policy{SUFFIXES[format]}" if is_parent else file
    if format == "saved_model":
        if not greedy:
            raise ValueError("greedy: got False, expected True: a SavedModel acts as evaluations do.")
        from framework.backends import saved_model

        saved_model.save(policy, file, json.dumps({**about(policy), "greedy": True}))
        return file
    source, beside = pathlib.Path(standalone.__file__).read_text(encoding="utf-8"), file.with_suffix(".py")
    if beside.exists() and beside.read_text(encoding="utf-8").partition("\n")[0] != source.partition("\n")[0]:
        raise FileExistsError(f"{beside} is another file, and would be replaced. Give another path.")
    with OwnSettings(), torch.no_grad(), _quiet():
        step = PolicyStep(policy, greedy)
        text = json.dumps(describe(policy, step, greedy))
        example = tuple(step.example(3))
        # One row works, too. A network may take a shortcut for it, which the file lacks.
        batch = torch.export.Dim("batch", min=2)
        shapes = (tuple({0: batch} for _ in example),)
        what = f"{type(policy.agent).__name__} cannot be exported to {format}: "
        with RaisedAs(ValueError, Exception, what, " Its act() should use operations of tensors only."):
            program = torch.export.export(step, example, dynamic_shapes=shapes, strict=False)
            data = _torch_data(program, text) if format == "torch" else _onnx_data(program, step, text)
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.new")
    new.write_bytes(data)
    os.replace(new, file)
    config_file.replace(beside, source)
    return file


def about(policy: LoadedPolicy) -> dict[str, Any]:
    """What is known about a policy, as JSON holds it."""
    folder = policy.folder
    recorded = config_file.read(folder.path / "config.yaml")[config_file.RECORDED]
    return {
        "agent": folder.agent,
        "environment": folder.environment_name,
        "step": policy.step,
        "checkpoint": policy.checkpoint.name,
        "commit": recorded["git_commit"],
        "versions": recorded["versions"],
        "return": mean_return(policy),
        **{name: recorded_specs.recorded(policy.spec)[name] for name in ("observations", "actions")},
    }


def describe(policy: LoadedPolicy, step: PolicyStep, greedy: bool) -> dict[str, Any]:
    """The same, with its inputs and its outputs."""
    inputs, outputs = step.names
    return {
        **about(policy),
        "greedy": greedy,
        "inputs": inputs,
        "outputs": outputs,
        "state": [{"initial": each[0].tolist(), "dtype": each.dtype.name} for each in step.initial],
        "noise": step.noise_size,
    }


def mean_return(policy: LoadedPolicy) -> float | None:
    """The mean return of the run's newest evaluation at or before the policy's step; None without one."""
    returns = [
        row["episode_return"]
        for row in kept_rows(policy.folder)
        if row.get("label") == "evaluator"
        and "episode_return" in row
        and row.get("env_steps", row.get("learner_steps", 0)) <= policy.step
    ]
    return float(returns[-1]) if returns else None


def _torch_data(program: Any, text: str) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={"repertory.json": text})
    return buffer.getvalue()


def _onnx_data(program: Any, step: PolicyStep, text: str) -> bytes:
    inputs, outputs = step.names
    made = torch.onnx.export(program, dynamo=True, verbose=False, input_names=inputs, output_names=outputs)
    assert made is not None
    made.model.metadata_props["repertory"] = text
    return made.model_proto.SerializeToString()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporters say about operators of other packages."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
