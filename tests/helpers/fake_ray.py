"""A `ray` for tests, with what `launch.engines.ray` uses: actors are forks of the warm template.

Its machines are names with resources, all of them this machine. `install` puts it in the place of Ray.
The tests of `conformance/launch` that run on it and on the real one show that the two agree.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib.util
import itertools
import os
import socket
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import warm_python

from launch.engines.supervised.channel import Channel

PREFIX = "127.0.0.1"  # Of the head's address, and the address of each machine.


class RayError(Exception):
    """What `ray.exceptions` has under this name."""


class RayActorError(RayError):
    """An actor, or the machine it was on, is gone."""


class AuthenticationError(RayError):
    """The fake never raises it."""


class _Cluster:
    """Machines and what is free on them. `changed` is notified when one comes, goes, or has more room."""

    def __init__(self):
        self.changed = threading.Condition()
        self.head = socket.create_server((PREFIX, 0))
        self.machines, self.free, self.actors = {}, {}, []
        self.unreachable = set()  # Calls of these names are lost.

    def place(self, actor):
        """Returns the machine for an actor once there is room, None once the actor was killed."""
        with self.changed:
            self.changed.wait_for(lambda: actor.killed or self._rooms(actor))
            if actor.killed:
                return None
            machine = min(self._rooms(actor), key=[each.place for each in self.actors].count)
            self.free[machine].subtract(actor.needs)
            self.actors.append(actor)
            actor.place = machine
            return machine

    def remove(self, actor):
        with self.changed:
            if actor in self.actors:
                self.actors.remove(actor)
                self.free[actor.machine].update(actor.needs)
            self.changed.notify_all()

    def _rooms(self, actor):
        at = getattr(actor.strategy, "machine", None)
        at = self.machines if at is None else [at]
        return [m for m in at if all(self.free[m][name] >= need for name, need in actor.needs.items())]


HAS_RAY = importlib.util.find_spec("ray") is not None  # The real one.
cluster: _Cluster | None = None  # While it is initialized.
_machine = ""  # Of the actor in this process.


def init(address=None, **options):
    global cluster
    assert cluster is None, "ray.init was called twice"
    cluster = _Cluster()
    add_node({"CPU": 4})


def is_initialized():
    return cluster is not None


def shutdown():
    global cluster
    if cluster is not None:
        for machine in list(cluster.machines):
            remove_node(machine)
        cluster.head.close()
    cluster = None


def add_node(resources):
    """Adds a machine; returns its name."""
    name = f"machine-{len(cluster.free)}"
    with cluster.changed:
        cluster.machines[name], cluster.free[name] = resources, Counter(resources)
        cluster.changed.notify_all()
    return name


def remove_node(name):
    """Takes a machine away, and the actors on it."""
    with cluster.changed:
        del cluster.machines[name]
        lost = [actor for actor in cluster.actors if actor.machine == name]
    for actor in lost:
        actor.kill()
        if actor.process is not None:  # It may hang.
            actor.process.kill()


def nodes():
    place = {"Alive": True, "NodeManagerAddress": PREFIX, "NodeManagerPort": 1}
    return [
        {**place, "NodeID": name, "NodeManagerHostname": name, "Resources": resources}
        for name, resources in cluster.machines.items()
    ]


def available_resources():
    return {name: dict(free) for name, free in cluster.free.items()}


def get_runtime_context():
    address = f"{PREFIX}:{cluster.head.getsockname()[1]}" if cluster else ""
    return SimpleNamespace(gcs_address=address, get_node_id=lambda: _machine)


def get_node_ip_address():
    return PREFIX


def get(future):
    return future.result()


def wait(futures, num_returns=1, timeout=None):
    done, others = concurrent.futures.wait(futures, timeout)
    return list(done), list(others)


def kill(actor):
    actor.kill()


class _Remote:
    """An actor class or a function, with its options."""

    def __init__(self, what, options):
        self._what, self._options = what, options

    def options(self, **options):
        return _Remote(self._what, {**self._options, **options})

    def remote(self, *arguments):
        if isinstance(self._what, type):
            return _Actor(self._what, arguments, self._options)
        self._what(*arguments)  # It is one that returns at once.


def remote(*what, **options):
    return _Remote(what[0], options) if what else lambda what: _Remote(what, options)


class _Actor:
    """An actor as its owner sees it: a thread waits for room, then for the answers of its process."""

    def __init__(self, kind, arguments, options):
        self.needs = Counter(options.get("resources"))
        self.needs.update(CPU=options.get("num_cpus", 0), GPU=options.get("num_gpus", 0))
        self.strategy = options.get("scheduling_strategy")
        self.killed, self.place, self.machine, self.process = False, "", "", None
        self._end, theirs = socket.socketpair()
        self._channel, self._lock = Channel(self._end), threading.Lock()
        self._calls: dict[int, concurrent.futures.Future] | None = {}
        self._numbers, self._unsent = itertools.count(), []
        self._cluster = cluster
        run = functools.partial(self._run, theirs, (kind, arguments))
        threading.Thread(target=run, daemon=True).start()

    def __getattr__(self, name):
        method = SimpleNamespace(remote=functools.partial(self._call, name))
        method.options = lambda **options: method
        return method

    def kill(self):
        """Ends the process, unless it hangs, and all calls."""
        self.killed = True
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        with self._cluster.changed:
            self._cluster.changed.notify_all()

    def _call(self, name, *arguments):
        future = concurrent.futures.Future()
        with self._lock, contextlib.suppress(OSError):  # It has ended: `_run` says so.
            if name in self._cluster.unreachable:
                future.set_exception(RayError(f"{name}: the machine could not be reached"))
            elif self._calls is None:
                future.set_exception(RayActorError("The actor has ended."))
            else:
                message = next(self._numbers), name, arguments
                self._calls[message[0]] = future
                self._channel.send(message) if self.machine else self._unsent.append(message)
        return future

    def _run(self, theirs, first):
        machine = self._cluster.place(self)
        if machine is not None:
            start = functools.partial(warm_python.start_fork_server, preload=warm_python.LAUNCH)
            self.process = start(theirs.fileno(), [], main=("fake_ray", "serve"))
        theirs.close()
        with contextlib.suppress(EOFError, OSError):
            with self._lock:
                self.machine = machine or ""
                for message in ((machine, *first), *self._unsent):
                    self._channel.send(message)
            while True:
                number, error, value = self._channel.receive()
                future = self._calls.pop(number)
                future.set_result(value) if error is None else future.set_exception(error)
        with self._lock:
            lost, self._calls = self._calls, None
        for future in lost.values():
            future.set_exception(RayActorError("The actor has ended."))
        if self.process is not None:
            self.process.wait()
        self._cluster.remove(self)
        self._channel.close()


def serve(descriptor):
    """Runs in the process of an actor: makes it, and answers its calls, each on a thread."""
    global _machine
    sys.modules.update(MODULES)
    channel = Channel(socket.socket(fileno=descriptor))
    _machine, kind, arguments = channel.receive()
    actor = kind(*arguments)

    def answer(number, name, arguments):
        try:
            reply = number, None, getattr(actor, name)(*arguments)
        except Exception as error:
            reply = number, error, None
        channel.send(reply)

    with contextlib.suppress(EOFError):
        while True:
            threading.Thread(target=answer, args=channel.receive(), daemon=True).start()
    os._exit(0)


class PlacementGroupSchedulingStrategy:
    """The machine of a bundle of a placement group, which is the list of its machines."""

    def __init__(self, group, placement_group_bundle_index):
        self.machine = group[placement_group_bundle_index]


def NodeAffinitySchedulingStrategy(machine, soft):
    """For functions, which run here."""


def placement_group(bundles, strategy):
    names = list(cluster.machines)
    return [names[index % len(names) if "SPREAD" in strategy else 0] for index in range(len(bundles))]


def remove_placement_group(group):
    pass


util = exceptions = sys.modules[__name__]
MODULES = dict.fromkeys(("ray", "ray.util", "ray.util.scheduling_strategies"), util)


def install(monkeypatch):
    """Takes the place of Ray until the end of the test. Has one machine; a test may add others."""
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, util)
    init()
