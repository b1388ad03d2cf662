"""Clients as envs: an application asks for actions and reports rewards."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import shutil
import socket
import ssl
import struct
import subprocess
import threading

import numpy as np
import pytest
from background import Background

import launch
from agents.random_actions import RandomActions
from framework import core, environments
from framework.actors import EnvironmentLoop, PolicyActor
from framework.environments.remote.external import ExternalEnvironment
from framework.environments.remote.external_client import ExternalClient
from framework.programs import RunConfig, make_program

ROOT = pathlib.Path(__file__).resolve().parents[2]
OBSERVATION = {"shape": [2], "dtype": "float32"}
ACTION = {"shape": [], "dtype": "int64", "num_values": 3}


@pytest.fixture
def token(tmp_path):
    path = tmp_path / "clients.token"
    path.touch(mode=0o600)
    path.write_text("secret\n")
    return str(path)


@pytest.fixture
def playing(port, token):
    """`with playing(*applications) as environment`: each application has a thread, which ends by itself."""

    @contextlib.contextmanager
    def play_with(*applications, num_envs=1, **options):
        playing = [Background(application) for application in applications]
        address = f"tcp://127.0.0.1:{port}"
        with ExternalEnvironment(address, num_envs, token=token, timeout=60.0, **options) as environment:
            yield environment
            for each in playing:
                each.running(30)

    return play_with


def connect(port):
    return ExternalClient(f"127.0.0.1:{port}", "secret", OBSERVATION, ACTION)


def connect_as_soon_as_possible(port):
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port), timeout=30)


def play(client, rewards, truncated=False):
    """An episode with these rewards; returns the actions. Its observations count its steps."""
    actions = []
    client.start_episode()
    for time, reward in enumerate(rewards):
        actions.append(client.get_action([time, -time]))
        client.log_reward(reward / 2)
        client.log_reward(reward / 2)
    client.end_episode([len(rewards), -len(rewards)], truncated)
    return actions


def test_episodes_of_a_client_become_time_steps(port, playing):
    actions = []

    def application():
        with connect(port) as client:
            actions.append(play(client, [1.0, 2.0]))
            actions.append(play(client, [3.0], truncated=True))

    with playing(application) as environment:
        assert environment.spec.actions.num_values == 3
        timesteps = [environment.reset(), *(environment.step(np.array([action])) for action in (1, 2, 0, 2))]
    rows = [
        (int(t.step_type[0]), float(t.reward[0]), float(t.discount[0]), *t.observation[0].tolist())
        for t in timesteps
    ]
    assert rows == [(0, 0, 1, 0, 0), (1, 1, 1, 1, -1), (2, 2, 0, 2, -2), (0, 0, 1, 0, 0), (2, 3, 1, 1, -1)]
    assert actions == [[1, 2], [2]]
    with pytest.raises(environments.EnvironmentFault, match="it is closed"):
        environment.reset()


def test_a_lost_client_is_replaced_by_another(port, playing):
    def leaves_and_comes_back():
        with connect(port) as client:
            client.start_episode()
            client.get_action([0.0, 0.0])
            client.log_reward(1.0)
        with connect(port) as client:
            play(client, [5.0])

    with playing(leaves_and_comes_back) as environment:
        environment.reset()
        timestep = environment.step(np.array([0]))
        assert (timestep.step_type[0], timestep.reward[0], timestep.discount[0]) == (environments.FIRST, 0, 1)
        timestep = environment.step(np.array([0]))
        assert (timestep.step_type[0], timestep.reward[0]) == (environments.LAST, 5)
        assert environment.malformed == 0


@pytest.mark.parametrize("ends", [False, True])
def test_a_reset_after_a_failed_step_begins_an_episode(port, ends, playing):
    has_failed = threading.Event()

    def application():
        with connect(port) as client:
            client.start_episode()
            client.get_action([0, 0])
            assert has_failed.wait(60)
            client.log_reward(5.0)
            if ends:
                client.end_episode([1, 1])
                client.start_episode()
            client.get_action([2, 2])
            client.log_reward(3.0)
            client.end_episode([3, 3])

    with playing(application) as environment:
        environment.reset()
        environment._timeout = 0.1
        with pytest.raises(environments.EnvironmentFault, match="silent"):
            environment.step(np.array([1]))
        environment._timeout = 60.0
        has_failed.set()
        timestep = environment.reset()
        assert (timestep.step_type[0], timestep.reward[0]) == (environments.FIRST, 0)
        np.testing.assert_array_equal(timestep.observation, [[2, 2]])
        timestep = environment.step(np.array([1]))
        assert (timestep.step_type[0], timestep.reward[0]) == (environments.LAST, 3)


def test_an_episode_that_goes_on_over_a_reset_is_not_counted(port, playing):
    over = threading.Event()

    def application(length):
        with contextlib.suppress(ConnectionError), connect(port) as client:
            while not over.is_set():
                play(client, [1.0] * length)

    with playing(*(functools.partial(application, length) for length in (5, 8)), num_envs=2) as external:
        environment = environments.FrameStack(external, 2)
        loop = EnvironmentLoop(environment, PolicyActor(Still(), num_envs=2), should_update=False)
        for _ in range(3):
            played = loop.run_episodes(2)
            assert sorted(played["episode_return"]) == [5.0, 8.0] == sorted(played["episode_length"])
        # The second episode of five steps goes on over the first reset; the next reset finds none begun.
        assert loop.num_dropped == 1
        over.set()
        external.close()


class Still(core.Policy):
    def initial_state(self, batch_size):
        return ()

    def step(self, observation, state):
        return np.zeros(len(observation), np.int64), (), ()


HELLO = {"type": "hello", "protocol": 1, "token": "secret"}
ADMITTED = [{**HELLO, "observation": OBSERVATION, "action": ACTION}]
BEGUN = [*ADMITTED, {"type": "start_episode"}]
BAD = {
    "a wrong token": [{**HELLO, "token": "wrong"}],
    "no JSON": [b"{]\n"],
    "no object": [b"[1]\n"],
    "no hello": [{"type": "start_episode"}],
    "no specs": [HELLO],
    "another protocol": [{**HELLO, "protocol": 2}],
    "an action without an episode": [*ADMITTED, {"type": "get_action", "observation": [0, 0]}],
    "an observation of another shape": [*BEGUN, {"type": "get_action", "observation": [0]}],
    "an observation that is not finite": [*BEGUN, {"type": "get_action", "observation": [0, 1e999]}],
    "an observation of text": [*BEGUN, {"type": "get_action", "observation": ["0", "1"]}],
    "no observation": [*BEGUN, {"type": "get_action"}],
    "an unknown type": [*BEGUN, {"type": "dance"}],
    "a token of half a character": [{**HELLO, "token": "\ud800"}],
    "a type that nests too deep to show": [b'{"type": ' + b"[" * 900 + b"]" * 900 + b"}\n"],
    "a dtype that numpy evaluates": [
        {**HELLO, "observation": {"shape": [], "dtype": "i4,,f"}, "action": ACTION}
    ],
}


@pytest.mark.parametrize("messages", list(BAD.values()), ids=list(BAD))
def test_what_does_not_fit_ends_that_connection_only(port, messages, playing):
    answers = []

    def application():
        with connect_as_soon_as_possible(port) as bad:
            for message in messages:
                bad.sendall(message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n")
            answers.extend(json.loads(line) for line in bad.makefile())
        with connect(port) as client:
            play(client, [1.0])

    with playing(application) as environment:
        assert environment.reset().step_type.tolist() == [0]
        assert environment.step(np.array([0])).reward.tolist() == [1]
        assert (environment.malformed, environment.defects) == (1, 0)
    assert answers[-1]["type"] == "error"


def test_a_mistake_of_ours_is_logged_and_raised_if_it_repeats(port, caplog, monkeypatch, playing):
    answers = []

    def application():
        with contextlib.suppress(OSError):
            for _ in range(3):
                with connect(port) as client, pytest.raises(ValueError) as refused:
                    client.start_episode()
                    client.get_action([0, 0])
                answers.append(str(refused.value))

    def broken(*args):
        raise ValueError("a mistake of ours")

    monkeypatch.setattr(ExternalEnvironment, "_put_step", broken)
    with playing(application) as environment:
        with pytest.raises(ValueError, match="a mistake of ours"):
            environment.reset()
        assert (environment.malformed, environment.defects) == (0, 3)
    assert caplog.text.count("in broken") == 3
    assert answers == ["The run failed on this message. Its log has the error."] * 2


@pytest.mark.parametrize("rewards", [[float("inf")], [1e39], [3e38, 3e38], ["1"], [None]])
def test_a_reward_that_float32_does_not_hold_ends_that_connection_only(port, rewards, playing):
    def application():
        with connect(port) as client, pytest.raises(ValueError, match="reward: got"):
            client.start_episode()
            client.get_action([0, 0])
            for reward in rewards:
                client._send("log_reward", reward=reward)
            client.get_action([1, 1])
        with connect(port) as client:
            play(client, [3e38])

    with playing(application) as environment:
        environment.reset()
        assert environment.step(np.array([0])).step_type.tolist() == [environments.FIRST]
        assert environment.malformed == 1
        assert environment.step(np.array([0])).reward.tolist() == [np.float32(3e38)]


def test_without_encryption_only_this_machine_may_connect(token):
    with pytest.raises(ValueError, match="certificate"):
        ExternalEnvironment("tcp://0.0.0.0:5556", token=token)


def test_too_few_clients_are_an_error_that_says_how_to_start_them(port, token):
    with pytest.raises(environments.EnvironmentFault, match=r"0 of 1 envs in 0\.1 s.*clients\.token"):
        ExternalEnvironment(f"tcp://127.0.0.1:{port}", token=token, timeout=0.1)


@contextlib.contextmanager
def applications(port, *evaluations):
    """A client for each of these values of `evaluation`, each of which plays episodes of return 3."""
    over = threading.Event()

    def application(evaluation):
        address = f"127.0.0.1:{port}"
        while not over.is_set():
            with (
                contextlib.suppress(ConnectionError),
                ExternalClient(address, "secret", OBSERVATION, ACTION, evaluation, timeout=1.0) as client,
            ):
                while True:
                    play(client, [1.0, 2.0])

    playing = [Background(application, evaluation) for evaluation in evaluations]
    try:
        yield
    finally:
        over.set()
        for each in playing:
            each.running(30)


def random_actions(port, tmp_path, **settings):
    """A program of 40 env steps, with an evaluation of two episodes at the end."""
    settings |= {"max_env_steps": 40, "evaluate_period": 40, "num_evaluation_episodes": 2}
    config = RunConfig(directory=str(tmp_path), envs_per_actor=2, **settings)
    program = make_program(RandomActions(), f"external:tcp://127.0.0.1:{port}", config)
    return launch.launch(program, engine="serial")


def test_a_program_acts_and_evaluates_with_clients(port, token, tmp_path):
    with applications(port, False, False, True, True):
        result = random_actions(port, tmp_path)
    assert result["env_steps"] == 40 and result["episode_return"] == 3


def test_an_evaluator_without_clients_of_its_own_says_which_it_needs(port, token, tmp_path):
    needed = r'0 of 2 envs.*clients with "evaluation": true'
    with applications(port, False, False), pytest.raises(launch.NodeError, match=needed):
        random_actions(port, tmp_path, evaluation_options={"timeout": 0.2})


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_a_client_in_javascript_is_an_env_and_comes_back_after_a_kill(port, token):
    command = ["node", str(ROOT / "examples" / "external_cartpole.js"), str(port), token]
    first = subprocess.Popen(command)
    try:
        with ExternalEnvironment(f"tcp://127.0.0.1:{port}", token=token, timeout=60.0) as environment:
            environment.reset()
            for _ in range(50):  # Always to the right: episodes of some 10 steps.
                environment.step(np.array([1]))
            while environment.step(np.array([0])).step_type[0] != environments.MID:
                pass
            first.kill()
            first.wait(30)
            second = subprocess.Popen(command)
            try:
                timestep = environment.step(np.array([0]))
            finally:
                second.kill()
                second.wait(30)
        assert timestep.step_type[0] == environments.FIRST  # In the middle of an episode.
    finally:
        first.kill()
        first.wait(30)


@pytest.fixture
def certificate(tmp_path):
    """A file with a certificate of this host and its key, and a context that trusts it."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    both, only = tmp_path / "both.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", str(both)]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-out", str(only)]
    subprocess.run(command, check=True, capture_output=True)
    with open(both, "a") as file:
        file.write(only.read_text())
    return str(both), ssl.create_default_context(cafile=str(only))


def test_a_client_with_tls_plays_and_one_without_is_not_admitted(port, certificate, playing):
    certificate, trusted = certificate

    def application():
        with pytest.raises(ConnectionError):
            ExternalClient(f"127.0.0.1:{port}", "secret", OBSERVATION, ACTION, timeout=0.5)
        with pytest.raises(ssl.SSLCertVerificationError):  # At once: it does not trust the certificate.
            strict = ssl.create_default_context()
            ExternalClient(f"127.0.0.1:{port}", "secret", OBSERVATION, ACTION, timeout=600.0, tls=strict)
        with ExternalClient(f"127.0.0.1:{port}", "secret", OBSERVATION, ACTION, tls=trusted) as client:
            play(client, [4.0])

    with playing(application, certificate=certificate) as environment:
        assert environment.reset().step_type.tolist() == [0]
        assert environment.step(np.array([0])).reward.tolist() == [4]


def test_a_stranger_that_resets_its_connection_does_not_end_the_run(port, certificate, monkeypatch, playing):
    certificate, trusted = certificate
    has_left, accept = threading.Event(), ExternalEnvironment._accept

    def accept_late(environment):
        assert has_left.wait(60)
        accept(environment)

    def application():
        stranger = connect_as_soon_as_possible(port)
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.close()
        has_left.set()
        with ExternalClient(f"127.0.0.1:{port}", "secret", OBSERVATION, ACTION, tls=trusted) as client:
            play(client, [4.0])

    monkeypatch.setattr(ExternalEnvironment, "_accept", accept_late)
    with playing(application, certificate=certificate) as environment:
        assert environment.reset().step_type.tolist() == [0]
        assert environment.step(np.array([0])).reward.tolist() == [4]


def test_connections_that_say_nothing_keep_no_client_out(port, playing):
    answers = []

    def application():
        with contextlib.ExitStack() as silent:
            for _ in range(65):
                peer = silent.enter_context(connect_as_soon_as_possible(port))
            peer.settimeout(2.0)
            peer.sendall(json.dumps(ADMITTED[0]).encode() + b"\n")
            answers.append(peer.recv(1000))
        with connect(port) as client:
            play(client, [1.0])

    with playing(application) as environment:
        environment.reset()
        assert environment.step(np.array([0])).reward.tolist() == [1]
    assert json.loads(answers[0])["type"] == "welcome"


def test_a_silent_client_is_named(port, playing):
    done = threading.Event()

    def application():
        with connect(port) as client:
            client.start_episode()
            done.wait(60)

    with playing(application) as environment:
        environment._timeout = 0.1
        with pytest.raises(environments.EnvironmentFault, match="Envs 0 are connected and silent"):
            environment.reset()
        done.set()


def test_a_client_whose_message_has_no_answer_is_told_why_it_was_refused():
    has_ended = threading.Event()

    def run(listener):
        connection, _ = listener.accept()
        with connection, connection.makefile() as lines:
            lines.readline()
            connection.sendall(b'{"type": "welcome"}\n')
            lines.readline()
            connection.sendall(b'{"type": "error", "message": "the reason"}\n')
        has_ended.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        Background(run, listener)
        with connect(listener.getsockname()[1]) as client:
            client.start_episode()
            assert has_ended.wait(30)
            with pytest.raises(ValueError, match="the reason"):
                while True:  # Until the end of the connection has arrived.
                    client.log_reward(1.0)


def test_integers_of_an_observation_are_not_rounded(port, playing):
    def make_client():
        return ExternalClient(f"127.0.0.1:{port}", "secret", {"shape": [1], "dtype": "uint8"}, ACTION)

    def application():
        with make_client() as client, contextlib.suppress(ValueError):
            client.start_episode()
            taken.append(client.get_action([0.7]))
        with make_client() as client, contextlib.suppress(ConnectionError):
            client.start_episode()
            client.get_action([2.0])

    taken = []
    with playing(application) as environment:
        assert environment.reset().observation.tolist() == [[2]]
        assert environment.malformed == 1
        environment.close()
    assert not taken
