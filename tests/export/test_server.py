"""A policy over HTTP: what it answers, what it refuses, and that new checkpoints lose no request."""

import http.client
import json
import re
import socket
import threading
import types

import fresh_runs
import numpy as np
import pytest
from test_export import BOTH, FAMILIES, SAMPLING, VECTOR, observations

from agents.sac import SAC, SACConfig
from framework import specs
from framework.environments.testing import make_spec
from framework.programs import load_policy

uvicorn = pytest.importorskip("uvicorn", reason="needs the extra serve")
PIXELS = {"pixels": specs.BoundedArray((4, 4, 1), np.uint8, 0, 255), "code": specs.DiscreteArray(3)}


class Client:
    """A server in a thread, and requests to it."""

    def __init__(self, app):
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        options = {"sockets": [listener]}
        self.thread = threading.Thread(target=self.server.run, kwargs=options, daemon=True)
        self.thread.start()

    def ask(self, path, body=None, method=None):
        """The status and the text of the answer; a body that is not bytes is sent as JSON."""
        is_raw = body is None or isinstance(body, (bytes, types.GeneratorType))
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            content = body if is_raw else json.dumps(body)
            connection.request(method or ("GET" if body is None else "POST"), path, content)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def json(self, *arguments):
        status, text = self.ask(*arguments)
        assert status == 200, text
        return json.loads(text)

    def close(self):
        self.server.should_exit = True
        self.thread.join(timeout=30.0)
        assert not self.thread.is_alive()


@pytest.fixture
def serve(tmp_path):
    """Serves fresh runs; returns clients."""
    from framework.export.server import PolicyService

    clients = []

    def start(agent, spec, **options):
        run = fresh_runs.make(tmp_path / "run", agent, spec).path
        clients.append(Client(PolicyService(lambda: load_policy(run), **options).app))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


def test_it_acts_as_the_loaded_policy_with_a_memory_that_the_client_keeps(serve, tmp_path):
    client, policy, state = serve(*FAMILIES["r2d2"]), load_policy(tmp_path / "run"), None
    for step in range(4):
        given = observations(policy.spec, 3, step)
        answer = client.json("/act", {"observations": given.tolist(), "state": state})
        assert sorted(answer) == ["actions", "state"]
        assert answer["actions"] == policy(given, np.full(3, step == 0)).tolist()
        state = answer["state"]
        np.testing.assert_allclose(state[0], policy._state[1][0].numpy(), atol=1e-6)
    shapes = client.json("/spec")
    assert shapes["state"] == [[None, 6], [None, 6]] and shapes["actions"]["num_values"] == 3


def test_a_seed_decides_the_sample_whatever_else_is_in_the_batch(serve):
    client = serve(*SAMPLING["td3"])
    given = [[0.1, 0.2, 0.3, 0.4]] * 2

    def act(seed):
        return client.json("/act", {"observations": given, "seed": seed})["actions"]

    first, others = act(5), []
    threads = [threading.Thread(target=lambda seed=seed: others.append(act(seed))) for seed in range(8)]
    for thread in threads:
        thread.start()
    np.testing.assert_allclose(act(5), first, atol=1e-6)
    for thread in threads:
        thread.join(timeout=30.0)
    assert len({str(np.round(each, 4)) for each in others}) == 8 and first[0] != first[1]
    assert act(None)[0] == act(None)[1] != first[0]


WRONG = {
    "text": (b"{", 422, "body: got b'{', expected JSON"),
    "deep": (b"[" * 15_000, 422, "expected JSON: maximum recursion"),
    "list": ([1], 422, "got list, expected an object with observations"),
    "key": ({"observations": {}, "sed": 1}, 422, r"got \['observations', 'sed'\], expected an object"),
    "part": ({"observations": {"pixels": []}}, 422, r"got \['pixels'\], expected an object with \['code', "),
    "ragged": ({"pixels": [[1], [2, 3]]}, 422, "observations/pixels: got .*, expected lists of numbers"),
    "string": ({"pixels": ["a"]}, 422, "observations/pixels: got .*, expected lists of numbers"),
    "shape": ({"pixels": [[1, 2]]}, 422, r"pixels: got shape \(1, 2\), expected \(1, 4, 4, 1\)"),
    "range": ({"pixels": [[[[256]] * 4] * 4]}, 422, "pixels: got 256 to 256, expected 0 to 255"),
    "float": ({"pixels": [[[[0.5]] * 4] * 4]}, 422, "pixels: got dtype float64, expected uint8"),
    "code": ({"code": [7]}, 422, "code: got 7, expected 0 to 2"),
    "rows": ({"code": [1, 1]}, 422, r"got shape \(2,\), expected \(1,\)|expected \(2, 4, 4, 1\)"),
    "none": ({"pixels": [], "code": []}, 422, "got shape|got 0 rows, expected 1 to 1024"),
    "state": ({"state": [[1.0]]}, 422, r"state: got \[\[1.0\]\], expected null"),
    "seed": ({"seed": -1}, 422, "seed: got -1, expected a whole number"),
    "size": (b" " * 20_001, 413, "body: got 20001 bytes, expected at most 20000"),
}


def test_what_does_not_fit_is_refused_with_what_was_expected(serve):
    client = serve(SAC(SACConfig(hidden_sizes=(8,))), make_spec(PIXELS, BOTH.actions), max_body=20_000)
    good = {"pixels": [[[[0]] * 4] * 4], "code": [1]}
    for name, (body, status, text) in WRONG.items():
        if isinstance(body, dict) and "observations" not in body:
            of_body = {key: body[key] for key in ("state", "seed") if key in body}
            body = {"observations": {**good, **{k: v for k, v in body.items() if k in good}}, **of_body}
        got, answer = client.ask("/act", body)
        assert got == status and re.search(text, json.loads(answer)["error"]), (name, answer)
    assert client.ask("/act", (part for part in [b" " * 15_000] * 2))[0] == 413  # Without a length.
    assert client.json("/act", {"observations": good})["state"] is None
    assert client.ask("/act")[0] == 405
    _, text = client.ask("/metrics")
    assert 'repertory_requests_total{code="200"} 1\n' in text
    assert 'repertory_requests_total{code="422"} 15\n' in text and "\nrepertory_rows_total 1\n" in text
    assert 'repertory_request_seconds_bucket{le="+Inf"} 18\n' in text


def test_numbers_that_are_not_finite_are_refused(serve):
    client = serve(*SAMPLING["ppo"])
    for value in ("NaN", "Infinity", "1e400", "1e39", "9" * 5000):
        status, text = client.ask("/act", f'{{"observations": [[0, 0, 0, {value}]]}}'.encode())
        assert status == 422 and "expected" in json.loads(text)["error"], text


@pytest.mark.cpu_budget(40)
def test_new_checkpoints_are_taken_without_a_lost_request(serve, tmp_path):
    agent, spec = SAMPLING["ppo"]
    client, run = serve(agent, spec, reload_seconds=0.1), tmp_path / "run"
    codes, stopped = [], threading.Event()
    given = {"observations": observations(make_spec(VECTOR, BOTH.actions), 3).tolist()}

    def ask():
        while not stopped.is_set():
            codes.append(client.ask("/act", given)[0])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        old = client.json("/act", given)
        for step in (1500, 2000):
            fresh_runs.make(run, agent, spec, [step], new=step)
            waited = threading.Event()
            for _ in range(300):
                if client.json("/health")["step"] == step or waited.wait(0.1):
                    break
    finally:
        stopped.set()
        for thread in threads:
            thread.join(timeout=30.0)
    assert client.json("/health")["step"] == 2000
    assert set(codes) == {200} and len(codes) > 20
    policy = load_policy(run)
    actions = client.json("/act", given)["actions"]
    expected = policy(np.float32(given["observations"]))
    np.testing.assert_allclose(actions["arm"], expected["arm"], atol=1e-5)
    assert np.abs(np.subtract(actions["arm"], old["actions"]["arm"])).max() > 1e-4
    assert "repertory_reloads_total 2\n" in client.ask("/metrics")[1]
