"""What the services of a program carry, and how many of them a number of actors needs.

    python -m benchmarks.clusters.scaling                                 # all parts
    python -m benchmarks.clusters.scaling --only services --shape atari --far
    python -m benchmarks.clusters.scaling --only check --actors 256

``services`` loads one service at a time from 4 processes, as fast as they can, and at 400 calls a second. It
prints the CPU time of a call in the service's process, the calls a second that one core carries at that
price, and the bytes of arrays. ``--far`` reaches the services as from another machine: TCP, encryption, and
arrays in messages. ``needed`` measures the same, and prints how many processes of each service 100, 1,000
and 10,000 actors need. ``check`` predicts what 256 dummy actors cost each service, from measurements of one
call at a time, then runs them and prints both.

All figures are of CPU time, because the machine may be busy with other work. A service pays less for a
call when more calls wait for it, so a price has its rate.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import threading
from collections.abc import Mapping

from benchmarks.clusters import services as measured
from benchmarks.clusters.services import BATCH, CALLS, SHAPES, Services, Shape

MAX_DELAY = 0.05  # Seconds that an adder stages steps at most.
GRANT = 64  # Batched steps of a grant, after the first ones of a run.
LINK = 1.25e9  # Bytes per second of a host's network: 10 Gbit.
HEADROOM = 0.7  # Share of a core, or of the network, that a service may use.


@dataclasses.dataclass(frozen=True)
class Workload:
    """What actors and the learner ask of the services."""

    actors: int
    shape: Shape
    envs: int  # Per actor.
    rate: float  # Batched steps of an actor per second.
    batches: float = 20.0  # Batches that the learner draws per second.
    versions: float = 2.0  # Versions of the parameters per second.
    update_period: int = 10  # As in `RunConfig`.
    log_period: int = 1000  # As in `RunConfig`.
    grant: int = GRANT  # Batched steps of a grant.
    is_served: bool = False  # Whether inference nodes act.
    actors_per_host: int = 1  # More than 1: a variable source on each host asks in place of its actors.

    @property
    def rows_per_insert(self) -> float:
        """Env steps in one message of an adder."""
        return self.envs * max(1.0, self.rate * MAX_DELAY)


def calls_per_second(load: Workload) -> dict[str, float]:
    """Calls of each kind of `CALLS` per second, of all actors and the learner."""
    steps = load.actors * load.rate  # Batched.
    looks = steps / load.update_period
    copies = min(looks, load.actors * load.versions)
    if load.actors_per_host > 1:
        looks = copies = math.ceil(load.actors / load.actors_per_host) * load.versions
    reports = steps * load.envs / load.log_period  # Each is a row, and a call of the counter.
    return {
        "grant": steps / load.grant + reports,
        "row": reports,
        "look": 0.0 if load.is_served else looks - copies,
        "copy": 0.0 if load.is_served else copies,
        "insert": steps * load.envs / load.rows_per_insert,
        "sample": load.batches,
        "act": steps if load.is_served else 0.0,
    }


def bytes_per_call(load: Workload) -> dict[str, float]:
    """Bytes of arrays in a call of each kind, from another machine. Of a stack of frames one is sent."""
    observation = load.shape.observation
    size = observation.dtype.itemsize * math.prod(observation.shape)
    action = load.shape.action.dtype.itemsize * math.prod(load.shape.action.shape)
    frames = observation.shape[0] if isinstance(observation, measured.specs.StackedBoundedArray) else 1
    return {
        "grant": 0.0,
        "row": 0.0,
        "look": 0.0,
        "copy": 4.0 * load.shape.parameters,
        "insert": load.rows_per_insert * (size / frames + action + 8),
        "sample": BATCH * (2.0 * size + action + 8),
        "act": load.envs * float(size + action),
    }


def processes_needed(load: Workload, costs: Mapping[str, float]) -> dict[str, int]:
    """Processes of each service, none of which uses more than `HEADROOM` of a core or of the network.

    Args:
      load: the workload.
      costs: CPU seconds of each kind of call; "insert" is that of a message of one row and "insert row" that
        of each further one. The same for "act".
    """
    rates, sizes = calls_per_second(load), bytes_per_call(load)
    cores: dict[str, float] = dict.fromkeys((service for service, _ in CALLS.values()), 0.0)
    moved = dict(cores)
    rows = {"insert": load.rows_per_insert, "act": load.envs}
    for name, (service, _) in CALLS.items():
        cost = costs[name] + costs.get(f"{name} row", 0.0) * (rows.get(name, 1.0) - 1.0)
        cores[service] += rates[name] * cost
        moved[service] += rates[name] * sizes[name]
    return {
        service: math.ceil(max(cores[service] / HEADROOM, moved[service] / (HEADROOM * LINK)))
        for service in cores
    }


# An actor that fills a core: 400 env steps per second of Pong, 2,000 of HalfCheetah.
TYPICAL = {"atari": {"envs": 8, "rate": 50.0}, "mujoco": {"envs": 8, "rate": 250.0}}

ACTING = {
    "local": {},
    "local, a source on each host of 64": {"actors_per_host": 64},
    "nodes": {"is_served": True},
}


def services(shape: str, far: bool) -> dict[str, float]:
    """Prints what each service carries; returns the CPU seconds of each kind of call at full load."""
    costs: dict[str, float] = {}
    print(f"\n{shape}, {'from another machine' if far else 'on one machine'}\n")
    print("| service | call | CPU µs, at 400/s | CPU µs, at full load | calls/s of a core | MB/s of a core |")
    print("|---" * 6 + "|")
    with Services(SHAPES[shape], far) as running:
        for name, (service, _) in CALLS.items():
            for envs in (1, 16) if name in ("insert", "act") else (1,):
                slow = running.measure(name, envs, 0.5, 400.0 if name != "copy" else 20.0)
                cost = running.measure(name, envs, 0.7)
                if envs == 1:
                    costs[name] = cost.service
                else:
                    costs[f"{name} row"] = max(0.0, cost.service - costs[name]) / (envs - 1)
                size = bytes_per_call(Workload(1, SHAPES[shape], envs, 1.0))[name] if far else 0.0
                label = f"{name}, {envs} envs" if name in ("insert", "act") else name
                carried = f"{size / cost.service / 1e6:,.0f}" if size else ""
                print(
                    f"| {service} | {label} | {1e6 * slow.service:,.0f} | {1e6 * cost.service:,.0f} "
                    f"| {1 / cost.service:,.0f} | {carried} |",
                    flush=True,
                )
    return costs


def needed(shape: str, costs: Mapping[str, float]) -> None:
    """Prints how many processes of each service actors need."""
    print(
        f"\n{shape}: {TYPICAL[shape]['envs']} envs and {TYPICAL[shape]['rate']:g} batched steps/s an actor\n"
    )
    kinds = list(dict.fromkeys(service for service, _ in CALLS.values()))
    print(f"| actors | acting | env steps/s | replay MB/s | {' | '.join(kinds)} |")
    print("|---" * (4 + len(kinds)) + "|")
    for actors in (100, 1_000, 10_000):
        for acting, given in ACTING.items():
            load = Workload(actors, SHAPES[shape], **TYPICAL[shape], **given)
            number = processes_needed(load, costs)
            moved = calls_per_second(load)["insert"] * bytes_per_call(load)["insert"] / 1e6
            cells = " | ".join(f"{number[kind]:,}" for kind in kinds)
            print(
                f"| {actors:,} | {acting} | {actors * load.rate * load.envs:,.0f} | {moved:,.0f} | {cells} |"
            )


# In the check, versions per second; and threads of each load, of which each calls less often than an actor.
_VERSIONS = {"atari": 0.125, "mujoco": 1.0}
_CALLERS = dict.fromkeys(("grant", "row", "look", "copy", "insert"), 16)


def check(
    shape: str, actors: int, rate: float, seconds: float, alone: float = 2.0
) -> dict[str, tuple[float, float]]:
    """Predicts and sees the CPU time of the services of dummy actors.

    Args:
      shape: of `SHAPES`.
      actors: number of actors, of one env.
      rate: steps of each per second.
      seconds: of the run. Grants and rows come every 16 steps, so a multiple of 16 / `rate` is best.
      alone: seconds in which each call is measured alone, at the rate that the calculation gives.

    Returns:
      Of each service, cores that were predicted and cores that were used.
    """
    load = Workload(
        actors,
        SHAPES[shape],
        1,
        rate,
        batches=20.0,
        versions=_VERSIONS[shape],
        update_period=2,
        log_period=16,
        grant=16,
    )
    rates = calls_per_second(load)
    with Services(SHAPES[shape]) as running:
        for name in ("grant", "row", "look", "insert"):  # Until all services have started.
            running.drive(name, 1, 0.05)
        before = running.cpu()
        threading.Event().wait(2.0)
        idle = running.cpu()
        idle.subtract(before)
        predicted = {service: idle[service] / 2.0 for service, _ in CALLS.values()}
        for name, (service, _) in CALLS.items():
            if rates[name]:
                cost = running.measure(name, 1, alone, rates[name], callers=_CALLERS.get(name, 1))
                predicted[service] += rates[name] * max(0.0, cost.service - idle[service] / 2.0 / cost.rate)
    options = {"update_period": load.update_period, "log_period": load.log_period}
    with Services(SHAPES[shape], False, 1, actors, rate=rate, versions=load.versions, **options) as running:
        counter = running.job.client("counter")
        counter.wait_for("env_steps", 16 * actors, timeout=120)
        future = running.clients[0].futures.drive("sample", 1, seconds + 1.0, load.batches)
        threading.Event().wait(0.5)
        counts, before = counter.get_counts(), running.cpu()
        threading.Event().wait(seconds)
        spent, made = running.cpu(), counter.get_counts()["env_steps"] - counts["env_steps"]
        spent.subtract(before)
        future.result(60)
        running.job.kill()
    print(
        f"\n{actors} actors x {rate:g} steps/s of {shape}: predicted {actors * rate:,.0f} env steps/s, ",
        end="",
    )
    print(f"seen {made / seconds:,.0f}\n\n| service | predicted, % of a core | seen | seen / predicted |")
    print("|---" * 4 + "|")
    result = {}
    for service, cores in predicted.items():
        if rates["act"] or service != "inference":
            seen = spent[service] / seconds
            result[service] = cores, seen
            print(f"| {service} | {100 * cores:.1f} | {100 * seen:.1f} | {seen / max(cores, 1e-9):.2f} |")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=["services", "needed", "check"], nargs="+")
    parser.add_argument("--shape", choices=list(SHAPES), nargs="+", default=list(SHAPES))
    parser.add_argument("--far", action="store_true", help="reach the services as from another machine")
    parser.add_argument("--actors", type=int, default=256, help="of the check")
    parser.add_argument("--rate", type=float, default=2.0, help="batched steps per second of each of them")
    parser.add_argument("--seconds", type=float, default=8.0, help="of the check's window")
    options = parser.parse_args()
    parts = options.only or ["services", "needed", "check"]
    print(f"{os.cpu_count()} cores, load before: {os.getloadavg()[0]:.1f}")
    for shape in options.shape:
        if "services" in parts and not options.far:
            services(shape, far=False)
        if "needed" in parts or ("services" in parts and options.far):
            costs = services(shape, far=True)
            if "needed" in parts:
                needed(shape, costs)
        if "check" in parts:
            check(shape, options.actors, options.rate, options.seconds)


if __name__ == "__main__":
    main()
