"""The inference server: whose rows are whose, when a batch is fired, what a client sees of a failure."""

import concurrent.futures
import os
import threading
import types

import numpy as np
import pytest
from background import until

import launch
from framework import core
from framework.actors import inference_server
from framework.actors.inference_client import InferenceError, ServerPort
from framework.actors.inference_lines import InferenceConnection
from framework.actors.inference_server import InferenceServer
from framework.actors.inference_slots import Rows, Slots
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
            raise ArithmeticError("the policy cannot divide", np.zeros(1 << 20))
        self.batches.append(len(observation["y"]))
        count = state[0]
        action = observation["x"].sum(1).astype(np.int64) + observation["y"] + count
        return action, {"count": count, "pair": (observation["x"],)}, (count + 1,)


def observe(values):
    """An observation whose part of the action is ``values``."""
    values = np.asarray(values)
    return {"x": np.stack([values, values], 1).astype(np.float32), "y": -values}


def ports(server, sizes, total=None):
    offset, made = 0, []
    for index, size in enumerate(sizes):
        made.append(ServerPort(server, f"client-{index}", size, *(() if total is None else (offset, total))))
        offset += size
    return made


@pytest.fixture(params=["direct", "messages", "lines"])
def make(request):
    """``make(policy, **options)`` gives a server that is closed at the end."""
    servers = []

    def make(policy, capacity=8, **options):
        options.setdefault("concurrent", request.param != "direct")
        options["shared_memory"] = request.param == "lines"
        servers.append(InferenceServer(policy, SPEC, capacity, **options))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def test_every_env_gets_its_own_action_and_keeps_its_own_state(make):
    one, two = ports(make(CountingPolicy(), timeout=0.0), [2, 3])
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


def test_no_step_of_the_policy_is_for_more_than_max_batch(make):
    counted = []
    policy = CountingPolicy()
    server = make(policy, max_batch=2, timeout=0.0, on_batch=counted.append)
    policy.batches.clear()
    (port,) = ports(server, [5])
    for step in range(2):
        port.request(observe([100, 200, 300, 400, 500]), np.full(5, step == 0))
        action, extras = port.answer()
        assert action.tolist() == [100 + step, 210 + step, 320 + step, 430 + step, 540 + step]
        assert extras["pair"][0][:, 0].tolist() == [100, 200, 300, 400, 500]
    assert policy.batches == [2, 2, 1] * 2
    server.close()  # the last answer is sent before its batch is counted
    assert counted == [2, 2, 1] * 2


def test_envs_of_one_actor_may_come_by_two_clients(make):
    first, second = ports(make(CountingPolicy(), timeout=0.0), [2, 2], total=4)
    for port, expected in ((first, [0, 10]), (second, [20, 30])):
        port.request(observe([0, 0]), np.ones(2, bool))
        assert port.answer()[0].tolist() == expected


def test_a_failure_of_the_policy_reaches_who_asked_and_is_over_then(make):
    policy = CountingPolicy()
    (port,) = ports(make(policy), [2])
    policy.fail = True
    port.request(observe([1, 2]), np.ones(2, bool))
    with pytest.raises((ArithmeticError, InferenceError), match="cannot divide"):
        port.answer()
    policy.fail = False
    port.request(observe([1, 2]), np.ones(2, bool))
    assert port.answer()[0].tolist() == [1, 12]


def test_a_wrong_observation_is_named(make):
    (port,) = ports(make(CountingPolicy()), [2])
    with pytest.raises(ValueError, match=r"observation/x: got shape \(3, 2\), expected \(2, 2\)"):
        port.request(observe([1, 2, 3]), np.ones(2, bool))
        port.answer()
    with pytest.raises(ValueError, match=r"observation/x: .* got dtype float64, expected float32"):
        port.request({**observe([1, 2]), "x": np.ones((2, 2))}, np.ones(2, bool))
        port.answer()


# The batches of these tests are made by a thread.
in_threads = pytest.mark.parametrize("make", ["messages", "lines"], indirect=True)


def ask(port, envs=2):
    port.request(observe([0] * envs), np.ones(envs, bool))


BATCHES = {
    # name: (options, clients that ask, of 3 with 2 envs each; sizes of the batches)
    "everybody that is connected": ({"timeout": 60.0}, [0, 1, 2], [[6]]),
    "max_batch at once": ({"timeout": 60.0, "max_batch": 4}, [0, 1], [[4]]),
    "one after the timeout": ({"timeout": 0.05}, [1], [[2]]),
    "no more than max_batch": ({"timeout": 0.0, "max_batch": 4}, [0, 1, 2], [[2, 4], [4, 2]]),
}


@pytest.mark.parametrize("case", BATCHES)
@in_threads
def test_when_a_batch_is_fired(case, make):
    options, asking, expected = BATCHES[case]
    gate = threading.Event()
    gate.set()
    policy = CountingPolicy(gate)
    server = make(policy, **options)
    clients = ports(server, [2, 2, 2])
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
def test_who_has_gone_is_not_waited_for(make, monkeypatch):
    monkeypatch.setattr(inference_server, "PATIENCE_S", HOUR_S)
    policy = CountingPolicy()
    server = make(policy, timeout=HOUR_S)
    clients = ports(server, [2, 2])
    policy.batches.clear()
    ask(clients[0])
    until(lambda: server._waiting)  # For the other one.
    clients[1].close()
    clients[0].answer()
    assert policy.batches == [2]


@pytest.mark.parametrize("patience", [0.0, 0.2], ids=["before the request", "since the request"])
@in_threads
def test_a_client_that_is_silent_for_long_is_not_waited_for(make, monkeypatch, patience):
    monkeypatch.setattr(inference_server, "PATIENCE_S", patience)
    policy = CountingPolicy()
    clients = ports(make(policy, timeout=HOUR_S), [2, 2])
    policy.batches.clear()
    ask(clients[0])
    clients[0].answer()
    assert policy.batches == [2]


@in_threads
def test_a_client_that_comes_back_gets_its_rows_and_a_fresh_state(make):
    server = make(CountingPolicy(), capacity=2, timeout=0.0)
    for _ in range(2):
        (port,) = ports(server, [2])
        for step in range(2):
            port.request(observe([0, 0]), np.zeros(2, bool))
            assert port.answer()[0].tolist() == [step, 10 + step]
        port.close()


@in_threads
def test_a_request_of_an_earlier_life_of_a_client_is_in_no_batch(make):
    policy = CountingPolicy()
    server = make(policy, timeout=HOUR_S)
    earlier, other = ports(server, [2, 2])
    ask(earlier)
    (again,) = ports(server, [2])
    with pytest.raises(RuntimeError, match="connected again"):
        earlier.answer()
    policy.batches.clear()
    for port in (again, other):
        ask(port)
    assert [port.answer()[0].tolist() for port in (again, other)] == [[0, 10], [0, 10]]
    assert policy.batches == [4]


@in_threads
def test_a_request_before_the_answer_to_the_last_one_is_an_error(make):
    server = make(CountingPolicy(), timeout=HOUR_S)
    (other,) = ports(server, [2])
    number = server.connect("twice", 2, 0).number
    one, two = (server.futures.act(number, observe([0, 0]), np.ones(2, bool)) for _ in range(2))
    with pytest.raises(RuntimeError, match=r"twice.*before the answer"):
        two.result(10)
    with pytest.raises(RuntimeError, match=r"not connected.*restarts"):
        server.act(0, observe([0, 0]), np.ones(2, bool))
    ask(other)
    assert one.result(10)[0].tolist() == other.answer()[0].tolist() == [0, 10]


@in_threads
def test_parameters_that_cannot_be_had_are_an_error_of_the_next_request(make):
    class Variables:
        version = 3

        def update(self, wait=False):
            raise TimeoutError("the variable source is silent")

    (port,) = ports(make(CountingPolicy(), variables=Variables(), timeout=0.0), [2])
    ask(port)
    port.answer()
    ask(port)
    with pytest.raises((InferenceError, TimeoutError), match="the variable source is silent"):
        port.answer()


@in_threads
def test_a_closed_server_is_an_error_and_no_wait(make):
    server = make(CountingPolicy())
    (port,) = ports(server, [2])
    server.close()
    with pytest.raises((InferenceError, RuntimeError, OSError), match="clos"):
        ask(port)
        port.answer()


only_lines = pytest.mark.parametrize("make", ["lines"], indirect=True)


@only_lines
def test_an_actor_that_was_killed_is_not_waited_for(make, monkeypatch):
    monkeypatch.setattr(inference_server, "PATIENCE_S", HOUR_S)
    policy = CountingPolicy()
    gone, other = ports(make(policy, timeout=HOUR_S), [2, 2])
    policy.batches.clear()
    ask(gone)
    gone._line.close()  # as the kernel does when the process ends
    ask(other)
    other.answer()  # of the batch of both, or of a batch of its own
    ask(other)
    other.answer()
    assert policy.batches[-1] == 2


@only_lines
def test_an_actor_whose_server_is_gone_ends_as_its_program_does(make, monkeypatch):
    server = make(CountingPolicy(), timeout=HOUR_S)
    waits, _ = ports(server, [2, 2])
    ask(waits)
    server.close()
    with pytest.raises(RuntimeError, match="was closed"):
        waits.answer()
    with pytest.raises(InferenceError, match=r"was closed.*restarts"):
        ask(waits)
    stopped = threading.Event()
    stopped.set()
    monkeypatch.setattr(launch, "stop_event", lambda: stopped)
    with pytest.raises(launch.ProgramStopped):
        ask(waits)


@only_lines
def test_actors_elsewhere_call_the_node_and_rows_are_gone_with_the_server(make):
    server = make(CountingPolicy(), timeout=0.0)
    connect = server.connect
    (here,) = ports(server, [2])
    server.connect = lambda *args: connect(*args)._replace(block="/dev/null/elsewhere")
    there = ServerPort(server, "elsewhere", 2)
    server.connect = lambda *args: connect(*args)._replace(folder="/elsewhere")
    further = ServerPort(server, "further", 2)
    assert here._line is not None and there._line is further._line is None
    for port in (here, there, further):
        ask(port)
        assert port.answer()[0].tolist() == [0, 10]
    block = connect("last", 2).block
    assert os.path.exists(block)
    server.close()
    assert not os.path.exists(os.path.dirname(block))


@pytest.mark.parametrize(
    ("options", "words"),
    [
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
    slots.block.first[a.begin + 1] = True
    slots.act([a, b])
    assert slots.read(a)[0].tolist() == [200, 1] and slots.read(a)[1]["h"].ravel().tolist() == [200, 1]
    assert slots.read(b)[0].tolist() == [100, 101]
    slots.block.first[:] = False
    assert slots.act([c, a], 3) == [3, 1]
    assert slots.read(a)[0].tolist() == [300, 101] and slots.read(c)[0].tolist() == [200, 201]
    assert slots.act([b, c], 3) == [3, 1]
    assert slots.read(b)[0].tolist() == [200, 201] and slots.read(c)[0].tolist() == [300, 301]


def test_a_server_that_is_silent_is_named_and_not_called_after_the_stop(monkeypatch):
    silent = types.SimpleNamespace(
        connect=lambda *args: InferenceConnection(0, Rows(0, 2), 2, ((), (), ())),
        futures=types.SimpleNamespace(act=lambda *args: concurrent.futures.Future()),
    )
    port = ServerPort(silent, "actor", 2, timeout=0.01)
    ask(port)
    with pytest.raises(InferenceError, match=r"no answer for 'actor' within 0\.01 s"):
        port.answer()
    stopped = threading.Event()
    stopped.set()
    monkeypatch.setattr(launch, "stop_event", lambda: stopped)
    port.close()
