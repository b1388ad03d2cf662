"""Programs under a real Launchpad, with a real dm-reverb and Acme's environment loop (Python 3.10)."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import types

import dm_env
import numpy as np
import pytest

import launch as lp
from framework import replay
from framework.types import Transition

INSTALLED = importlib.util.find_spec("launchpad") is not None
needs_launchpad = pytest.mark.skipif(not INSTALLED, reason="dm-launchpad is not installed")
ENGINES = ("launchpad_mt", "launchpad")


@pytest.mark.skipif(INSTALLED, reason="dm-launchpad is installed")
@pytest.mark.parametrize("engine", ENGINES)
def test_without_launchpad_the_error_says_what_is_missing(engine):
    program = lp.Program("test")
    program.add_node(lp.PyNode(print), label="main")
    with pytest.raises(lp.LaunchError, match=r"dm-launchpad \(Python 3.10\)"):
        lp.start(program, engine)


def tables():
    return [replay.Table.queue("queue", 100)]


def write_items(client, count):
    with client.batch_writer() as writer:
        for number in range(count):
            rows = writer.append("steps", {"x": np.array([number, number + 1])})
            leaf, after = (writer.slice("steps", "x", rows[at : at + 1]) for at in (0, 1))
            writer.create_items("queue", Transition(leaf, (), (), (), after))
            writer.release("steps", rows)


def read_items(client, count):
    data = client.sample_batch("queue", count).data
    assert type(data) is Transition
    lp.stop((os.getpid(), data.observation.tolist(), data.next_observation.tolist()))


def replay_program(backend):
    program = lp.Program("test")
    node = program.add_node(lp.ReplayNode(tables, backend=backend), label="replay")
    program.add_node(lp.PyNode(write_items, node, 5), label="writer")
    program.add_node(lp.PyNode(read_items, node, 5), label="reader")
    return program


@needs_launchpad
@pytest.mark.real
@pytest.mark.parametrize("backend", ["framework.replay", "framework.replay.dm_reverb"])
@pytest.mark.parametrize("engine", ENGINES)
def test_replay_nodes(engine, backend):
    pid, values, after = lp.launch(replay_program(backend), engine, stop_timeout=60.0)
    assert pid != os.getpid()
    assert values == [0, 1, 2, 3, 4] and after == [1, 2, 3, 4, 5]


@needs_launchpad
def test_the_graph_is_a_launchpad_program():
    import launchpad

    from launch.engines.launchpad.driver import build

    units = [["replay", "replay-0", None], ["actor", "actor-0", None], ["actor", "actor-1", None]]
    made = build({"name": "graph", "socket": "/nowhere", "units": units})
    assert isinstance(made, launchpad.Program)
    kinds = {label: [type(node).__name__ for node in nodes] for label, nodes in made.groups.items()}
    assert kinds == {"replay": ["PyNode"], "actor": ["PyNode", "PyNode"]}


def fail_or_wait(fails):
    if fails:
        raise RuntimeError("said no")
    lp.wait_for_stop()


SCRIPT = """
import sys
import launchpad
from launch.engines.launchpad import to_launchpad
import test_deepmind_programs as programs

program = to_launchpad(getattr(programs, sys.argv[1])(sys.argv[2]), stop_timeout=60.0, directory=sys.argv[3])
launchpad.launch(program, terminal="output_to_files").wait()
"""
LAUNCH_TYPES = {"threads": "local_mt", "processes": "local_mp"}


def failing_program(_):
    program = lp.Program("test")
    for fails, label in ((False, "waits"), (True, "fails")):
        program.add_node(lp.PyNode(fail_or_wait, fails), label=label)
    return program


def run_script(kind, make, argument, folder):
    """Runs a user's own script on Launchpad; its exit code, and all that it and its nodes have printed."""
    paths = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "LAUNCHPAD_LOGGING_DIR": f"{folder}/out"}
    flag = f"--lp_launch_type={LAUNCH_TYPES[kind]}"
    command = [sys.executable, "-c", SCRIPT, make, argument, f"{folder}/run", flag]
    with open(folder / "script.log", "w") as log:
        code = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=600).returncode
    logs = [folder / "script.log", *(folder / "out").rglob("0")]
    return code, "".join(each.read_text() for each in logs)


@needs_launchpad
@pytest.mark.parametrize(
    "kind", ["threads", pytest.param("processes", marks=[pytest.mark.release, pytest.mark.timeout(600)])]
)
def test_a_failure_ends_a_script_of_launchpads_with_the_nodes_error(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "sockets"))
    (tmp_path / "sockets").mkdir(mode=0o700)
    code, printed = run_script(kind, "failing_program", "", tmp_path)
    assert code != 0 and "node 'fails-0' failed with RuntimeError: said no" in printed
    assert os.listdir(tmp_path / "sockets") == []


AGENTS = {
    "dqn": {"min_replay_size": 200, "batch_size": 32, "samples_per_insert": 8.0, "insert_burst": 64},
    "ppo": {},
    "impala": {},
}


def agent_program(name):
    from framework import programs
    from framework.runs.registry import make_agent

    agent = make_agent(name, **AGENTS[name])
    settings = {"num_actors": 2, "max_env_steps": 4000, "evaluate_period": 4000, "num_evaluation_episodes": 3}
    return programs.make_program(agent, "gymnasium:CartPole-v1", programs.RunConfig(**settings))


@needs_launchpad
@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.cpu_budget(200)
@pytest.mark.parametrize("name", AGENTS)
def test_agents_run_as_processes_of_a_script(name, tmp_path):
    code, printed = run_script("processes", "agent_program", name, tmp_path)
    assert code == 0, printed
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "finished"
    assert {node["state"] for node in status["nodes"]} <= {"returned", "closed"}, status["nodes"]
    assert len({node["pid"] for node in status["nodes"]}) == len(status["nodes"])


@needs_launchpad
@pytest.mark.cpu_budget(60)
def test_dqn_trains_on_cartpole():
    from agents.dqn import DQN, DQNConfig
    from framework import programs

    settings = {"min_replay_size": 200, "batch_size": 32, "samples_per_insert": 8.0, "insert_burst": 64}
    agent = DQN(DQNConfig(**settings, prioritized=True, epsilon_decay=1000))
    run = {"num_actors": 2, "max_env_steps": 4000, "evaluate_period": 4000, "num_evaluation_episodes": 10}
    config = programs.RunConfig(**run, replay_backend="reverb")
    program = programs.make_program(agent, "gymnasium:CartPole-v1", config)
    result = lp.launch(program, "launchpad_mt", stop_timeout=60.0)
    assert result["env_steps"] == 4000
    assert result["learner_steps"] >= 900
    assert result["episode_return"] > 40  # Random actions get 22, untrained networks 9.


class Corridor(dm_env.Environment):
    """Five steps of reward 1."""

    def reset(self):
        self._t = 0
        return dm_env.restart(np.zeros(3, np.float32))

    def step(self, action):
        self._t += 1
        observation = np.full(3, self._t, np.float32)
        return (dm_env.termination if self._t == 5 else dm_env.transition)(1.0, observation)

    def observation_spec(self):
        return dm_env.specs.Array((3,), np.float32)

    def action_spec(self):
        return dm_env.specs.DiscreteArray(2)


def drive(loop_factory):
    """Ten episodes of our DQN actor by ``loop_factory(environment, actor)``; what replay has then."""
    from agents.dqn import DQN, DQNConfig
    from framework import environments, specs
    from framework.actors import PolicyActor
    from framework.actors.acme import AcmeActor

    agent = DQN(DQNConfig(n_step=2, min_replay_size=1))
    spec = specs.make_environment_spec(environments.make(Corridor, num_envs=1))
    client = replay.EmbeddedClient(agent.make_tables(spec), concurrent=False)
    policy = agent.make_policy(agent.make_networks(spec))
    actor = PolicyActor(policy, adder=agent.make_adder(client, spec), num_envs=1, seed=0)
    loop_factory(Corridor(), AcmeActor(actor))
    return client


@pytest.mark.skipif(importlib.util.find_spec("acme") is None, reason="dm-acme is not installed")
def test_acme_environment_loop_drives_our_actor():
    import acme

    def run(environment, actor):
        acme.EnvironmentLoop(environment, actor).run(num_episodes=10)

    client = drive(run)
    # Windows of 2 steps that begin and end with the episode: 5 steps make 6 items.
    assert client.server_info()["replay"].current_size == 60
    sample = client.sample_batch("replay", 256)
    last = sample.data.discount == 0
    assert last.any() and np.array_equal(sample.data.next_observation[last][:, 0], np.full(last.sum(), 5.0))


def test_the_adapter_adds_and_removes_the_env():
    def run(environment, actor):
        for _ in range(10):
            timestep = environment.reset()
            actor.observe_first(timestep)
            while not timestep.last():
                action = actor.select_action(timestep.observation)
                assert np.shape(action) == () and action in (0, 1)
                timestep = environment.step(action)
                actor.observe(action, next_timestep=timestep)
                actor.update()

    assert drive(functools.partial(run)).server_info()["replay"].current_size == 60


# name: (the adder, the leaves of its items for five steps of one episode with rewards 1 to 5)
ACME_ADDERS = {
    "transitions": (
        lambda acme, client: acme.NStepTransitionAdder(client, 2, 1.0),
        [
            [0.0, 11, 1.0, 1.0, 1.0],
            [0.0, 11, 3.0, 1.0, 2.0],
            [1.0, 12, 5.0, 1.0, 3.0],
            [2.0, 13, 7.0, 1.0, 4.0],
            [3.0, 14, 9.0, 0.0, 5.0],
            [4.0, 15, 5.0, 0.0, 5.0],
        ],
    ),
    "sequences": (
        lambda acme, client: acme.SequenceAdder(client, sequence_length=3, period=3),
        [
            [[0.0, 1.0, 2.0], [11, 12, 13], [1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [True, False, False]],
            [[3.0, 4.0, 5.0], [14, 15, 0], [4.0, 5.0, 0.0], [1.0, 0.0, 0.0], [False, False, False]],
        ],
    ),
    "episodes": (
        lambda acme, client: acme.EpisodeAdder(client, max_sequence_length=10),
        [
            [
                [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
                [11, 12, 13, 14, 15, 0],
                [1.0, 2.0, 3.0, 4.0, 5.0, 0.0],
                [1.0, 1.0, 1.0, 1.0, 0.0, 0.0],
                [True, False, False, False, False, False],
            ]
        ],
    ),
}


@pytest.mark.skipif(importlib.util.find_spec("acme") is None, reason="dm-acme is not installed")
@pytest.mark.parametrize("name", ACME_ADDERS)
def test_acme_adders_write_to_our_replay(monkeypatch, name):
    if importlib.util.find_spec("jax") is None:  # of which they need a few functions that numpy has
        monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(numpy=np))
        monkeypatch.setitem(sys.modules, "jax.numpy", np)
    acme_adders = importlib.import_module("acme.adders.reverb")
    make_adder, expected = ACME_ADDERS[name]
    name, fifo = acme_adders.DEFAULT_PRIORITY_TABLE, replay.selectors.Fifo
    limiter = replay.rate_limiters.MinSize(1)
    table = replay.Table(name, fifo(), fifo(), 100, limiter, max_times_sampled=1)
    with replay.Server([table], port=None) as server:
        client = replay.Client(f"localhost:{server.port}", local=False)
        adder = make_adder(acme_adders, client)
        adder.add_first(dm_env.restart(np.float32(0)))
        for t in range(1, 6):
            kind = dm_env.StepType.LAST if t == 5 else dm_env.StepType.MID
            step = dm_env.TimeStep(kind, np.float32(t), np.float32(t < 5), np.float32(t))
            adder.add(np.int64(10 + t), step)
        adder.reset()
        size = client.server_info()[table.name].current_size
        found = [
            [np.asarray(leaf).tolist() for leaf in sample.data]
            for sample in client.sample(table.name, size, emit_timesteps=False)
        ]
    assert found == expected
