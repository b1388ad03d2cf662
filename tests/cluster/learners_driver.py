"""A driver: a program with two learners, on two hosts. Prints its result."""

from __future__ import annotations

import json
import sys

import launch
from agents.dqn import DQN, DQNConfig
from framework.programs import RunConfig, make_program


def train(directory):
    """A whole program with a learner on each host."""
    settings = {"num_learners": 2, "max_learner_steps": 40, "evaluate_period": None}
    spread = {"learner": {"strategy": "STRICT_SPREAD"}}
    run = RunConfig(directory=directory, resources=spread, **settings)
    agent = DQN(DQNConfig(min_replay_size=50, batch_size=16, samples_per_insert=4.0, insert_burst=64))
    return launch.launch(
        make_program(agent, "gymnasium:CartPole-v1", run), "ray", directory=directory, heartbeat_timeout=None
    )


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1])))
