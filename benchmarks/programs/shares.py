"""Where the CPU time of a training program goes: environment, inference, learner, and what is ours.

    python -m benchmarks.programs.shares [ROW …] [--seconds 5] [--envs 64] [--stepping inline] [--detail]

Runs presets on the serial engine, so that everything is one thread, and counts that thread's CPU seconds.
Other load on the machine does not count as ours then, but makes every CPU second do less: shares are right,
microseconds only on a quiet machine. What is timed is the environment's own ``step``, the networks' forward
pass when acting, and the learner's step; the framework is everything else: loops, checks, drawing actions,
adders, replay, datasets, counters, parameters. The hot path of the framework is its microseconds per
env step, ``ppo-64`` being the row with 64 envs of CartPole in one actor. ``--detail`` divides it
further. Timing a call costs 0.5 to 1 us, which counts as the framework's: noticeable where envs are stepped
one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import pathlib
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ENVIRONMENT, INFERENCE, LEARNER = "environment", "inference", "learner"


class Sections:
    """CPU seconds of calls by the name of their section, each without the sections that it calls."""

    def __init__(self) -> None:
        self._clock = time.thread_time
        self._stack: list[str] = []
        self._since = 0.0
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    def start(self) -> None:
        """Begins again; the time outside of all sections goes to ``""``."""
        self.seconds.clear()
        self.calls.clear()
        self._since = self._clock()

    def stop(self) -> None:
        """Counts up to now; sections that are still open lose nothing."""
        self._turn()

    def _turn(self) -> None:
        now = self._clock()
        self.seconds[self._stack[-1] if self._stack else ""] += now - self._since
        self._since = now

    def timed(self, name: str, call: Callable[..., Any], inside: str | None = None) -> Callable[..., Any]:
        """``call`` as part of the section ``name``; with ``inside``, only when that section calls it."""

        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if inside is not None and self._stack[-1:] != [inside]:
                return call(*args, **kwargs)
            self._turn()
            self._stack.append(name)
            try:
                return call(*args, **kwargs)
            finally:
                self._turn()
                self._stack.pop()
                self.calls[name] += 1

        return wrapper

    def method(self, owner: type, method: str, name: str, inside: str | None = None) -> None:
        """Times a method of a class, for all of its objects."""
        setattr(owner, method, self.timed(name, getattr(owner, method), inside))

    def environment(self, owner: type) -> None:
        """Times ``step`` and ``reset`` of the environment that each new object of ``owner`` wraps."""
        make = owner.__init__

        @functools.wraps(make)
        def wrapped(instance: Any, environment: Any, *args: Any, **kwargs: Any) -> None:
            for method in ("step", "reset"):
                setattr(environment, method, self.timed(ENVIRONMENT, getattr(environment, method)))
            make(instance, environment, *args, **kwargs)

        owner.__init__ = wrapped  # type: ignore[misc]


@dataclass(frozen=True)
class Row:
    """A preset, with differences."""

    agent: str
    environment: str = "gymnasium:CartPole-v1"
    config: dict[str, Any] = field(default_factory=dict)
    program: dict[str, Any] = field(default_factory=dict)


ROWS = {
    "dqn": Row("dqn"),
    "ppo": Row("ppo"),
    "impala": Row("impala"),
    "sac": Row("sac", "gymnasium:Pendulum-v1"),
    "impala-pong": Row("impala", "atari:Pong"),
    "ppo-64": Row("ppo", config={"unroll_length": 64}, program={"envs_per_actor": 64}),
}


def instrument(sections: Sections) -> None:
    """Puts clocks around the methods that sections are made of."""
    import agents.dqn
    import agents.impala
    import agents.ppo
    import agents.sac
    from framework import core, networks
    from framework.actors import EnvironmentLoop, PolicyActor
    from framework.adders import BlockAdder
    from framework.datasets import Dataset
    from framework.environments.single import DmEnvAdapter, GymnasiumAdapter
    from framework.environments.stepping import InlineEnvironment, VectorEnvironment
    from framework.learners import MinibatchLearner, SGDLearner
    from framework.variables import VariableClient
    from framework.workers.actor_worker import ActorWorker
    from framework.workers.learner_worker import LearnerWorker

    for env in (GymnasiumAdapter, DmEnvAdapter):
        sections.environment(env)
    make = VectorEnvironment.__init__

    def make_vector(instance: Any, name: str, environment: Any, seed: Any) -> None:
        for method in ("step", "reset"):
            setattr(environment, method, sections.timed(ENVIRONMENT, getattr(environment, method)))
        make(instance, name, environment, seed)

    VectorEnvironment.__init__ = make_vector  # type: ignore[method-assign]
    for owner in (InlineEnvironment, VectorEnvironment):
        sections.method(owner, "step", "environment's wrapper")
    # The networks' own part of acting: what a policy does around it is ours.
    policy = "policy around its networks"
    sections.method(agents.ppo.PPONetworks, "act", INFERENCE, policy)
    sections.method(agents.impala.ActorCritic, "step", INFERENCE, policy)
    sections.method(networks.QNetwork, "forward", INFERENCE, policy)
    sections.method(networks.PolicyNetwork, "forward", INFERENCE, policy)
    for module in (agents.dqn, agents.ppo, agents.impala, agents.sac):
        for value in list(vars(module).values()):
            if isinstance(value, type) and issubclass(value, core.Policy) and value is not core.Policy:
                sections.method(value, "step", policy)
    for learner in (SGDLearner, MinibatchLearner):
        sections.method(learner, "step", LEARNER)
    sections.method(PolicyActor, "select_action", "actor")
    sections.method(PolicyActor, "observe", "actor")
    sections.method(BlockAdder, "add", "adder")
    sections.method(VariableClient, "update", "parameters")
    sections.method(Dataset, "__next__", "sampling")
    sections.method(Dataset, "update_priorities", "sampling")
    sections.method(Dataset, "ready", "rate limiter")
    sections.method(ActorWorker, "ready", "rate limiter")
    sections.method(EnvironmentLoop, "step", "environment loop")
    sections.method(ActorWorker, "step", "actor's worker")
    sections.method(LearnerWorker, "step", "learner's worker")


def measure(row: Row, sections: Sections, options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds per env step by section."""
    import launch
    from framework.programs import Preset, RunConfig, make_agent, make_program
    from framework.runs.presets import presets_of

    preset = presets_of(type(make_agent(row.agent))).get(row.environment, Preset())
    kinds = {"num_actors", "envs_per_actor", "publish_period", "stepping"}
    run = {key: value for key, value in preset.run.items() if key in kinds}
    run = {"stepping": options.stepping, **run, **row.program}
    if options.envs:
        run["envs_per_actor"] = options.envs
    agent = make_agent(row.agent, **{**preset.agent, **row.config})
    program = make_program(agent, row.environment, RunConfig(evaluate_period=None, log_period=10**9, **run))
    with launch.start(program, "serial") as job:
        counts = {}
        for seconds in (options.warm_up, options.seconds):
            before = job.client("counter").get_counts().get("env_steps", 0) if counts else 0
            sections.start()
            with contextlib.suppress(TimeoutError):
                job.wait(timeout=seconds)
            sections.stop()
            counts = job.client("counter").get_counts()
        steps = counts["env_steps"] - before
        job.stop()
    return {
        "steps": steps,
        "envs": run.get("envs_per_actor", 1),
        "microseconds": {name: 1e6 * value / steps for name, value in sections.seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds that are not counted")
    parser.add_argument("--envs", type=int, help="of the actor; the preset's by default")
    parser.add_argument("--stepping", default="auto", help="auto, inline, vector")
    parser.add_argument("--detail", action="store_true", help="where the framework's microseconds go")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    unknown = sorted(set(options.rows) - set(ROWS))
    if unknown:
        parser.error(f"no row {unknown}; the rows are {list(ROWS)}")

    import torch

    torch.set_num_threads(1)
    sections = Sections()
    instrument(sections)
    named = (ENVIRONMENT, INFERENCE, LEARNER)
    results = {}
    titles = ("row", "envs", "us per step", *named, "framework", "framework, us per step")
    print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|", flush=True)
    for name in options.rows or ROWS:
        result = results[name] = measure(ROWS[name], sections, options)
        parts = result["microseconds"]
        total = sum(parts.values())
        framework = total - sum(parts.get(part, 0.0) for part in named)
        shares = " | ".join(f"{parts.get(part, 0.0) / total:.0%}" for part in named)
        cells = (
            name,
            result["envs"],
            f"{total:.1f}",
            shares,
            f"{framework / total:.0%}",
            f"{framework:.1f}",
        )
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        if options.detail:
            for part, value in sorted(parts.items(), key=lambda entry: -entry[1]):
                print(f"    {part or 'engine and the rest':32} {value:8.2f} us", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
