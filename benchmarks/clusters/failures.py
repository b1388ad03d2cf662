"""What a program over several hosts does while the network or hosts fail, and its speed there.

```bash
python -m benchmarks.clusters.failures train-ppo cut worker head   # some cases; all of them without names
```

The hosts are namespaces of Linux on this machine (`tests/cluster/hosts.py`; needs root): the learner, replay
and the services in the first, four actors in the others. Each case prints a line of JSON:

- `train-dqn`, `train-ppo`, `train-impala`: the return of the last evaluation, over three hosts.
- `slow`: PPO, with 20 ms of delay each way and 1 % loss between the first host and the others.
- `cut`: a host of actors is cut off for 15 s. `worker`: all its processes are killed, and a fresh one
  joins 20 s later. `power`: the same, but it falls silent. `head`: Ray's head is killed.
- `speed`: env steps/s of IMPALA over three hosts, on engine `processes` on one, and with 20 ms each way.

The exit code is 1 if an agent has not reached its floor.

`gap_s` is the longest time without env steps, `noticed_s` the time until the first node counts as lost,
`back_s` until all are there again, `end_s` until the program has ended, each from the failure on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(_TESTS / "cluster"), str(_TESTS / "helpers")]
from far_run import PATIENCE, Run, flags  # noqa: E402
from hosts import Hosts, join_ray, start_ray  # noqa: E402

FLOORS = {"dqn": (20_000, 150), "ppo": (40_000, 300), "impala": (80_000, 150)}  # Env steps, return.
CUT_S, FRESH_S = 15.0, 20.0


@contextlib.contextmanager
def cluster(count: int = 3, **line: float) -> Iterator[tuple[Hosts, dict[str, str]]]:
    with Hosts(count, **line) as hosts:
        yield hosts, start_ray(hosts)


def train(agent: str, **line: float) -> dict[str, Any]:
    """Trains to the end; `line` is that of `Hosts`."""
    steps, floor = FLOORS[agent]
    with cluster(**line) as (hosts, environment):
        started = time.monotonic()
        run = Run(hosts[0], environment, agent, flags(steps, min_actors=None if agent == "ppo" else 2))
        code = run.wait()
        seconds, rows = time.monotonic() - started, run.rows()
        output = run.end()
    if code:
        raise RuntimeError(output[-4000:])
    learned = max(row["episode_return"] for row in rows if row["label"] == "evaluator")
    return {"return": learned, "floor": floor, "seconds": seconds, **rates(rows)}


def rates(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Env steps/s of the second half of a run."""
    seen = [(row["time/wall_s"], row["env_steps"]) for row in rows if row["label"].startswith("actor")]
    late = [each for each in seen if each[1] >= seen[-1][1] / 2]
    return {"env_steps_per_s": (late[-1][1] - late[0][1]) / max(late[-1][0] - late[0][0], 1e-9)}


def fail(agent: str, failure: Callable[[Run, Hosts, dict[str, str]], dict[str, Any]]) -> dict[str, Any]:
    """Starts a program that goes on for long, and then has something fail."""
    with cluster() as (hosts, environment):
        run = Run(hosts[0], environment, agent, flags(10_000_000))
        try:
            run.until(lambda: run.env_steps() > 5_000, "the start")
            before = run.env_steps()
            return {"before": before, **failure(run, hosts, environment)}
        finally:
            print(run.end()[-3000:], file=sys.stderr)


def progress(run: Run, seconds: float, stop: Callable[[], bool] = lambda: False) -> float:
    """Watches for `seconds`, or until `stop`; returns the longest time without env steps."""
    started = last = time.monotonic()
    steps, gap = run.env_steps(), 0.0
    while time.monotonic() - started < seconds and not run.over() and not stop():
        time.sleep(0.1)
        if (now := run.env_steps()) > steps:
            steps, last = now, time.monotonic()
        gap = max(gap, time.monotonic() - last)
    return gap


def lost(run: Run) -> bool:
    return any(node["restarts"] for node in run.nodes())


def all_there(run: Run) -> bool:
    return all(node["state"] == "running" for node in run.nodes())


def cut(run: Run, hosts: Hosts, environment: dict[str, str]) -> dict[str, Any]:
    hosts.connect(2, on=False)
    gap = progress(run, CUT_S)
    hosts.connect(2, on=True)
    gap = max(gap, progress(run, 30.0))
    restarts = sum(node["restarts"] for node in run.nodes())
    return {"gap_s": gap, "restarts": restarts, "all_there": all_there(run), "after": run.env_steps()}


def power(run: Run, hosts: Hosts, environment: dict[str, str]) -> dict[str, Any]:
    hosts.connect(2, on=False)
    return worker(run, hosts, environment)


def worker(run: Run, hosts: Hosts, environment: dict[str, str]) -> dict[str, Any]:
    started = time.monotonic()
    hosts[2].close()
    gap = progress(run, PATIENCE, stop=lambda: lost(run))
    noticed = time.monotonic() - started
    gap = max(gap, progress(run, FRESH_S))
    join_ray(hosts.add(), environment)  # There was no room for the lost actors elsewhere.
    joined = time.monotonic() - started
    gap = max(gap, progress(run, PATIENCE, stop=lambda: all_there(run)))
    back = time.monotonic() - started
    return {"gap_s": gap, "noticed_s": noticed, "joined_s": joined, "back_s": back}


def head(run: Run, hosts: Hosts, environment: dict[str, str]) -> dict[str, Any]:
    (gcs,) = hosts[0].processes("gcs_server")
    gcs.kill()
    return {"end_s": run.until(run.over, "the end"), "says": run.output().strip().splitlines()[-1]}


def speed() -> dict[str, float]:
    near, far = ("processes",), ("ray",)
    with cluster() as (hosts, environment):
        found = speeds(hosts, environment, (near, far, near, far))
    with cluster(delay=0.02) as (hosts, environment):
        ahead = (*far, "--unrolls-in-flight", "3")
        slow = speeds(hosts, environment, (far, ahead, far, ahead))
    found |= {f"slow {name}": rate for name, rate in slow.items()}
    return found | {
        "ratio": found["ray"] / found["processes"],
        "slow_ratio": found["slow ray"] / found["ray"],
        "slow_ahead_ratio": found["slow ray --unrolls-in-flight 3"] / found["ray"],
    }


def speeds(hosts: Hosts, environment: dict[str, str], runs: tuple[tuple[str, ...], ...]) -> dict[str, float]:
    """The best env steps/s of each kind of run: an engine, and further flags."""
    found: dict[str, float] = {}
    for engine, *more in runs:
        usual = ["--log-period", "1000", *more]
        run = Run(hosts[0], environment, "impala", flags(100_000, engine, min_actors=None) + usual)
        run.wait()
        name = " ".join([engine, *more])
        found[name] = max(found.get(name, 0.0), rates(run.rows())["env_steps_per_s"])
        run.end()
    return found


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "train-dqn": lambda: train("dqn"),
    "train-ppo": lambda: train("ppo"),
    "train-impala": lambda: train("impala"),
    "slow": lambda: train("ppo", delay=0.02, loss=0.01),
    "cut": lambda: fail("impala", cut),
    "worker": lambda: fail("impala", worker),
    "power": lambda: fail("impala", power),
    "head": lambda: fail("impala", head),
    "speed": speed,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    names, code = parser.parse_args().cases or list(CASES), 0
    for name in names:
        started = time.monotonic()
        found = CASES[name]()
        shown = {key: round(value, 2) if isinstance(value, float) else value for key, value in found.items()}
        print(json.dumps({"case": name, **shown, "wall_s": round(time.monotonic() - started)}), flush=True)
        code |= int(found.get("return", 0.0) < found.get("floor", 0.0))
    return code


if __name__ == "__main__":
    sys.exit(main())
