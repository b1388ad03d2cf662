"""A served object, its connection, and what tests of calls between processes ask of it."""

from __future__ import annotations

import shutil
import threading

import numpy as np
import pytest

from launch import directories
from launch.rpc import sockets
from launch.rpc.client import Connection
from launch.rpc.server import RpcServer

PATIENCE = 30.0


class Wordless(Exception):
    def __str__(self):
        return self.words  # which it does not have


class Thing:
    def __init__(self):
        self.array = np.zeros(100_000, np.float32)
        self.entered = threading.Semaphore(0)
        self.release = threading.Event()

    def echo(self, *args, **kwargs):
        return args[0] if args else kwargs

    def block(self):
        self.entered.release()
        return self.release.wait(PATIENCE)

    def hand_out(self):
        """An array of its own, which it changes right afterwards."""
        threading.Thread(target=self._scribble).start()
        return self.array

    def _scribble(self):
        self.array += 1

    def unpicklable(self):
        return threading.Lock()

    def do(self, function):
        return function()

    def fail(self):
        raise Wordless


@pytest.fixture
def keys():
    return sockets.CurveKeys.generate()


@pytest.fixture
def directory():
    path = directories.make_private_directory()
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(params=["ipc", "tcp"])
def served(request, keys, directory):
    """(object, server, connection)"""
    address = f"ipc://{directory}/s" if request.param == "ipc" else "tcp://127.0.0.1:*"
    thing = Thing()
    server = RpcServer(thing, address, keys, name="thing").start()
    connection = Connection(server.address, keys, name="thing")
    yield thing, server, connection
    thing.release.set()
    connection.close()
    server.close()


def ask(connection, *args, timeout=PATIENCE):
    return connection.call("echo", args, {}, timeout)
