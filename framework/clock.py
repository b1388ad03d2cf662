"""What the periods, budgets, schedules, checkpoints, and progress of a program count."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

ENV_STEPS = "env_steps"


@dataclasses.dataclass
class Clock:
    """Counts env steps where a program acts, and learner steps where nothing does.

    Attributes:
      count: name of the count in the program's counter.
    """

    count: str = ENV_STEPS

    @property
    def acts(self) -> bool:
        """Whether it counts env steps."""
        return self.count == ENV_STEPS

    @property
    def budget(self) -> str:
        """The name of the setting that ends the program."""
        return "max_env_steps" if self.acts else "max_learner_steps"

    def limit(self, config: Any) -> int | None:
        """The last step of a program with the settings `config`, a `RunConfig`; None without one."""
        found: int | None = getattr(config, self.budget)
        return found

    def now(self, counts: Mapping[str, int]) -> int:
        """The program's step, by the counts of its counter."""
        return counts.get(self.count, 0)
