"""The options of a run, and the resources of its nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from launch.program import Program
from launch.texts import check_known

STRATEGIES = (None, "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclass(frozen=True)
class Resources:
    """Resources of each node of a group.

    Attributes:
      threads: number of threads for OpenMP, BLAS and torch. More threads make a learner faster and leave less
        time to the actors.
      env: environment variables, e.g. `{"CUDA_VISIBLE_DEVICES": "0"}`. Engines within one process ignore
        them.
      num_cpus: number of cores that a machine must have free, as Ray counts them; only the engine `ray`
        places nodes. None reserves no core (if no other resource is named either, one core must be free when
        Ray places the node).
      num_gpus: number of GPUs that a machine must have free, as Ray counts them.
      custom: Ray's custom resources, by name.
      strategy: how Ray places the group's nodes on machines: `"PACK"` (near each other), `"SPREAD"` (apart
        where possible), `"STRICT_PACK"` (one machine) or `"STRICT_SPREAD"`; None leaves it to Ray. Nodes of
        `"PACK"` and the strict ones start when there is room for all of the group.

    Raises:
      ValueError: A field has an invalid value. The text names it.
    """

    threads: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    num_cpus: float | None = None
    num_gpus: float = 0
    custom: Mapping[str, float] = field(default_factory=dict)
    strategy: str | None = None

    def __post_init__(self) -> None:
        for name, given in (("env", self.env), ("custom", self.custom)):
            if not isinstance(given, Mapping):
                raise ValueError(f"resources: {name}: got {given!r}, expected values by name.")
        amounts = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, **dict(self.custom)}
        for name, amount in amounts.items():
            if isinstance(amount, str) or (amount is not None and not 0 <= amount < math.inf):
                raise ValueError(f"resources: {name}: got {amount!r}, expected a number of at least 0.")
        threads: Any = self.threads
        if isinstance(threads, float) and threads.is_integer():
            object.__setattr__(self, "threads", int(threads))  # A file may give 1e1.
        if not isinstance(self.threads, int) or self.threads < 1:
            raise ValueError(f"resources: threads: got {self.threads!r}, expected a number of at least 1.")
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"resources: strategy: got {self.strategy!r}, expected one of {list(STRATEGIES)}."
            )

    def environment(self) -> dict[str, str]:
        """Returns the environment variables of a node's process."""
        variables = {key: str(value) for key, value in self.env.items()}
        return {"OMP_NUM_THREADS": str(self.threads), **variables}


@dataclass(frozen=True)
class Options:
    """The options of a run; see `launch.launch` for their meaning."""

    resources: Mapping[str, Resources] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    min_nodes: Mapping[str, int] = field(default_factory=dict)
    min_nodes_timeout: float = 300.0
    stop_timeout: float = 10.0
    stop_timeouts: Mapping[str, float] = field(default_factory=dict)
    heartbeat_timeout: float | None = 60.0
    directory: str | None = None
    preload: Sequence[str] | None = None
    files: Sequence[int] = ()  # Descriptors that the processes keep open.
    #: The program's contexts, and on top of them what the engine has made. The job closes it.
    at_end: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def time_to_end(self, group: str) -> float:
        """Returns the seconds that nodes of a group have to return after a stop began, and then to close."""
        return max(self.stop_timeout, self.stop_timeouts.get(group, 0.0))


def make_options(
    program: Program,
    resources: Mapping[str, Resources | Mapping[str, Any]] | None = None,
    min_nodes: Mapping[str, int] | None = None,
    **others: Any,
) -> Options:
    """Returns the options of a launch: the program's, overridden by the arguments of `launch`.

    Raises:
      ValueError: They do not fit the program or each other.
    """
    known = [field.name for field in dataclasses.fields(Resources)]
    for group, given in (resources or {}).items():
        if isinstance(given, Mapping):
            check_known(f"resources[{group!r}]", given, known, "fields of Resources,")
    defaults = {group: {"strategy": strategy} for group, strategy in program.strategies.items()}
    options = Options(
        resources={
            group: dataclasses.replace(given, strategy=given.strategy or program.strategies.get(group))
            if isinstance(given, Resources)
            else Resources(**{**defaults.get(group, {}), **given})
            for group, given in {**defaults, **program.resources, **(resources or {})}.items()
        },
        min_nodes={**program.min_nodes, **(min_nodes or {})},
        stop_timeouts=program.stop_timeouts,
        **others,
    )
    _check(program, options)
    return options


def _check(program: Program, options: Options) -> None:
    """Raises `ValueError` for unknown groups and for numbers out of range."""
    for name in ("resources", "restarts", "min_nodes", "stop_timeouts"):
        check_known(name, getattr(options, name), program.groups, "groups of the program,")
    for group, count in options.restarts.items():
        if count < 0:
            raise ValueError(f"restarts[{group!r}]: got {count}, expected a number >= 0.")
    for group, count in options.min_nodes.items():
        if not 1 <= count <= len(program.groups[group]):
            raise ValueError(
                f"min_nodes[{group!r}]: got {count}, expected 1 to {len(program.groups[group])}, the number "
                "of its nodes."
            )
        strategy = options.resources.get(group, Resources()).strategy
        if strategy not in (None, "SPREAD"):
            raise ValueError(
                f"resources[{group!r}]: got strategy {strategy!r} for a group with min_nodes, expected "
                "SPREAD or None. Nodes with another strategy start together or not at all."
            )
    if options.min_nodes_timeout <= 0:
        raise ValueError(f"min_nodes_timeout: got {options.min_nodes_timeout}, expected seconds > 0.")
    if options.stop_timeout < 0:
        raise ValueError(f"stop_timeout: got {options.stop_timeout}, expected seconds >= 0.")
    if options.heartbeat_timeout is not None and options.heartbeat_timeout <= 0:
        raise ValueError(f"heartbeat_timeout: got {options.heartbeat_timeout}, expected seconds > 0 or None.")
