"""The inference server: whose rows are whose, when a batch is fired, what a client sees of a failure."""

import concurrent.futures
import socket
import threading
import time
import types

import numpy as np
import pytest
from background import Background

from framework import core
from framework.actors import inference_server
from framework.actors.inference_client import InferenceError, ServerPort, SharedMemoryPort
from framework.actors.inference_client import connect as connect_port
from framework.actors.inference_server import InferenceServer
from framework.actors.inference_slots import Slots
from framework.environments.testing import make_spec
from framework.specs import Array

HOUR_S = 3600.0  # What waits so long makes its test fail.
SPEC = make_spec(observations={"x": Array((2,), np.float32), "y": Array((), np.int64)})


class CountingPolicy(core.Policy):
    """The state counts an env's steps from 10 times its number; the action is the sum of all it is given."""

    def __init__(self, wait=None):
        self.batches = []
        self.fail = False
        self._wait = wait

    def initial_state(self, batch_size):
        return (10 * np.arange(batch_size),)

    def step(self, observation, state):
        if self._wait is not None:
            assert self._wait.wait(10)
        if self.fail:
            raise ArithmeticError("the policy cannot divide")
        self.batches.append(len(observation["y"]))
        count = state[0]
        action = observation["x"].sum(1).astype(np.int64) + observation["y"] + count
        return action, {"count": count, "pair": (observation["x"],)}, (count + 1,)


def observe(values):
    """An observation whose part of the action is ``values``."""
    values = np.asarray(values)
    return {"x": np.stack([values, values], 1).astype(np.float32), "y": -values}


def ports(kind, server, sizes, total=None):
    make = {
        "messages": lambda *a: ServerPort(server, *a),
        "shared memory": lambda name, envs, *a: SharedMemoryPort(
            server, name, server.connect(name, envs, *a)
        ),
    }[kind]
    offset, made = 0, []
    for index, size in enumerate(sizes):
        made.append(make(f"client-{index}", size, *(() if total is None else (offset, total))))
        offset += size
    return made


@pytest.fixture(params=["direct", "messages", "shared memory"])
def served(request):
    """``(make, kind)``: ``make(policy, **options)`` gives a server that is closed at the end."""
    servers = []

    def make(policy, capacity=8, **options):
        options.setdefault("concurrent", request.param != "direct")
        shared = request.param == "shared memory"
        server = InferenceServer(policy, SPEC, capacity, shared_memory=shared, **options)
        servers.append(server)
        return server

    yield make, "messages" if request.param == "direct" else request.param
    for server in servers:
        server.close()


def test_every_env_gets_its_own_action_and_keeps_its_own_state(served):
    make, kind = served
    one, two = ports(kind, make(CountingPolicy(), timeout=0.0), [2, 3])
    none, begins = np.zeros, np.ones
    for step in range(4):
        one.request(observe([100, 200]), begins(2, bool) if step == 0 else none(2, bool))
        action, extras = one.answer()
        assert action.tolist() == [100 + step, 210 + step] and action.dtype == np.int64
        assert extras["count"].tolist() == [step, 10 + step]
        assert extras["pair"][0].tolist() == [[100, 100], [200, 200]]
        first = np.array([step == 0, step in (0, 2), step == 0])  # its second env begins again at step 2
        two.request(observe([1, 2, 3]), first)
        action, _ = two.answer()
        assert action.tolist() == [1 + step, 12 + (step if step < 2 else step - 2), 23 + step]


def test_no_step_of_the_policy_is_for_more_than_max_batch(served):
    make, kind = served
    counted = []
    policy = CountingPolicy()
    server = make(policy, max_batch=2, timeout=0.0, on_batch=counted.append)
    policy.batches.clear()
    (port,) = ports(kind, server, [5])
    for step in range(2):
        port.request(observe([100, 200, 300, 400, 500]), np.full(5, step == 0))
        action, extras = port.answer()
        assert action.tolist() == [100 + step, 210 + step, 320 + step, 430 + step, 540 + step]
        assert extras["pair"][0][:, 0].tolist() == [100, 200, 300, 400, 500]
    assert policy.batches == [2, 2, 1] * 2
    server.close()  # the last answer is sent before its batch is counted
    assert counted == [2, 2, 1] * 2


def test_envs_of_one_actor_may_come_by_two_clients(served):
    make, kind = served
    first, second = ports(kind, make(CountingPolicy(), timeout=0.0), [2, 2], total=4)
    for port, expected in ((first, [0, 10]), (second, [20, 30])):
        port.request(observe([0, 0]), np.ones(2, bool))
        assert port.answer()[0].tolist() == expected


def test_a_failure_of_the_policy_reaches_who_asked_and_is_over_then(served):
    make, kind = served
    policy = CountingPolicy()
    (port,) = ports(kind, make(policy), [2])
    policy.fail = True
    port.request(observe([1, 2]), np.ones(2, bool))
    with pytest.raises((ArithmeticError, InferenceError), match="cannot divide"):
        port.answer()
    policy.fail = False
    port.request(observe([1, 2]), np.ones(2, bool))
    assert port.answer()[0].tolist() == [1, 12]


def test_a_wrong_observation_is_named(served):
    make, kind = served
    (port,) = ports(kind, make(CountingPolicy()), [2])
    with pytest.raises(ValueError, match=r"observation/x: got shape \(3, 2\), expected \(2, 2\)"):
        port.request(observe([1, 2, 3]), np.ones(2, bool))
        port.answer()
    with pytest.raises(ValueError, match=r"observation/x: .* got dtype float64, expected float32"):
        port.request({**observe([1, 2]), "x": np.ones((2, 2))}, np.ones(2, bool))
        port.answer()


# The batches of these tests are made by a thread.
in_threads = pytest.mark.parametrize("served", ["messages", "shared memory"], indirect=True)


def ask(port, envs=2):
    port.request(observe([0] * envs), np.ones(envs, bool))


BATCHES = {
    # name: (options, clients that ask, of 3 with 2 envs each; sizes of the batches)
    "everybody that is connected": ({"timeout": 60.0}, [0, 1, 2], [[6]]),
    "max_batch at once": ({"timeout": 60.0, "max_batch": 4}, [0, 1], [[4]]),
    "min_batch after the timeout": ({"timeout": 0.05, "min_batch": 4}, [0, 2], [[4]]),
    "one after the timeout": ({"timeout": 0.05}, [1], [[2]]),
    "a second at most": ({"timeout": 0.0, "min_batch": 6}, [1], [[2]]),
    "no more than max_batch": ({"timeout": 0.0, "max_batch": 4}, [0, 1, 2], [[2, 4], [4, 2]]),
}


@pytest.mark.parametrize("case", BATCHES)
@in_threads
def test_when_a_batch_is_fired(case, served, monkeypatch):
    monkeypatch.setattr(inference_server, "PATIENCE", 0.2)
    options, asking, expected = BATCHES[case]
    make, kind = served
    gate = threading.Event()
    gate.set()
    policy = CountingPolicy(gate)
    server = make(policy, **options)
    clients = ports(kind, server, [2, 2, 2])
    policy.batches.clear()
    if case == "no more than max_batch":  # all three are there before the first batch is made
        with server._acting:
            for index in asking:
                ask(clients[index])
    else:
        for index in asking:
            ask(clients[index])
    for index in asking:
        clients[index].answer()
    if case == "no more than max_batch":
        assert sum(policy.batches) == 6 and max(policy.batches) <= 4
    else:
        assert policy.batches in expected


@in_threads
def test_who_has_gone_is_not_waited_for(served, monkeypatch):
    monkeypatch.setattr(inference_server, "PATIENCE", HOUR_S)
    make, kind = served
    clients = ports(kind, make(CountingPolicy(), timeout=HOUR_S), [2, 2])
    ask(clients[0])
    time.sleep(0.1)  # the server waits for the other one by now
    clients[1].close()
    clients[0].answer()


@in_threads
def test_a_client_that_is_silent_for_long_is_not_waited_for(served, monkeypatch):
    monkeypatch.setattr(inference_server, "PATIENCE", 0.0)
    make, kind = served
    clients = ports(kind, make(CountingPolicy(), timeout=HOUR_S), [2, 2])
    ask(clients[0])
    clients[0].answer()


@in_threads
def test_a_client_that_comes_back_gets_its_rows_and_a_fresh_state(served):
    make, kind = served
    server = make(CountingPolicy(), capacity=2, timeout=0.0)
    for _ in range(2):
        (port,) = ports(kind, server, [2])
        for step in range(2):
            port.request(observe([0, 0]), np.zeros(2, bool))
            assert port.answer()[0].tolist() == [step, 10 + step]
        port.close()


def raw(server, name):
    """The socket of a client of shared memory."""
    connection = server.connect(name, 2)
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    stream.settimeout(10)
    stream.bind(connection.client_address)
    stream.connect(connection.server_address)
    return stream


def test_a_client_that_was_killed_is_forgotten_at_its_answer(monkeypatch):
    monkeypatch.setattr(inference_server, "PATIENCE", HOUR_S)
    server = InferenceServer(CountingPolicy(), SPEC, 8, shared_memory=True, timeout=HOUR_S)
    gone = raw(server, "gone")
    (port,) = ports("shared memory", server, [2])
    gone.send(inference_server.REQUEST)
    gone.close()
    ask(port)
    port.answer()  # of the batch of both, or of the next
    ask(port)
    port.answer()
    port.close()
    server.close()


def test_what_an_earlier_life_of_a_client_sent_is_not_answered_to_the_next():
    """An actor is back while its old request waits in the socket of the busy server."""
    busy, gate, batches = threading.Event(), threading.Event(), []

    def count(rows):
        batches.append(rows)
        busy.set()
        assert gate.wait(10)

    server = InferenceServer(CountingPolicy(), SPEC, 8, shared_memory=True, timeout=0.0, on_batch=count)
    (other,) = ports("shared memory", server, [2])
    old = raw(server, "again")
    ask(other)
    other.answer()
    assert busy.wait(10)
    old.send(inference_server.REQUEST)
    new = raw(server, "again")
    gate.set()
    new.settimeout(0.2)
    with pytest.raises(TimeoutError):
        new.recv(inference_server.MAX_ANSWER)
    new.settimeout(10)
    new.send(inference_server.REQUEST)
    assert new.recv(inference_server.MAX_ANSWER) == inference_server.ANSWER.pack(-1)
    old.close()
    new.close()
    server.close()
    assert batches == [2, 2]


def test_an_answer_that_an_earlier_life_of_a_client_cannot_take_leaves_the_next_connected():
    server = InferenceServer(CountingPolicy(), SPEC, 8, shared_memory=True, timeout=0.0)
    raw(server, "again").close()
    earlier = server._clients["again"]
    new = raw(server, "again")
    server._answer(earlier)  # in a batch that was made while the client came back
    new.send(inference_server.REQUEST)
    assert new.recv(inference_server.MAX_ANSWER) == inference_server.ANSWER.pack(-1)
    new.close()
    server.close()


def test_more_clients_than_the_socket_holds_requests_of_are_served():
    gate = threading.Event()
    gate.set()
    server = InferenceServer(CountingPolicy(gate), SPEC, 48, shared_memory=True, timeout=0.0)
    clients = ports("shared memory", server, [1] * 48)
    gate.clear()

    def act(client):
        ask(client, 1)
        return client.answer()[0].tolist()

    acting = [Background(act, client) for client in clients]
    time.sleep(0.7)  # longer than a client waits before it looks whether the server lives
    gate.set()
    assert [each.result(20) for each in acting] == [[0]] * 48
    server.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_that_is_killed_is_noticed_by_those_who_wait(monkeypatch):
    monkeypatch.setattr(SharedMemoryPort, "look_s", 0.05)
    gate = threading.Event()
    gate.set()
    server = InferenceServer(CountingPolicy(gate), SPEC, 4, shared_memory=True)
    (port,) = ports("shared memory", server, [2])
    gate.clear()
    ask(port)
    server._socket.close()  # as the kernel does when the process ends
    with pytest.raises(InferenceError, match="was closed"):
        port.answer()
    gate.set()
    server.close()


@in_threads
def test_parameters_that_cannot_be_had_are_an_error_of_the_next_request(served):
    class Variables:
        version = 3

        def update(self, wait=False):
            raise TimeoutError("the variable source is silent")

    make, kind = served
    (port,) = ports(kind, make(CountingPolicy(), variables=Variables(), timeout=0.0), [2])
    ask(port)
    port.answer()
    ask(port)
    with pytest.raises((InferenceError, TimeoutError), match="the variable source is silent"):
        port.answer()


@in_threads
def test_a_closed_server_is_an_error_and_no_wait(served):
    make, kind = served
    server = make(CountingPolicy())
    (port,) = ports(kind, server, [2])
    server.close()
    with pytest.raises((InferenceError, RuntimeError, OSError), match="clos"):
        ask(port)
        port.answer()


def test_shared_memory_is_gone_with_the_server():
    import os

    server = InferenceServer(CountingPolicy(), SPEC, 4, shared_memory=True)
    connection = server.connect("a", 2)
    paths = [connection.server_address, *(column.path for column in connection.columns)]
    assert all(os.path.exists(path) for path in paths)
    server.close()
    assert not os.path.exists(os.path.dirname(connection.server_address))


class Elsewhere:
    """A server whose shared memory cannot be seen from here."""

    def __init__(self, server):
        self._server = server
        self.futures, self.disconnect = server.futures, server.disconnect

    def connect(self, *args, messages=False):
        connection = self._server.connect(*args, messages=messages)
        if connection.columns is None:
            return connection
        lost = [column._replace(path=column.path + "-elsewhere") for column in connection.columns]
        return connection._replace(columns=tuple(lost))


def test_another_machine_is_served_by_messages():
    server = InferenceServer(CountingPolicy(), SPEC, 4, shared_memory=True)
    here = connect_port(server, "here", 2)
    there = connect_port(Elsewhere(server), "there", 2)
    assert type(here) is SharedMemoryPort and type(there) is ServerPort
    for port in (here, there):
        ask(port)
        assert port.answer()[0].tolist() == [0, 10]
    server.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_batch": 0}, "min_batch: got 0"),
        ({"min_batch": 4, "max_batch": 2}, "max_batch 2, expected"),
        ({"timeout": -1.0}, "timeout: got -1"),
        ({"capacity": 0}, "capacity: got 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        InferenceServer(CountingPolicy(), SPEC, **{"capacity": 4, **options})


def test_rows_run_out_and_sizes_stay():
    slots = Slots(CountingPolicy(), SPEC, 4)
    slots.connect("a", 3)
    with pytest.raises(ValueError, match=r"got 2 from client 'b', expected at most 1: .* of the 4 rows"):
        slots.connect("b", 2)
    with pytest.raises(ValueError, match=r"got 2 from client 'a', expected 3"):
        slots.connect("a", 2)


class FickleRows(core.Policy):
    """Gives one action too few for more than one env."""

    def initial_state(self, batch_size):
        return ()

    def step(self, observation, state):
        return np.zeros(max(1, len(observation["y"]) - 1), np.int64), (), ()


def test_a_policy_with_too_few_actions_is_named():
    slots = Slots(FickleRows(), SPEC, 4)
    with pytest.raises(ValueError, match=r"action: got shape \(2,\).*for 3 envs"):
        slots.act([slots.connect("a", 3)])


class Recurrent(core.Policy):
    """A torch state, which the extras show."""

    def initial_state(self, batch_size):
        import torch

        with torch.inference_mode():
            return {"h": torch.arange(batch_size).float()[:, None]}

    def step(self, observation, state):
        import torch

        with torch.inference_mode():
            action = state["h"][:, 0].numpy().astype(np.int64)
            return action, {"h": state["h"].numpy()}, {"h": state["h"] + 100}


def test_states_of_torch_and_extras_that_are_views_of_them():
    slots = Slots(Recurrent(), SPEC, 6)
    a, b, c = slots.connect("a", 2), slots.connect("b", 2), slots.connect("c", 2)
    slots.act([a, b, c])
    assert slots.act([c, a]) == [c.envs + a.envs]  # rows that are not next to each other
    assert slots.read(a)[0].tolist() == [100, 101] and slots.read(b)[0].tolist() == [0, 1]
    assert slots.read(c)[1]["h"].ravel().tolist() == [100, 101]
    slots.first[a.begin + 1] = True
    slots.act([a, b])
    assert slots.read(a)[0].tolist() == [200, 1] and slots.read(a)[1]["h"].ravel().tolist() == [200, 1]
    assert slots.read(b)[0].tolist() == [100, 101]
    slots.first[:] = False
    assert slots.act([c, a], 3) == [3, 1]
    assert slots.read(a)[0].tolist() == [300, 101] and slots.read(c)[0].tolist() == [200, 201]
    assert slots.act([b, c], 3) == [3, 1]
    assert slots.read(b)[0].tolist() == [200, 201] and slots.read(c)[0].tolist() == [300, 301]


def test_a_server_that_is_silent_is_named():
    silent = types.SimpleNamespace(
        connect=lambda *args, **options: None,
        futures=types.SimpleNamespace(act=lambda *args: concurrent.futures.Future()),
    )
    port = ServerPort(silent, "actor", 2, timeout=0.01)
    ask(port)
    with pytest.raises(InferenceError, match=r"no answer for 'actor' within 0\.01 s"):
        port.answer()
