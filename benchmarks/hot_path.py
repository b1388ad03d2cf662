"""Which of the project's functions a step passes on its way to the gradient: how many, in how many files.

    python benchmarks/hot_path.py serial     a DQN program on the serial engine, from learner step 300 to 600
    python benchmarks/hot_path.py served     actor, replay server in shared memory, dataset and learner, six
                                             seconds, after six seconds of warm-up

Counts distinct functions (by qualified name) of framework, agents and launch that were called at all.
"""

from __future__ import annotations

import collections
import os
import pathlib
import sys
import threading
import time
from types import FrameType
from typing import Any

import framework
import launch
from agents.dqn import DQN, DQNConfig
from framework import environments, replay, specs
from framework.actors import EnvironmentLoop, PolicyActor
from framework.programs import RunConfig, make_program
from framework.replay.client import ServedClient
from framework.workers.learner_worker import LearnerWorker

ROOT = pathlib.Path(framework.__file__).parent.parent
ENVIRONMENT = "gymnasium:CartPole-v1"
PACKAGES = ("framework", "agents", "launch")

seen: collections.Counter[tuple[str, str]] = collections.Counter()
counting = False


def profile(frame: FrameType, event: str, argument: Any) -> None:
    code = frame.f_code
    if not counting or event != "call" or code.co_name.startswith("<"):
        return
    path = pathlib.Path(code.co_filename)
    if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES:
        seen[str(path.relative_to(ROOT)), getattr(code, "co_qualname", code.co_name)] += 1


def report(name: str) -> None:
    for file, count in sorted(collections.Counter(file for file, _ in seen).items()):
        print(f"{count:4} {file}")
    print(f"{name}: {len(seen)} functions in {len({file for file, _ in seen})} files")


def serial() -> None:
    steps, original = 0, LearnerWorker.step

    def step(worker: LearnerWorker) -> None:
        nonlocal steps
        global counting
        steps += 1
        if steps in (300, 600):
            counting = steps == 300
            sys.setprofile(profile if counting else None)
        return original(worker)

    LearnerWorker.step = step  # type: ignore[method-assign]
    config = RunConfig(envs_per_actor=4, max_env_steps=6000, evaluate_period=None)
    launch.launch(make_program(DQN(DQNConfig(min_replay_size=500)), ENVIRONMENT, config), engine="serial")
    report("serial")


def served() -> None:
    global counting
    threading.setprofile(profile)
    agent = DQN(DQNConfig(min_replay_size=200))
    environment = environments.make(ENVIRONMENT, num_envs=4, seed=1)
    spec = specs.make_environment_spec(environment)
    server = replay.Server(agent.make_tables(spec))
    assert server.address is not None
    adder = agent.make_adder(ServedClient(server.address), spec)
    policy = agent.make_policy(agent.make_networks(spec))
    loop = EnvironmentLoop(environment, PolicyActor(policy, adder, num_envs=4, seed=1))
    learner = agent.make_learner(agent.make_networks(spec), spec)

    def act() -> None:
        while True:
            loop.step()

    def learn() -> None:
        assert server.address is not None
        for sample in agent.make_dataset(ServedClient(server.address)):
            learner.step(sample)
            learner.parameters()

    for target in (act, learn):
        threading.Thread(target=target, daemon=True).start()
    time.sleep(6)
    counting = True
    time.sleep(6)
    counting = False
    report("served")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    {"serial": serial, "served": served}[sys.argv[1]]()
