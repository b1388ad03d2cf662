"""From a step to the gradient, joined by hand: an actor in one process, replay and a learner in another.

    python examples/by_hand.py

`make_program` joins the same parts, and adds budgets, metrics, checkpoints, restarts, and an orderly stop.
"""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
from multiprocessing.connection import Connection

from agents.dqn import DQN, DQNConfig
from framework import environments, replay, specs
from framework.actors import EnvironmentLoop, PolicyActor
from framework.variables import VariableBlock, VariableClient

ENVIRONMENT = "gymnasium:CartPole-v1"


def act(pipe: Connection, agent: DQN, block: VariableBlock) -> None:
    """The actor's process: steps four envs at once and writes what happens to the replay server."""
    environment = environments.make(ENVIRONMENT, num_envs=4, seed=1)
    spec = specs.make_environment_spec(environment)
    networks = agent.make_networks(spec)
    policy = agent.make_policy(networks)
    adder = agent.make_adder(replay.Client(pipe.recv()), spec)  # It maps the server's shared memory.
    actor = PolicyActor(policy, adder, VariableClient(block, networks, policy), num_envs=4, seed=1)
    timestep = environment.reset()
    actor.observe_first(timestep)
    try:
        while True:
            action = actor.select_action(timestep.observation)
            timestep = environment.step(action)
            actor.observe(action, timestep)  # The adder waits here if the learner is too far behind.
            actor.update()  # Copies the parameters if there are newer ones.
    except replay.ServerClosed:
        return  # The learner has finished.


def main(learner_steps: int = 3_000) -> float:
    """Trains DQN and returns its greedy return: the mean of 20 episodes."""
    agent = DQN(DQNConfig(min_replay_size=500, samples_per_insert=24.0, epsilon_start=0.1, epsilon_end=0.1))
    spec = specs.make_environment_spec(environments.make(ENVIRONMENT))
    networks = agent.make_networks(spec)
    learner = agent.make_learner(networks, spec)
    with tempfile.TemporaryDirectory() as folder:
        block = VariableBlock(learner.parameters(), f"{folder}/block")  # The actor maps this file.
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        actor = context.Process(target=act, args=(theirs, agent, block), daemon=True)
        actor.start()  # The server comes later: a fork would not copy its threads.
        server = replay.Server(agent.make_tables(spec))
        ours.send(server.address)
        client = server.localhost_client()
        dataset = agent.make_dataset(client)
        for step, sample in enumerate(itertools.islice(dataset, learner_steps), 1):
            result = learner.step(sample)  # Loss, gradient, optimizer step, target networks.
            if result.priorities is not None:
                client.update_priorities("replay", sample.info.key, result.priorities)
            block.publish(step, learner.parameters())
        dataset.close()  # Gives back the batches that it had drawn ahead.
        server.stop()
        actor.join(timeout=30)
    evaluator = PolicyActor(agent.make_policy(networks, evaluation=True), num_envs=20)
    loop = EnvironmentLoop(environments.make(ENVIRONMENT, num_envs=20, seed=2), evaluator)
    return float(loop.run_episodes(20)["episode_return"].mean())


if __name__ == "__main__":
    print(f"greedy return: {main():.1f}")
