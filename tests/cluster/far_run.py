"""A program of `repertory train` over several hosts, watched from outside through the files of its run."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hosts import Host, RayNode

PATIENCE = 600.0  # Seconds.


class Run:
    """A program of `repertory train` whose launcher is in a host.

    Args:
      host: where it runs.
      environment: of its processes.
      agent: the name of the agent.
      flags: other flags.
    """

    def __init__(
        self, host: Host | RayNode, environment: dict[str, str], agent: str, flags: list[str]
    ) -> None:
        self._host = host
        self.path = Path(tempfile.mkdtemp(prefix=f"hosts-{agent}-")) / "run"
        command = [sys.executable, "-m", "framework.commands", "train", agent, "--directory", str(self.path)]
        with open(self.path.with_name("out"), "w") as out:
            self._process = host.start(
                [*command, *flags], env=environment, stdout=out, stderr=subprocess.STDOUT
            )

    def over(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> int:
        return self._process.wait(PATIENCE)

    def output(self) -> str:
        return self.path.with_name("out").read_text()

    def rows(self) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            lines = (self.path / "metrics.jsonl").read_text().splitlines(keepends=True)
            return [json.loads(line) for line in lines if line.endswith("\n")]
        return []

    def env_steps(self) -> int:
        return max((row.get("env_steps", 0) for row in self.rows() if row["label"] != "evaluator"), default=0)

    def evaluated(self) -> float:
        """The best mean return of an evaluation so far; 0 before the first."""
        return max((row["episode_return"] for row in self.rows() if row["label"] == "evaluator"), default=0.0)

    def nodes(self) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            found: list[dict[str, Any]] = json.loads((self.path / "status.json").read_text())["nodes"]
            return found
        return []

    def until(self, holds: Callable[[], object], what: str) -> float:
        """Waits until something holds, or the program has ended; returns the seconds."""
        started = time.monotonic()
        while not holds() and not self.over():
            if time.monotonic() - started > PATIENCE:
                raise TimeoutError(f"{what} took more than {PATIENCE:g} s:\n{self.output()[-4000:]}")
            time.sleep(0.1)
        return time.monotonic() - started

    def end(self) -> str:
        """Stops the program if it runs; returns what it printed."""
        if not self.over():
            self._host.terminate(self._process)
        self.wait()
        output = self.output()
        shutil.rmtree(self.path.parent)
        return output


def flags(steps: int, engine: str = "ray", min_actors: int | None = 2) -> list[str]:
    """The flags of all cases: four actors of four envs, on the far hosts if the engine is Ray."""
    found = f"""--engine {engine} --environment gymnasium:CartPole-v1 --num-actors 4 --envs-per-actor 4
        --min-actors {min_actors} --max-env-steps {steps} --target-return None --log-period 250
        --learner-log-period 5 --evaluate-period 5000 --num-evaluation-episodes 10
        --seed 1"""
    if engine == "ray":
        near = ("replay", "counter", "monitor", "checkpointer", "learner", "evaluator")
        found += (
            " --variable-sources 2 --resources actor.custom.far=1 variable_source.custom.source=1 "
            + " ".join(f"{at}.custom.host1=0.1" for at in near)
        )
    return found.split()
