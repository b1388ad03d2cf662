"""What the tests of agents share: whole programs that train for some steps in one thread."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

import launch
from framework.programs import RunConfig, make_program


class Trained(NamedTuple):
    """How a run ended.

    Attributes:
      result: what the program returned: ``episode_return`` is the greedy mean, ``learner_steps`` …
      rows: the learner's rows of metrics, in order.
    """

    result: dict[str, Any]
    rows: list[dict[str, Any]]


@pytest.fixture
def train():
    """``train(agent, environment, steps, **settings of make_program)`` to ``Trained``, on engine serial."""

    def trains(agent: Any, environment: Any, steps: int, **changes: Any) -> Trained:
        rows: list[dict[str, Any]] = []

        def keep(snapshot: dict[str, Any]) -> None:
            row = snapshot["labels"].get("learner")
            if row and (not rows or rows[-1]["steps"] != row["steps"]):
                rows.append(row)

        settings = {"num_actors": 2, "envs_per_actor": 4, "max_env_steps": steps, "evaluate_period": steps}
        settings |= {"num_evaluation_episodes": 100, "learner_log_period": 50}
        settings |= {"publish_period": 1, "update_period": 1, **changes}
        program = make_program(agent, environment, RunConfig(**settings), on_write=keep)
        result = launch.launch(program, engine="serial")
        assert result["reason"] in ("max_env_steps", "target_return")
        return Trained(result, rows)

    return trains
