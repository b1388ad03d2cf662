"""What an actor's envs play after the run is resumed, or the actor is restarted."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from helpers.node_clients import make_client

import launch
from agents.impala import IMPALAConfig
from agents.random_actions import RandomActions
from examples.flows import IMPALAPlan
from framework import environments, specs
from framework.actors.inference_client import ServerPort
from framework.environments.testing import FakeEnvironment
from framework.programs import RunConfig, make_program
from framework.runs.services import Counter, Monitor
from framework.workers.actor_worker import ActorWorker
from framework.workers.inference_worker import InferenceWorker
from framework.workers.worker import Setup, derive_seed


class Levels(gymnasium.Env):
    """Episodes of five steps, of a level that the file `log` gets."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, log):
        self._log = log

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._time, level = 0, self.np_random.random(2, np.float32)
        with open(self._log, "a") as log:
            log.write(f"{level}\n")
        return level, {}

    def step(self, action):
        self._time += 1
        return np.zeros(2, np.float32), 1.0, self._time == 5, False, {}


PLAN = IMPALAPlan(IMPALAConfig(unroll_length=4, hidden_sizes=(4,)))


@pytest.mark.parametrize("agent", [RandomActions(), PLAN], ids=["actors", "a plan"])
def test_a_resumed_run_plays_other_episodes_than_at_its_beginning(tmp_path, agent):
    played = []
    for number, steps in enumerate((60, 120, 180)):
        log = tmp_path / f"{number}.txt"
        settings = {"envs_per_actor": 2, "max_env_steps": steps, "evaluate_period": None}
        config = RunConfig(directory=str(tmp_path / "run"), **settings)
        launch.launch(make_program(agent, functools.partial(Levels, str(log)), config), "threads")
        played.append(set(log.read_text().splitlines()))
        assert len(played[-1]) > 5
    assert not (played[0] & played[1] or played[0] & played[2] or played[1] & played[2])


@pytest.mark.parametrize("inference", ["local", "alternating+server"])
@pytest.mark.parametrize("steps", [None, 0, 40])
def test_only_environments_of_an_actor_that_has_made_steps_get_another_seed(steps, inference, monkeypatch):
    monkeypatch.setattr(launch, "get_node_context", lambda: SimpleNamespace(engine="serial"))
    state = None if steps is None else {"actor": None, "steps": steps}
    seeds = []

    def make(num_envs, seed):
        seeds.append(seed)
        return environments.make(FakeEnvironment, num_envs=num_envs, seed=seed)

    spec = specs.make_environment_spec(environments.make(FakeEnvironment))
    setup = Setup(RandomActions(), make, spec, RunConfig(envs_per_actor=2, inference=inference))
    services = {"counter": make_client(Counter()), "monitor": make_client(Monitor())}
    services["checkpointer"] = SimpleNamespace(get={"actor-1": state}.get)
    if inference != "local":
        services["inference"] = SimpleNamespace(
            connect=lambda *_: SimpleNamespace(number=0, folder=None), futures=None
        )
    worker = ActorWorker(setup, replay=None, learner=None, index=1, seed=7, **services)
    expected = derive_seed(7, "after-40") if steps else 7
    halves = [derive_seed(expected, f"half-{index}") for index in range(2)]
    assert seeds == ([expected] if inference == "local" else halves)
    assert worker.save()["steps"] == (steps or 0)


class Kept(dict):
    """A checkpointer."""

    put = dict.__setitem__


def test_no_life_has_the_seed_of_one_that_ended_before_its_first_row(monkeypatch):
    monkeypatch.setattr(launch, "get_node_context", lambda: SimpleNamespace(engine="serial"))
    for name in ("register_stop_handler", "make_failure_handler", "shared_memory_directory"):
        monkeypatch.setattr(launch, name, lambda *_: None)
    environment, seeds, kept = environments.make(FakeEnvironment, num_envs=2), [], Kept()
    spec = specs.make_environment_spec(environment)
    setup = Setup(
        RandomActions(), lambda _, seed: seeds.append(seed) or environment, spec, RunConfig(envs_per_actor=2)
    )
    services = {"learner": None, "monitor": Monitor(), "checkpointer": kept}
    for life in range(1, 4):
        worker = ActorWorker(setup, replay=None, counter=Counter(), **services)
        server = InferenceWorker(setup, **services)
        for _ in range(2):
            worker.step()
        port = ServerPort(server, "actor-0", 2)
        port.step(specs.zeros(spec.observations, (2,)), port.initial_state(2))
        assert kept["inference"] == {"steps": 2 * life, "batches": life}
    assert len(set(seeds)) == 3
