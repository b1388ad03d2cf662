"""The hindsight node reads episodes and writes transitions with two goals each."""

import pathlib
import runpy

import numpy as np

import launch
from agents.dqn import DQNConfig
from framework import environments, specs
from framework.programs import RunConfig, make_program
from framework.replay import EmbeddedClient

HINDSIGHT = runpy.run_path(str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "hindsight.py"))
BITS = HINDSIGHT["BITS"]
CONFIG = DQNConfig(n_step=1, min_replay_size=2, batch_size=2, samples_per_insert=1.0)


def test_an_episode_is_written_with_its_goal_and_with_the_one_it_reached():
    agent = HINDSIGHT["HindsightDQN"](CONFIG)
    environment = environments.make(HINDSIGHT["BitFlipping"], num_envs=1, seed=3)
    spec = specs.make_environment_spec(environment)
    client = EmbeddedClient(agent.make_tables(spec), concurrent=False)
    node = HINDSIGHT["Hindsight"](agent, spec, replay=client)
    assert not node.ready()
    adder = agent.make_adder(client, spec)
    timestep = environment.reset()
    adder.add_first(timestep)
    start = timestep.observation[0].copy()
    for action in range(BITS):  # Flips all bits, which the goal does not ask for.
        timestep = environment.step(np.array([action]))
        adder.add(np.array([action]), timestep)
    assert node.ready()
    node.step()
    assert not node.ready() and client.server_info()["episodes"].current_size == 0
    data = client.sample_batch("replay", 200).data
    goals = {tuple(start[BITS:]): [0.0] * BITS, tuple(1 - start[:BITS]): [0.0] * (BITS - 1) + [1.0]}
    assert {tuple(each) for each in data.observation[:, BITS:]} == set(goals)
    for observation, action, reward, discount in zip(*data[:4], strict=True):
        assert reward == goals[tuple(observation[BITS:])][action] and discount == 1 - reward
    node.close()


def test_the_learner_reads_what_the_node_writes():
    agent = HINDSIGHT["HindsightDQN"](CONFIG)
    program = make_program(agent, HINDSIGHT["BitFlipping"], RunConfig(envs_per_actor=2, max_env_steps=100))
    result = launch.launch(program, engine="serial")
    # Each env step is a transition of its own goal and of the one that was reached; some repeat a state.
    samples_per_step = CONFIG.samples_per_insert * 2 / CONFIG.batch_size
    assert result["learner_steps"] > 0.8 * 100 * samples_per_step
