"""What an agent's tests look at when a field of its config changes; see config_fields.py."""

from __future__ import annotations

import numpy as np
import torch
from batches import learn

import launch
from framework import specs
from framework.core import Progress
from framework.programs import RunConfig, make_program


def after_three_steps(learner, make_batch, env_steps=1):
    """Rates, priorities and parameters after steps on ``make_batch(seed)``, as one vector.

    Each step is ``env_steps`` env steps after the one before.
    """
    seen = []
    for seed in range(3):
        learner.env_steps = env_steps * seed
        result = learn(learner, make_batch(seed))
        seen += [float(result.metrics.get("learning_rate", 0.0))]
        seen += [] if result.priorities is None else [float(each) for each in result.priorities]
    parameters = [p.detach().flatten() for p in learner.networks.parameters()]
    return torch.cat([torch.tensor(seen, dtype=torch.float32), *parameters]).double().numpy()


def explored(agent, networks, spec):
    """How often each of two envs does what it would not have done greedily, after one env step."""
    policy = agent.make_policy(networks)
    policy.progress = Progress(version=0, env_steps=1)
    policy.seed(1)
    return (
        _actions(policy, spec, 200) != _actions(agent.make_policy(networks, evaluation=True), spec, 1)
    ).mean(0)


def evaluated(agent, networks, spec):
    """How much the actions of two envs differ in evaluations."""
    return _actions(agent.make_policy(networks, evaluation=True), spec, 100).std(0)


def _actions(policy, spec, times):
    observation, state = specs.zeros(spec.observations, (2,)), policy.initial_state(2)
    return np.array([policy.step(observation, state)[0] for _ in range(times)])


def table(agent, spec):
    """What its first table holds, and when it takes and gives."""
    info = agent.make_tables(spec)[0].info
    return str((info.max_size, info.sampler_options, info.rate_limiter_info))


def network(agent, spec):
    """The layers of its networks."""
    torch.manual_seed(0)
    return str(agent.make_networks(spec))


def assert_trains_in_a_program(agent, environment, engine, **settings):
    """400 steps of two actors with two envs each, with an evaluation at the end."""
    run = RunConfig(
        num_actors=2,
        envs_per_actor=2,
        max_env_steps=400,
        evaluate_period=400,
        num_evaluation_episodes=2,
        **settings,
    )
    result = launch.launch(make_program(agent, environment, run), engine=engine)
    assert (result["reason"], result["env_steps"]) == ("max_env_steps", 400)
    assert result["learner_steps"] > 10 and np.isfinite(result["episode_return"])
