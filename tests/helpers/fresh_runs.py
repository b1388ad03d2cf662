"""Folders of runs with fresh parameters, without training and without an environment."""

import torch

from framework.checkpoints import torch_part
from framework.programs import RunConfig
from framework.runs.run_folder import RunFolder


def make(path, agent, spec, step=1000, environment="gymnasium:CartPole-v1", seed=0):
    """Adds a checkpoint of ``agent`` with new parameters to the run in ``path``, which it makes."""
    config = RunConfig(max_env_steps=2000, directory=str(path)).decided({})
    folder = RunFolder.describe(agent, environment, config, spec)
    folder.save()
    torch.manual_seed(seed)
    learner = agent.make_learner(agent.make_networks(spec), spec)
    counts = {"counts": {"env_steps": step}}
    parts = {"learner": {"learner": learner.save(), "steps": 1}, "counter": counts}
    folder.checkpointer.save(step, {name: torch_part(state) for name, state in parts.items()})
    return path
