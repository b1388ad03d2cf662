"""The worker of a variable-source node, which serves the parameters of a learner in place of the learner.

```text
learner   |publish 10|     |publish 20|     |publish 30|
source         |pull 10|        |pull 20|        |pull 30|          one copy of each version
actors            read, read, …    read, read, …    read, read, …   from the source, in shared memory
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import launch
from framework.own_settings import seeded
from framework.parameters import NamedArrays
from framework.variables import VariableBlock, Variables, shared_path
from framework.workers.worker import ProgramWorker, Setup, prepare_process

_WAIT_S = 0.5  # Wait for a version of the parameters, between two checks for a stop of the program.


class VariableSource(ProgramWorker):
    """Serves the parameters of a learner to actors and evaluators.

    If the learner's shared memory can be mapped here, the source and its clients on this machine read that;
    not on Ray, where the learner may come back on another machine. Otherwise one `step()` pulls the next
    version of the parameters that policies name, and clients on this machine map the source's copy. Clients
    that can map neither ask for a copy by message.

    Args:
      setup: makes the networks and the policies, which name the parameters that acting needs.
      learner: a client of the learner's node.
      seed: seed of this worker.
    """

    def __init__(self, setup: Setup, *, learner: Any, seed: int = 0):
        prepare_process(seed)
        self._learner = learner
        self._host = launch.get_node_context().host
        block = None if launch.get_node_context().engine == "ray" else learner.variable_block()
        self._pulls = block is None
        self._finished = not self._pulls
        with seeded(seed):
            self._block: VariableBlock = block or VariableBlock(_acting_parameters(setup), shared_path())

    def host(self) -> str:
        """The machine of this source; see `launch.ProgramNodeContext.host`."""
        return self._host

    def variable_block(self) -> VariableBlock:
        """The newest parameters. A client that cannot map this machine's shared memory gets None."""
        return self._block

    def get_variables(
        self, names: Sequence[str] = (), newer_than: int = -1, timeout: float = 0.0
    ) -> Variables | None:
        """See `LearnerWorker.get_variables`.

        Raises:
          KeyError: No policy of the agent needs a variable of `names`, so the source does not have it.
        """
        return self._block.get_variables(names, newer_than, timeout if self._pulls else 0.0)

    def join(self, actor: str, life: str) -> int:
        """See `LearnerWorker.join`."""
        return self._learner.join(actor, life)

    def wait_for_version(
        self, version: int, timeout: float, actor: str | None = None, *reported: Any
    ) -> bool:
        """See `LearnerWorker.wait_for_version`, which needs to know which actors wait."""
        if not self._learner.wait_for_version(version, timeout, actor, *reported):
            return False
        return self._block.wait_for(version, timeout if self._pulls else 0.0)

    def is_learning(self) -> bool:
        """See `LearnerWorker.is_learning`."""
        return self._learner.is_learning()

    def run(self) -> None:
        """Pulls every version until the program is stopped."""
        super().run()
        launch.wait_for_stop()

    def step(self) -> None:
        """Waits half a second for the next version, and publishes it."""
        names = tuple(self._block.names)
        variables = self._learner.get_variables(names, self._block.version, _WAIT_S)
        if variables is not None:
            self._block.publish(variables.version, variables.values, variables.env_steps)


def _acting_parameters(setup: Setup) -> dict[str, Any]:
    """The parameters that the policies of the agent name."""
    networks = setup.agent.make_networks(setup.spec)
    acting, greedy = (setup.agent.make_policy(networks, evaluation).variables for evaluation in (False, True))
    return NamedArrays(networks, acting).arrays | NamedArrays(networks, greedy).arrays
