"""Folders of runs with fresh parameters, without training."""

import torch

from agents.random_actions import RandomActions
from framework.checkpoints import torch_part
from framework.commands import building
from framework.loggers import JSONLLogger
from framework.programs import RunConfig
from framework.runs.run_folder import RunFolder


def make(
    path, agent, spec=None, steps=(1000,), returns=(), environment="gymnasium:CartPole-v1", new=0, **settings
):
    """Makes the run in ``path``; adds a checkpoint for each of ``steps``, and evaluations of ``returns``.

    The parameters are those of the seed ``new``.
    """
    config = RunConfig(**{"max_env_steps": 2000, "directory": str(path), **settings}).decided({})
    spec = spec or building.environment_spec(agent, environment, config)
    folder = RunFolder.describe(agent, environment, config, spec)
    folder.save()
    torch.manual_seed(new)
    parts = {}
    if steps and not isinstance(agent, RandomActions):
        learner = agent.make_learner(agent.make_networks(spec), spec)
        parts["learner"] = torch_part({"learner": learner.save(), "steps": 1})
    for step in steps:
        counter = torch_part({"counts": {"env_steps": step}})
        folder.checkpointer.save(step, {**parts, "counter": counter})
    if returns:
        with JSONLLogger(folder.metrics) as log:
            for number, value in enumerate(returns, 1):
                log.write({"label": "evaluator", "env_steps": 100 * number, "episode_return": value})
    return folder
