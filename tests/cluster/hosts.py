"""Hosts on one machine: namespaces of Linux, each with its own network, shared memory, name and processes.

```python
with Hosts(2) as hosts:
    hosts[0].run(["python", "server.py"])            # as subprocess.run
    worker = hosts[1].start(["python", "worker.py"])  # as subprocess.Popen
```

```text
  host1  10.77.0.1 ──veth──┐
                         bridge  in a namespace of its own
  host2  10.77.0.2 ──veth──┘
```

The hosts share this machine's files but for `/dev/shm` and `/tmp/ray`. They reach each other and nothing
else. The first process of a host waits for the end of its input. When the test ends, whatever way, that
process ends, and with it the kernel ends all others of the host and removes its devices.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from patient_ray import started

PATIENCE = 60.0  # Seconds for a command that makes a host.
_RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
_RAY["RAY_gcs_server_port_wait_time_s"] = "300"  # Of a busy machine.
_FIRST = "mount -t tmpfs tmpfs /dev/shm && mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && "
_FIRST += "hostname {name} && ip link set lo up && echo made && exec cat"


class CannotMakeHosts(Exception):
    """This machine or user cannot make namespaces; the text says what failed."""


def run(name: str, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"timeout": PATIENCE, **options}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode:
        raise RuntimeError(f"{name}: {list(command)} ended with {done.returncode}:\n{done.stdout}")
    return done


class Host:
    """One host, made by `Hosts`.

    Attributes:
      name: its host name.
      address: its IP address.
    """

    def __init__(self, name: str, address: str = "") -> None:
        self.name, self.address = name, address
        command = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc"]
        first = [*command, "--kill-child=SIGKILL", "sh", "-c", _FIRST.format(name=name)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._first = subprocess.Popen(first, text=True, **pipes)
        assert self._first.stdout is not None
        answer = self._first.stdout.readline().strip()
        if answer != "made":
            self.close()
            raise CannotMakeHosts(f"{name}: {answer or 'unshare ended without a word'}")
        (child,) = psutil.Process(self._first.pid).children()
        self.pid = child.pid  # Of its first process, as seen from here.

    def command(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` in this host."""
        enter = ["nsenter", "--target", str(self.pid), "--net", "--mount", "--uts", "--pid", "--wd=."]
        return [*enter, "--", *command]

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """`subprocess.run` in this host. Raises `RuntimeError` with the output if the command fails."""
        return run(self.name, self.command(command), **options)

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """`subprocess.Popen` in this host."""
        return subprocess.Popen(self.command(command), text=True, **options)

    def terminate(self, process: subprocess.Popen[str]) -> None:
        """Sends SIGTERM to a process that `start` has started."""
        for child in psutil.Process(process.pid).children():  # It is that of nsenter.
            child.terminate()

    def processes(self, name: str) -> list[psutil.Process]:
        """The processes of this host with a name."""
        mine, found = Path(f"/proc/{self.pid}/ns/pid").readlink(), []
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(OSError):  # It has ended.
                if process.info["name"] == name and Path(f"/proc/{process.pid}/ns/pid").readlink() == mine:
                    found.append(process)
        return found

    def received(self) -> int:
        """Bytes that have come in over the network from other hosts."""
        return received_bytes(self.run(["cat", "/proc/net/dev"]).stdout)

    def close(self) -> None:
        """Ends all processes of the host."""
        assert self._first.stdin is not None and self._first.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._first.stdin.close()
        try:
            self._first.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._first.kill()
            self._first.wait(PATIENCE)
        self._first.stdout.close()


class Hosts:
    """`count` hosts that are joined by a bridge, as a context.

    With `delay` or `loss`, the first host is joined to the others by a slow line, see `slow_line.py`: a
    packet arrives `delay` seconds later, or with probability `loss` not at all, each way.

    Raises:
      CannotMakeHosts: Namespaces or their devices cannot be made here.
    """

    def __init__(self, count: int, delay: float = 0.0, loss: float = 0.0) -> None:
        self._count, self._delay, self._loss = count, delay, loss
        self._ends = contextlib.ExitStack()
        self._hosts: list[Host] = []

    def __enter__(self) -> Hosts:
        for tool in ("unshare", "nsenter", "ip"):
            if shutil.which(tool) is None:
                raise CannotMakeHosts(f"the command {tool} is not installed")
        try:
            self._switch = self._make(Host("switch"))
            slow = bool(self._delay or self._loss)
            for bridge in ("bridge", "near")[: 1 + slow]:
                self._switch.run(["ip", "link", "add", bridge, "type", "bridge"])
                self._switch.run(["ip", "link", "set", bridge, "up"])
            if slow:
                self._join_bridges()
            for number in range(self._count):
                self.add("near" if slow and not number else "bridge")
        except RuntimeError as error:
            self._ends.close()
            raise CannotMakeHosts(str(error)) from error
        except BaseException:
            self._ends.close()
            raise
        return self

    def add(self, bridge: str = "bridge") -> Host:
        """Makes another host."""
        number = len(self._hosts) + 1
        host = self._make(Host(f"host{number}", f"10.77.0.{number}"))
        port = f"port{number}"
        ends = ["type", "veth", "peer", "name", "eth0", "netns", str(host.pid)]
        # From outside of both namespaces, where both processes have these numbers.
        command = ["ip", "link", "add", port, "netns", str(self._switch.pid), *ends]
        made = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        if made.returncode:
            raise CannotMakeHosts(f"ip link add: {made.stderr.strip()}")
        self._switch.run(["ip", "link", "set", port, "master", bridge, "up"])
        host.run(["ip", "address", "add", f"{host.address}/24", "dev", "eth0"])
        host.run(["ip", "link", "set", "eth0", "up"])
        self._hosts.append(host)
        return host

    def connect(self, index: int, on: bool) -> None:
        """Cuts a host off from all others, or ends that."""
        self._switch.run(["ip", "link", "set", f"port{index + 1}", "up" if on else "down"])

    def _join_bridges(self) -> None:
        line = Path(__file__).with_name("slow_line.py")
        command = [sys.executable, str(line), str(self._delay), str(self._loss)]
        running = self._switch.start(command, stdout=subprocess.PIPE)
        assert running.stdout is not None
        if running.stdout.readline().strip() != "ready":
            raise CannotMakeHosts("no TAP devices for a slow line")
        running.stdout.close()
        for bridge in ("near", "bridge"):
            self._switch.run(["ip", "link", "set", f"to_{bridge}", "master", bridge, "up"])

    def _make(self, host: Host) -> Host:
        self._ends.callback(host.close)
        return host

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __exit__(self, *exc_info: object) -> None:
        self._ends.close()


def received_bytes(table: str) -> int:
    """Received bytes of all devices but `lo`, from the text of `/proc/net/dev`."""
    return sum(int(number) for number in re.findall(r"^\s*(?!lo:)\w+:\s*(\d+)", table, re.MULTILINE))


def start_ray(hosts: Hosts) -> dict[str, str]:
    """Starts Ray, the head in the first host; returns the environment of a driver, which runs in that host.

    Host i has the resource `host<i>` of Ray, for 10 nodes. All but the first have 2 of `far`, 1 of `source`.
    """
    environment = driver_environment(f"{hosts[0].address}:6379")
    for host in hosts:
        join_ray(host, environment, head=host is hosts[0])
    return environment


def driver_environment(address: str) -> dict[str, str]:
    """The environment of a driver for the cluster whose head is at `address`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= _RAY
    tests = Path(__file__).resolve().parents[1]
    environment["PYTHONPATH"] = os.pathsep.join([str(tests.parent), str(tests / "helpers")])
    environment["RAY_ADDRESS"] = address
    return environment


def own_resources(name: str, head: bool) -> dict[str, int]:
    return {name: 10, "far": 0 if head else 2, "source": 0 if head else 1}


def join_ray(host: Host | RayNode, environment: dict[str, str], head: bool = False) -> None:
    """Starts Ray in a host: the head, or one that joins the cluster of `environment`. A `RayNode` has it."""
    if isinstance(host, RayNode):
        return
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    options = ["--disable-usage-stats", "--num-cpus=8", "--object-store-memory=100000000"]
    own = [f"--node-ip-address={host.address}", f"--resources={json.dumps(own_resources(host.name, head))}"]
    joins = [f"--address={environment['RAY_ADDRESS']}"]
    if head:
        joins = ["--head", "--port=6379", "--include-dashboard=false"]
    environment = {name: value for name, value in environment.items() if name != "RAY_ADDRESS"}
    in_host = functools.partial(host.run, env=environment, timeout=6 * PATIENCE)
    started(
        functools.partial(in_host, [*ray, "start", *options, *own, *joins]),
        clean=functools.partial(in_host, [*ray, "stop", "--force"]),
    )


class RayNode:
    """What a test asks of a `Host`, on a node of Ray that shares this host with the others.

    Attributes:
      name: its resource of Ray.
    """

    def __init__(self, cluster: Any, name: str, head: bool) -> None:
        self.name, self._cluster = name, cluster
        options = {"num_cpus": 8, "object_store_memory": 100_000_000, "resources": own_resources(name, head)}
        if head:
            options["include_dashboard"] = False
        self._node = started(lambda: cluster.add_node(**options))

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """`subprocess.run`. Raises `RuntimeError` with the output if the command fails."""
        return run(self.name, command, **options)

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """`subprocess.Popen`."""
        return subprocess.Popen(command, text=True, **options)

    def terminate(self, process: subprocess.Popen[str]) -> None:
        """Sends SIGTERM to a process that `start` has started."""
        process.terminate()

    def close(self) -> None:
        """Kills the processes of the node."""
        self._cluster.remove_node(self._node, allow_graceful=False)


class OneHost:
    """`count` nodes of Ray on this host, as a context; the first is the head. Stands in for `Hosts`.

    Attributes:
      environment: of a driver.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._ends = contextlib.ExitStack()
        self._nodes: list[RayNode] = []

    def __enter__(self) -> OneHost:
        from ray.cluster_utils import Cluster

        before = dict(os.environ)
        os.environ.update(_RAY)
        self._ends.callback(lambda: (os.environ.clear(), os.environ.update(before)))
        self._cluster = Cluster()
        self._ends.callback(self._cluster.shutdown)
        try:
            for _ in range(self._count):
                self.add()
        except BaseException:
            self._ends.close()
            raise
        self.environment = driver_environment(self._cluster.address)
        return self

    def add(self) -> RayNode:
        """Starts another node."""
        self._nodes.append(RayNode(self._cluster, f"host{len(self._nodes) + 1}", head=not self._nodes))
        return self._nodes[-1]

    def __getitem__(self, index: int) -> RayNode:
        return self._nodes[index]

    def __exit__(self, *exc_info: object) -> None:
        self._ends.close()
