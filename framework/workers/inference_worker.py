"""The inference node of a program: an inference server with parameters, metrics and checkpoints."""

from __future__ import annotations

from typing import Any

import launch
from framework.actors.inference_server import InferenceServer
from framework.devices import check_visible
from framework.own_settings import seeded
from framework.runs.stopwatch import Stopwatch
from framework.variables import VariableClient
from framework.workers.worker import Setup, next_seed, prepare_process


class InferenceWorker(InferenceServer):
    """Owns and updates the parameters for acting, and logs the sizes of its batches.

    Args:
      setup: makes the networks and the policy. With a `max_policy_lag`, the actors request newer parameters,
        and `update_period` has no effect.
      learner: the variable source. None for an agent without parameters.
      monitor: takes the rows of metrics.
      checkpointer: keeps the counts of the rows. None keeps nothing.
      name: label of its rows.
      seed: seed of the policy's random choices; see `next_seed`.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        learner: Any,
        monitor: Any,
        checkpointer: Any = None,
        name: str = "inference",
        seed: int = 0,
    ):
        prepare_process(seed)
        agent, spec, config = setup.agent, setup.spec, setup.config
        device = check_visible("inference_device", config.inference_device)
        with seeded(seed):
            networks = agent.make_networks(spec)
            if hasattr(networks, "to"):  # A nest of arrays has one place only.
                networks.to(device)
        policy = agent.make_policy(networks)
        variables = None
        if learner is not None:
            variables = VariableClient(learner, networks, policy, config.update_period)
        super().__init__(
            policy,
            spec,
            config.num_envs // config.inference_nodes,
            variables=variables,
            updates=agent.max_policy_lag is None,
            max_batch=config.inference_max_batch,
            timeout=config.inference_timeout,
            concurrent=launch.get_node_context().engine != "serial",
            shared_memory=launch.shared_memory_directory() is not None,
            on_batch=self._count,
            on_failure=launch.make_failure_handler(),
        )
        self._monitor, self._checkpointer, self._name = monitor, checkpointer, name
        self._log_period = config.log_period
        self._rows = self._batches = 0
        self._is_kept = False  # Whether a state of this life was kept.
        state = checkpointer.get(name) if checkpointer is not None else None
        if state is not None:
            self._rows, self._batches = int(state["steps"]), int(state["batches"])
        policy.seed(next_seed(seed, state))  # An actor with its own policy does the same.
        self._logged = (self._rows, self._batches, Stopwatch())
        launch.register_stop_handler(self.stop_waiting)

    def close(self) -> None:
        """Saves the state for the last checkpoint and closes the server."""
        super().close()
        self._log()

    def _count(self, rows: int) -> None:
        self._rows += rows
        self._batches += 1
        if self._rows - self._logged[0] >= self._log_period:
            self._log()
        elif not self._is_kept:  # A `Report` keeps the first step, too.
            self._keep()

    def _keep(self) -> None:
        self._is_kept = True
        if self._checkpointer is not None:
            self._checkpointer.put(self._name, {"steps": self._rows, "batches": self._batches})

    def _log(self) -> None:
        self._keep()
        if self._rows == self._logged[0]:
            return
        rows, batches = self._rows - self._logged[0], self._batches - self._logged[1]
        row = {
            "steps": self._rows,
            "rows_per_batch": rows / batches,
            "variables_version": self.version,
            "time/batches_per_s": batches / max(self._logged[2].seconds(), 1e-9),
            "time/acting_s": self.take_seconds(),
        }
        self._logged = (self._rows, self._batches, Stopwatch())
        self._monitor.write(self._name, row)
