"""PPO: every field of its config changes something, and it learns with every kind of space."""

import dataclasses
import functools
import math

import agent_probes
import config_fields
import numpy as np
import pytest
import torch
from dm_env import specs as dm_specs
from test_ppo import CONTINUOUS, DISCRETE, ENVS, SMALL, make_batch, make_learner, play

from agents.ppo import PPO, PPOConfig
from framework import replay, specs
from framework.environments.testing import FakeEnvironment, make_spec

# --- spaces ---

ACTIONS = {
    "discrete": dm_specs.DiscreteArray(3, np.int64),
    "multi discrete": dm_specs.BoundedArray((2,), np.int64, 0, [1, 3]),
    "from another number": dm_specs.BoundedArray((2,), np.int32, [-1, 5], [1, 6]),
    "multi binary": dm_specs.BoundedArray((2, 2), np.int8, 0, 1),
    "bounded": dm_specs.BoundedArray((2,), np.float32, [-2.0, 0.0], [2.0, 100.0]),
    "bounded below": dm_specs.BoundedArray((1,), np.float32, 0.0, np.inf),
    "unbounded": dm_specs.Array((2,), np.float64),
    "matrix": dm_specs.BoundedArray((2, 2), np.float32, -1.0, 1.0),
    "scalar": dm_specs.BoundedArray((), np.float32, -1.0, 1.0),
}
OBSERVATIONS = {
    "vector": dm_specs.Array((3,), np.float32),
    "float64": dm_specs.Array((2, 2), np.float64),
    "choice": dm_specs.DiscreteArray(4, np.int64),
    "dict": {"a": dm_specs.Array((2,), np.float32), "b": (dm_specs.DiscreteArray(3, np.int64),)},
    "picture": dm_specs.BoundedArray((44, 44, 1), np.uint8, 0, 255),
}
KINDS = [("vector", action) for action in ACTIONS] + [(o, "discrete") for o in OBSERVATIONS if o != "vector"]


@pytest.mark.parametrize(("observation", "action"), KINDS, ids=["-".join(kind) for kind in KINDS])
@pytest.mark.parametrize("variant", ["clip", "penalty", "lstm"])
def test_learns_with_every_kind_of_space(observation, action, variant):
    config = dataclasses.replace(
        SMALL,
        normalize_observations=True,
        target_kl=0.01 if variant == "penalty" else None,
        recurrent="lstm" if variant == "lstm" else None,
    )
    spec = make_spec(observations=OBSERVATIONS[observation], actions=ACTIONS[action])
    environment = functools.partial(FakeEnvironment, spec, episode_length=4)  # refuses what does not fit
    batches = play(config, environment, max_env_steps=100, num_actors=1)
    assert len(batches) > 3
    for _, batch, parameters in batches:
        real = np.asarray(batch.data.mask) > 0
        for name, value in parameters.items():
            acted = np.asarray(batch.data.extras["policy"][name])
            np.testing.assert_allclose(value.numpy()[real], acted[real], atol=1e-4)


@pytest.mark.parametrize(
    "action",
    [dm_specs.Array((2,), np.int64), {"a": dm_specs.Array((2,), np.int64)}],
    ids=["unknown number of choices", "the same in a nest"],
)
def test_says_which_actions_it_cannot_take(action):
    with pytest.raises(ValueError, match="action spec: got"):
        PPO().make_networks(specs.EnvironmentSpec(DISCRETE.observations, action, None, None))


# --- every field ---


def learned(config, spec=DISCRETE):
    return agent_probes.after_three_steps(
        make_learner(config, spec), lambda seed: make_batch(config, spec, seed), env_steps=30
    )


def in_step(config):
    agent = PPO(config)
    return str((agent.max_policy_lag, agent.unroll_length))


def network(config, spec=DISCRETE):
    torch.manual_seed(0)
    nets = PPO(config).make_networks(spec)
    return str(nets) + str([p.sum().item() for p in nets.parameters()])


def data(config):
    agent = PPO(config).for_program(ENVS)
    return agent.episodes_per_batch, agent.items_per_step, agent.make_tables(DISCRETE)[0].max_size


PENALTY = {"target_kl": 0.001}
MEMORY = {"recurrent": "lstm"}
DECAY = {"learning_rate_decay": 40}
# See helpers/config_fields.py.
FIELDS = {
    **config_fields.of_gradients(learned, make_learner),
    "unroll_length": (7, in_step, {}),
    "max_policy_lag": (1, in_step, {}),
    "gae_lambda": (0.5, learned, {}),
    "normalize_observations": (True, learned, {}),
    "normalize_rewards": (True, learned, {}),
    "normalize_advantages": (False, learned, {}),
    "episodes_per_batch": (4, lambda config: str(data(config)), {}),
    "tanh_mean": (True, functools.partial(learned, spec=CONTINUOUS), {}),
    "value_learning_rate": (0.1, learned, {}),
    "clip": (0.01, learned, {}),
    "target_kl": (0.001, learned, {}),
    "initial_kl_coefficient": (5.0, learned, PENALTY),
    "value_coefficient": (5.0, learned, {}),
    "value_clip": (0.001, learned, {"learning_rate": 0.01}),
    "entropy_coefficient": (1.0, learned, {}),
    "epochs": (3, learned, {}),
    "minibatch_size": (16, learned, {}),
    "learning_rate_decay": (40, learned, {}),
    "learning_rate_end": (0.5, learned, DECAY),
    "clip_end": (0.01, learned, {**DECAY, "learning_rate_end": 1.0, "learning_rate": 0.01}),
    "max_gradient_norm": (1e-6, learned, {}),
    "hidden_sizes": ((8,), network, {}),
    "activation": ("relu", network, {}),
    "shared": (True, network, {}),
    "recurrent": ("gru", network, {}),
    "recurrent_size": (16, network, MEMORY),
    "autocast": (True, learned, {}),
    "initial_std": (0.5, functools.partial(network, spec=CONTINUOUS), {}),
}


def test_every_field_is_in_the_table():
    config_fields.assert_complete(FIELDS, PPOConfig)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_changes_something(field):
    config_fields.assert_changes_something(FIELDS, field, SMALL)


WRONG = [
    ("epochs", 1.5),
    ("hidden_sizes", 64),
    ("normalize_advantages", "no"),
    ("learning_rate", math.nan),
    ("unroll_length", None),
    ("recurrent", 1),
    ("device", "gpu"),
    ("unroll_length", 1),
    ("epochs", 0),
    ("minibatch_size", 0),
    ("episodes_per_batch", 0),
    ("value_learning_rate", -0.1),
    ("learning_rate_decay", 0),
    ("max_policy_lag", -1),
    ("hidden_sizes", (64, 0)),
    ("recurrent_size", 0),
    ("initial_kl_coefficient", -1.0),
    ("value_coefficient", -0.5),
    ("entropy_coefficient", -0.1),
    ("learning_rate", -0.001),
    ("adam_epsilon", -1.0),
    ("target_kl", 0.0),
    ("value_clip", -0.2),
    ("max_gradient_norm", 0.0),
    ("initial_std", 0.0),
    ("discount", 1.5),
    ("gae_lambda", -0.1),
    ("learning_rate_end", 2.0),
    ("clip_end", -1.0),
    ("recurrent", "rnn"),
    ("activation", "sine"),
    ("clip", 1.5),
    ("epochs", "many"),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_value_that_makes_no_sense_is_refused(field, value):
    config_fields.assert_refuses(PPOConfig, field, value)


def test_the_learner_goes_to_the_configured_device():
    config_fields.assert_learns_on_the_device(make_learner, SMALL, make_batch(SMALL))


def test_a_batch_is_one_unroll_of_every_env():
    agent = PPO(SMALL).for_program(7)
    client = replay.EmbeddedClient(agent.make_tables(DISCRETE))
    assert client.can_insert("queue", 14)
    assert not agent.make_dataset(client).ready()
