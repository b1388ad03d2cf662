"""What Ray must find for a node, and whether the cluster can ever have it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from launch.engines.options import Resources
from launch.errors import LaunchError

Amounts = Mapping[str, float]  # By name of the resource, as Ray names them: CPU, GPU, and custom ones.
_FEW = 0.001  # A bundle of a placement group must not be empty.
_ADVICE = "Ask for less, or add hosts to the cluster. If an autoscaler adds them, set LAUNCH_AUTOSCALING=1."


def has_bundles(resources: Resources) -> bool:
    """Whether the group has a placement group. SPREAD needs none, so that each of its nodes starts alone."""
    return resources.strategy not in (None, "SPREAD")


def needs(resources: Resources) -> dict[str, float]:
    """Returns what is reserved for each node of the group while it runs."""
    amounts: dict[str, float] = dict(resources.custom)
    if resources.num_gpus:
        amounts["GPU"] = resources.num_gpus
    if resources.num_cpus is not None:
        amounts["CPU"] = resources.num_cpus
    if has_bundles(resources) and not any(amounts.values()):
        amounts["CPU"] = _FEW
    return amounts


def hosts_of(ray: Any) -> dict[str, dict[str, float]]:
    """Returns what each host of the cluster has in all, by the host's name and address."""
    hosts = {}
    for node in ray.nodes():
        if node["Alive"]:
            known = dict(node["Resources"])
            for internal in ("memory", "object_store_memory"):
                known.pop(internal, None)
            place = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
            hosts[f"{node['NodeManagerHostname']} ({place})"] = known
    return hosts


def check(groups: Mapping[str, tuple[Resources, int]], hosts: Mapping[str, Amounts]) -> None:
    """Raises `LaunchError` for what does not fit into the cluster even while the cluster is idle.

    Args:
      groups: by name, the resources of each node and the number of nodes.
      hosts: by name, what each host has in all.
    """
    has = "; ".join(
        # Names with a colon are the addresses and models of machines.
        f"{host} has {describe({name: amount for name, amount in amounts.items() if ':' not in name})}"
        for host, amounts in hosts.items()
    )
    total: dict[str, dict[str, float]] = {}
    for group, (resources, count) in groups.items():
        need = needs(resources)
        place = need or {"CPU": 1}  # Ray places a node without any where one core is free.
        rooms = {name: room(place, amounts) for name, amounts in hosts.items()}
        expected = None
        if not any(rooms.values()):
            expected = "a host that has this"
        elif resources.strategy == "STRICT_PACK" and max(rooms.values()) < count:
            expected = f"one host that has this {count} times, for STRICT_PACK"
        elif resources.strategy == "STRICT_SPREAD" and sum(map(bool, rooms.values())) < count:
            expected = f"{count} hosts that have this, for STRICT_SPREAD"
        elif need and sum(rooms.values()) < count:
            expected = f"room for {count} nodes; there is room for {sum(rooms.values()):g}"
        if expected is not None:
            raise LaunchError(
                f"resources of group {group!r}: got {describe(place)} for each of {count} nodes, "
                f"expected {expected}. {has}. {_ADVICE}"
            )
        for name, amount in need.items():
            total.setdefault(name, {})[group] = amount * count
    for name, parts in total.items():
        there = sum(amounts.get(name, 0) for amounts in hosts.values())
        if sum(parts.values()) > there * (1 + 1e-9):
            each = ", ".join(f"{group} {amount:g}" for group, amount in parts.items())
            raise LaunchError(
                f"resources: got {name} {sum(parts.values()):g} for all nodes together ({each}), expected at "
                f"most {there:g}. {has}. {_ADVICE}"
            )


def room(need: Amounts, amounts: Amounts) -> float:
    """Returns how many nodes that need `need` fit into an idle host with `amounts`."""
    fits = [math.floor(amounts.get(name, 0) / amount + 1e-9) for name, amount in need.items() if amount]
    return min(fits, default=math.inf)


def describe(amounts: Amounts) -> str:
    """Returns a text such as `CPU 4, GPU 1`."""
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(amounts.items())) or "nothing"
