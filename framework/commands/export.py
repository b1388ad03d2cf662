"""`repertory export`: writes the policy of a run as a file that acts without Repertory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from framework import config_checks
from framework.commands.options import Allow, Checkpoint, CommandError, Run, UsageError, parse
from framework.export.writing import SUFFIXES, export
from framework.programs.loading import load_policy


@dataclass(frozen=True)
class ExportOptions:
    """Writes the policy of a run as one file, for programs without Repertory.

    repertory export runs/cartpole --format onnx
    """

    run: Run  # Folder of the run.
    # torch (torch.export); onnx, which acts with onnxruntime and needs neither torch nor Repertory; or
    # saved_model, for agents on Keras with TensorFlow.
    format: Annotated[str, tyro.conf.arg(metavar="torch|onnx|saved_model")] = "torch"
    output: str | None = None  # The file; by default policy.pt2, policy.onnx or policy in the run's folder.
    greedy: bool = True  # Whether it acts as evaluations do; otherwise it samples, with noise as an input.
    checkpoint: Checkpoint = "latest"  # latest, best (as evaluated during the run), previous, or a step.
    allow: Allow = ()  # A module whose objects the run may name. Give it once for each module.


def main(arguments: Sequence[str]) -> int:
    options = parse(ExportOptions, arguments, prog="repertory export")
    with config_checks.RaisedAs(UsageError, ValueError, "--"):
        config_checks.one_of(options, SUFFIXES, "format")
    policy = load_policy(options.run, options.checkpoint, options.allow)
    with config_checks.RaisedAs(CommandError, (ValueError, ImportError, FileExistsError)):
        path = export(
            policy, Path(options.output or options.run), format=options.format, greedy=options.greedy
        )
    acts = "tf.saved_model.load" if path.is_dir() else path.with_suffix(".py").name
    print(f"Wrote the policy of step {policy.step:,} to {path}; {acts} acts with it.")
    return 0
