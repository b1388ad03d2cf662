"""Environments of servers that connect, each in a process of its own."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
import sys
import threading

import dm_env
import gymnasium
import numpy as np
import pytest
from background import Background
from helpers.two_agents import TwoAgents

import launch
from agents.random_actions import RandomActions
from framework import environments
from framework.commands import cli
from framework.environments import testing
from framework.environments.remote import environment_server
from framework.programs import RunConfig, make_program
from launch.rpc.sockets import CurveKeys, make_client_socket

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def serve(port, tmp_path):
    """Starts servers, which end with the test."""
    key = tmp_path / "run" / "environments.key"
    key.parent.mkdir()
    CurveKeys.from_file(str(key))
    with contextlib.ExitStack() as stack:

        def start(*arguments, program=(sys.executable, environment_server.__file__), num_envs=1):
            command = [*program, *arguments, "--connect", f"127.0.0.1:{port}", "--key", str(key)]
            process = subprocess.Popen([*command, "--num-envs", str(num_envs)], cwd=ROOT)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            return process

        start.key, start.address = str(key), f"tcp://127.0.0.1:{port}"
        yield start


def make(serve, num_envs, **options):
    return environments.make(
        f"remote:{serve.address}", num_envs=num_envs, seed=1, options={"key": serve.key, **options}
    )


def test_the_envs_of_servers_become_one_batch(serve):
    for _ in range(2):
        serve("gymnasium:CartPole-v1", num_envs=2)
    with make(serve, 3) as environment, make(serve, 1) as other:
        assert environment.spec == environments.make("gymnasium:CartPole-v1").spec
        assert environment.reset().step_type.tolist() == [0, 0, 0]
        assert other.reset().step_type.tolist() == [0]
        kinds = []
        for _ in range(60):
            timestep = environment.step(np.ones(3, np.int64))
            kinds.append(timestep.step_type)
            assert timestep.observation.shape == (3, 4)
        kinds = np.array(kinds)
        for env in range(3):  # Always to the right: an episode ends within 12 steps.
            lasts = np.flatnonzero(kinds[:-1, env] == environments.LAST)
            assert len(lasts) >= 4
            assert (kinds[lasts + 1, env] == environments.FIRST).all()
    with make(serve, 4) as environment:  # The envs were given back.
        assert environment.reset().observation.shape == (4, 4)


def test_a_killed_server_is_replaced_and_its_episodes_end(serve):
    killed, _ = serve("gymnasium:CartPole-v1"), serve("gymnasium:CartPole-v1")
    with make(serve, 2) as environment:
        environment.reset()
        environment.step(np.zeros(2, np.int64))
        killed.kill()
        serve("gymnasium:CartPole-v1")
        timestep = environment.step(np.zeros(2, np.int64))
        if (timestep.step_type == environments.MID).all():  # It answered before it was killed.
            timestep = environment.step(np.zeros(2, np.int64))
        assert sorted(timestep.step_type.tolist()) == [environments.FIRST, environments.MID]
        begun = timestep.step_type == environments.FIRST
        assert timestep.reward[begun] == 0 and timestep.discount[begun] == 1


class _Faulty:
    """A gymnasium environment whose second step raises an error."""

    error: BaseException = RuntimeError("\x1b[2J the wheel came off")

    def __init__(self):
        self._env = gymnasium.make("CartPole-v1")
        self.observation_space, self.action_space = self._env.observation_space, self._env.action_space
        self.reset, self.close, self._steps = self._env.reset, self._env.close, 0

    def step(self, action):
        self._steps += 1
        if self._steps == 2:
            raise self.error
        return self._env.step(action)


@pytest.fixture
def serve_here(serve, port):
    """Starts servers in threads, which end with the test."""
    stop, threads = threading.Event(), []

    def start(make_one, num_envs=1, key=None, if_refused=lambda error: None):
        def work():
            try:
                environment_server.serve(
                    environment_server.EnvironmentsOf(make_one),
                    *([f"127.0.0.1:{port}"], key or serve.key, num_envs),
                    stopped=stop.is_set,
                )
            except environment_server.Refused as error:
                if_refused(error)

        threads.append(threading.Thread(target=work))
        threads[-1].start()

    yield start
    stop.set()
    for thread in threads:
        thread.join(60)


def cartpole():
    return gymnasium.make("CartPole-v1")


class _Exits(_Faulty):
    error = SystemExit(0)


@pytest.mark.parametrize(
    ("faulty", "told"),
    [(_Faulty, r"RuntimeError: \\x1b\[2J the wheel"), (_Exits, r"(?s)SystemExit: 0.*in step")],
)
def test_an_error_of_a_remote_env_is_a_fault_here_with_its_traceback(serve, serve_here, faulty, told):
    serve_here(faulty)
    with make(serve, 1) as environment:
        environment.reset()
        environment.step(np.zeros(1, np.int64))
        with pytest.raises(environments.EnvironmentFault, match=told):
            environment.step(np.zeros(1, np.int64))


class _Waiting(gymnasium.Wrapper):
    """CartPole whose steps wait for `go`."""

    go = threading.Event()

    def step(self, action):
        assert self.go.wait(60)
        return super().step(action)


def test_a_reset_after_a_failed_step_takes_no_answers_of_that_step(serve, serve_here):
    _Waiting.go.set()
    serve_here(_Faulty)
    serve_here(lambda: _Waiting(cartpole()))
    with make(serve, 2, timeout=60.0) as environment:
        environment.reset()
        environment.step(np.zeros(2, np.int64))
        _Waiting.go.clear()
        with pytest.raises(environments.EnvironmentFault, match="the wheel came off"):
            environment.step(np.zeros(2, np.int64))
        _Waiting.go.set()
        assert environment.reset().step_type.tolist() == [environments.FIRST] * 2
        assert environment.step(np.zeros(2, np.int64)).step_type.tolist() == [environments.MID] * 2
        assert environment.malformed == 0
    with pytest.raises(environments.EnvironmentFault, match="it is closed"):
        environment.step(np.zeros(2, np.int64))


class _TwoAgents(TwoAgents):
    """Episodes of two steps; each agent observes its action."""

    def reset(self):
        self._steps = 0
        return dm_env.restart(self.of_both(np.zeros(1, np.float32)))

    def step(self, action):
        self._steps += 1
        end = dm_env.termination if self._steps == 2 else dm_env.transition
        timestep = end(self.of_both(1.0), {name: np.full(1, action[name], np.float32) for name in action})
        return timestep._replace(discount=self.of_both(timestep.discount))


def test_a_remote_env_may_have_several_agents(serve, serve_here):
    serve_here(_TwoAgents, num_envs=2)
    with make(serve, 2, timeout=60.0) as environment:
        timestep = environment.reset()
        for kind in (environments.FIRST, environments.MID, environments.LAST, environments.FIRST):
            assert timestep.step_type.tolist() == [kind] * 2
            assert [of.tolist() for of in timestep.agents.values()] == [[kind] * 2] * 2
            timestep = environment.step({"agent_0": np.array([1, 0]), "agent_1": np.array([0, 1])})
        assert timestep.observation["agent_0"].tolist() == [[1], [0]]


def test_a_server_with_another_key_is_not_admitted(serve, serve_here, tmp_path):
    other = str(tmp_path / "other.key")
    CurveKeys.from_file(other)
    serve_here(cartpole, key=other)
    with pytest.raises(environments.EnvironmentFault, match="0 of 1 envs"):
        make(serve, 1, timeout=1.5)


def acrobot():
    return gymnasium.make("Acrobot-v1")


def test_a_server_with_other_specs_is_refused_and_told_why(serve, serve_here):
    refusals = []

    def then(make_one):
        return lambda error: (refusals.append(str(error)), serve_here(make_one))

    serve_here(cartpole, if_refused=then(acrobot))
    serve_here(acrobot, if_refused=then(cartpole))
    with make(serve, 2) as environment:  # Of the kind that came first.
        assert environment.reset().step_type.tolist() == [0, 0]
    assert len(refusals) == 1 and "expected EnvironmentSpec" in refusals[0]


def test_a_program_trains_in_remote_envs(serve, serve_here, tmp_path):
    serve_here(cartpole, num_envs=4)
    settings = {"max_env_steps": 100, "evaluate_period": 100, "num_evaluation_episodes": 2}
    config = RunConfig(directory=str(tmp_path / "run"), envs_per_actor=2, **settings)
    program = make_program(RandomActions(), f"remote:{serve.address}", config)
    result = launch.launch(program, engine="serial")
    assert result["env_steps"] == 100 and 8 <= result["episode_return"] <= 500


def test_the_server_is_one_file_to_copy(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve-environment", "--export", str(tmp_path / "server.py")])
    assert ended.value.code == 0 and "Python 3.8" in capsys.readouterr().out
    assert (tmp_path / "server.py").read_text() == pathlib.Path(environment_server.__file__).read_text()


BAD = {
    "no msgpack": b"\xc1",
    "no list": environment_server.msgpack.packb({"kind": "hello"}),
    "another protocol": environment_server.pack("hello", 99, 1, {}),
    "no specs": environment_server.pack("hello", environment_server.PROTOCOL, 1, {"observations": 3}),
    "no envs": environment_server.pack("hello", environment_server.PROTOCOL, 0, {}),
    "too few parts": environment_server.pack("hello"),
    "many lists": b"\xdd\x00\x10\x00\x00" + b"\x90" * (1 << 20),
    "a dtype that numpy evaluates": environment_server.pack(
        *("hello", environment_server.PROTOCOL, 1),
        {"observations": {"dtype": "i4,,f"}, "actions": {"dtype": "<i8"}},
    ),
}


def test_what_does_not_fit_ends_that_connection_only(serve, serve_here):
    keys = CurveKeys.from_file(serve.key)

    def send_all():
        for frame in BAD.values():
            peer = make_client_socket(serve.address, keys)
            peer.send(frame)
            assert peer.poll(60_000)
            answers.append(environment_server.unpack(peer.recv())[0])
            peer.close()
        serve_here(cartpole)

    answers = []
    sending = Background(send_all)
    with make(serve, 1) as environment:
        assert environment.reset().step_type.tolist() == [0]
        assert (environment.malformed, environment.defects) == (len(BAD), 0)
    sending.result(60)
    assert answers == ["refuse"] * len(BAD)


class _Shows(gymnasium.Env):
    """Its observation is always `value`, whatever its space is; its reward is an array of one number."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, space, value):
        self.observation_space, self._value = space, value

    def reset(self, *, seed=None, options=None):
        return self._value, {}

    def step(self, action):
        return self._value, [1.0], False, False, {}


PIXELS, NUMBER = gymnasium.spaces.Box(0, 255, (2, 3), np.uint8), gymnasium.spaces.Discrete(3, start=1)
SHOWN = {
    "transposed": (PIXELS, np.zeros((3, 2), np.uint8), None),
    "floats for integers": (PIXELS, np.ones((2, 3)), None),
    "too large for the dtype": (PIXELS, np.full((2, 3), 300), None),
    "text": (NUMBER, "two", None),
    "integers of another size": (PIXELS, np.full((2, 3), 200), np.full((1, 2, 3), 200, np.uint8)),
    "one number in an array": (NUMBER, np.array([3]), np.array([2])),
    "double precision": (gymnasium.spaces.Box(-1, 1, (1,)), np.ones(1), np.ones((1, 1), np.float32)),
}


@pytest.mark.parametrize(("space", "value", "sent"), SHOWN.values(), ids=SHOWN)
def test_a_server_sends_observations_that_fit_their_space_and_refuses_others(space, value, sent):
    batch = environment_server.EnvironmentsOf(lambda: _Shows(space, value))(1, None)
    if sent is None:
        with pytest.raises(ValueError, match=r"observation: got .*, expected .*agree with its spec"):
            batch.reset()
        return
    np.testing.assert_array_equal(batch.reset()[-1], sent)
    assert batch.reset()[-1].dtype == sent.dtype
    assert batch.step([np.zeros(1, np.int64)])[1].tolist() == [1]


def test_a_callable_with_a_parameter_seed_gets_the_seed_of_its_env():
    server = environment_server.EnvironmentsOf(lambda seed=0: testing.FakeEnvironment(seed=seed))

    def first(seed):
        batch = server(2, seed)
        try:
            return batch.reset()[-1]
        finally:
            batch.close()

    one, again, other = first(7), first(7), first(8)
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other) and not np.array_equal(one[0], one[1])


def test_an_attribute_seed_that_is_no_method_is_not_called():
    env = _Shows(PIXELS, np.zeros((2, 3), np.uint8))
    env.seed = 5
    batch = environment_server.EnvironmentsOf(lambda: env)(1, 7)
    assert batch.reset()[0].tolist() == [environments.FIRST]


class _Counting(gymnasium.Wrapper):
    """CartPole that counts how many of it are open."""

    num_open = 0

    def __init__(self):
        super().__init__(cartpole())
        type(self).num_open += 1

    def close(self):
        type(self).num_open -= 1
        super().close()


def test_what_does_not_fit_ends_one_session_of_a_server_only(serve):
    frames = [
        b"\xc1",
        environment_server.pack("refuse", "a reason"),
        environment_server.pack("refuse"),
        environment_server.pack("take", 1, None),
        environment_server.pack("step", [b"?"]),
    ]
    stop = threading.Event()
    arguments = environment_server.EnvironmentsOf(_Counting), [serve.address.partition("//")[2]], serve.key, 2
    server = threading.Thread(
        target=environment_server.serve, args=arguments, kwargs={"stopped": stop.is_set}
    )
    server.start()
    try:
        with make(serve, 1, timeout=60.0) as environment, make(serve, 1, timeout=60.0) as other:
            environment.reset(), other.reset()
            for frame in frames:
                (identity,) = environment._servers
                environment._socket.send_multipart([identity, frame])
                timestep = environment.step(np.zeros(1, np.int64))
                assert timestep.step_type.tolist() == [environments.FIRST]  # Of the same server.
            assert other.step(np.zeros(1, np.int64)).step_type.tolist() == [environments.MID]
    finally:
        stop.set()
        server.join(60)
    assert _Counting.num_open == 0


def test_a_server_that_is_lost_after_its_answer_is_replaced_within_the_step(serve, serve_here):
    """The newcomer answers the reset, and stays in step with the others."""
    envs = environment_server.EnvironmentsOf(cartpole)
    keys = CurveKeys.from_file(serve.key)
    hello = environment_server.pack("hello", environment_server.PROTOCOL, 1, envs.spec)

    def receive(peer):
        assert peer.poll(60_000)
        return environment_server.unpack(peer.recv())[0]

    def answer(peer, expected, kind):
        assert receive(peer) == expected
        rows = [np.full(1, kind, np.int64), np.zeros(1, np.float32), np.ones(1, np.float32), observation]
        peer.send(environment_server.pack("timestep", environment_server.to_bytes(rows)))

    observation = np.zeros((1, 4), np.float32)

    def play():
        peers = [make_client_socket(serve.address, keys) for _ in range(2)]
        for peer in peers:
            peer.send(hello)
            assert receive(peer) == "take"
        for peer in peers:
            answer(peer, "reset", environments.FIRST)
        lost, slow = peers
        answer(lost, "step", environments.MID)
        lost.send(b"?")
        assert receive(lost) == "refuse"
        serve_here(cartpole)
        for _ in range(2):
            answer(slow, "step", environments.MID)
        for peer in peers:
            peer.close()

    playing = Background(play)
    with make(serve, 2, timeout=60.0) as environment:
        environment.reset()
        timestep = environment.step(np.zeros(2, np.int64))
        assert sorted(timestep.step_type.tolist()) == [environments.FIRST, environments.MID]
        timestep = environment.step(np.zeros(2, np.int64))
        assert timestep.step_type.tolist() == [environments.MID] * 2
        assert environment.malformed == 1
        playing.result(60)
