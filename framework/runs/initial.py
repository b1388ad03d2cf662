"""The parameters with which the learners of a run begin: another run's, if `RunConfig.init` names one."""

from __future__ import annotations

import logging
import os
from typing import Any

from framework import specs
from framework.checkpoints import CheckpointError, CheckpointReader
from framework.config_checks import RaisedAs
from framework.parameters import as_array, load_state, state_of
from framework.runs import recorded_specs
from framework.runs.run_folder import RunError, RunFolder

_MOST_NAMED = 20  # Parameters in one error.
_LOG = logging.getLogger(__name__)


def check_spec(init: str, spec: specs.EnvironmentSpec) -> None:
    """Raises ValueError if the run in `init` was trained with other observations or actions than `spec`'s."""
    folder, _, _ = _open(init)
    if changed := recorded_specs.changed(folder.environment_spec, recorded_specs.recorded(spec)):
        raise ValueError(
            f"init: got a run in {folder.environment_name} with other specs: {changed}. Give a run in an "
            "environment with the same specs."
        )


def load(init: str, networks: Any, learner: str = "learner") -> None:
    """Copies parameters and statistics of another run into `networks`, before a learner is made of them.

    Args:
      init: `RUN[:CHECKPOINT]`, as `RunConfig.init`.
      networks: a torch module on the CPU, or a nest of arrays.
      learner: name of the learner.

    Raises:
      ValueError: The run cannot be read, or does not fit. The text names the parameters that do not.
    """
    _, reader, best = _open(init)
    best = best and learner == "learner"
    with RaisedAs(ValueError, CheckpointError, "init: "):
        saved = {"networks": reader.state("best", "networks")} if best else reader.state(learner, "learner")
    found = _networks_in(saved)
    expected = state_of(networks)
    # An evaluator keeps what acts. Counts of several policies are not a learner's.
    new = [name for name in expected if name not in found]
    wrong = [f"{name}: got none" for name in new if not best and as_array(expected[name]).dtype.kind == "f"]
    for name, value in found.items():
        got, own = [*value.shape], [*expected[name].shape] if name in expected else None
        if got != own:
            wrong.append(f"{name}: got shape {got}, expected {'no such parameter' if own is None else own}")
    if wrong or not found:
        more = f"; and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
        raise ValueError(
            f"init: got {reader.path}, which does not fit this agent: "
            f"{'; '.join(wrong[:_MOST_NAMED]) or 'no parameters'}{more}. Give the agent the networks of that "
            "run, or choose another run."
        )
    load_state(networks, found)
    if best and new:
        _LOG.warning("init: %s keeps what acts; new parameters: %s.", reader.path, ", ".join(new))


def _open(init: str) -> tuple[RunFolder, CheckpointReader, bool]:
    """The run, its checkpoint, and whether the parameters of the best evaluation are meant."""
    run, _, which = init.rpartition(":")
    if not run or "/" in which or os.path.exists(init):
        run, which = init, "latest"
    with RaisedAs(ValueError, RunError, "init: "):
        folder = RunFolder.open(run)
        return folder, folder.restore("latest" if which == "best" else which), which == "best"


def _networks_in(state: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The entries of the networks in what a learner saved; of each policy, if it learns several."""
    if "networks" in state:
        return {f"{prefix}{name}": value for name, value in state["networks"].items()}
    found: dict[str, Any] = {}
    for name, part in state.items():
        if isinstance(part, dict):
            found |= _networks_in(part, f"{prefix}{name}.")
    return found
