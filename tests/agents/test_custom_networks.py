"""`networks_fn`: networks of one's own in every agent, without subclassing it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import launch
from agents.a2c import A2C
from agents.d4pg import D4PG
from agents.dqn import DQN, DQNConfig, DQNNetworks
from agents.impala import IMPALA, IMPALAConfig
from agents.mpo import MPO
from agents.ppo import PPO, PPOConfig, PPONetworks
from agents.sac import SAC, SACConfig, SACNetworks
from agents.td3 import TD3
from agents.td7 import TD7
from framework import environments, networks, specs
from framework.programs import RunConfig, load_policy, make_program
from framework.runs.run_folder import RunError

CARTPOLE = "gymnasium:CartPole-v1"


class Deep(nn.Sequential):
    """What replaces a part, with a mark to find it again."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(nn.Linear(inputs, 8), nn.SiLU(), nn.Linear(8, outputs))


def deep_q(config, spec):
    nets = DQNNetworks(config, spec)
    nets.q_network = Deep(4, nets.num_actions)
    return nets


class Trunk(PPONetworks):
    """Other children than PPO's own, and its own ways through them."""

    def __init__(self, config, spec):
        super().__init__(config, spec)
        del self.encoder, self.body, self.value_body
        self.trunk = Deep(4, 16)
        self.head = networks.make_policy_head(16, self.actions.head_spec)
        self.value_head = nn.Linear(16, 1)

    def act(self, observation, state):
        return self.head(self.trunk(observation)), state

    def forward(self, observation, state=(), starts=None):
        features = self.trunk(observation)
        return self.head(features), self.value_head(features).squeeze(-1)


class Memory(nn.Module):
    """A GRU as IMPALA's actor-critic, from nothing."""

    def __init__(self, actions):
        super().__init__()
        self.trunk = Deep(4, 8)
        self.core = networks.RecurrentCore(8, 8, "gru")
        self.head, self.value = networks.make_policy_head(8, actions.head_spec), nn.Linear(8, 1)

    def initial_state(self, batch_size):
        return self.core.initial_state(batch_size)

    def step(self, observation, state):
        features, state = self.core.step(self.trunk(observation), state)
        return self.head(features), state

    def unroll(self, observation, state, starts):
        features, _ = self.core.unroll(self.trunk(observation), state, starts)
        return self.head(features), self.value(features).squeeze(-1)


def with_memory(config, spec):
    nets = nn.Module()
    nets.actions = networks.Actions(spec.actions)
    nets.actor_critic = Memory(nets.actions)
    return nets


def deep_policy(config, spec):
    nets = SACNetworks(config, spec)
    nets.policy.body = Deep(nets.policy.encoder.output_size, config.hidden_sizes[-1])
    return nets


LEARNS = {"min_replay_size": 32, "batch_size": 8, "insert_burst": 16, "samples_per_insert": 4.0}
AGENTS = {
    "dqn": lambda: DQN(DQNConfig(**LEARNS), deep_q),
    "ppo": lambda: PPO(PPOConfig(unroll_length=16, epochs=2), networks_fn=Trunk),
    "impala": lambda: IMPALA(IMPALAConfig(unroll_length=8, batch_size=2, lstm_size=8), with_memory),
    "sac": lambda: SAC(SACConfig(hidden_sizes=(16,), **LEARNS), networks_fn=deep_policy),
}
EVALUATIONS = {"evaluate_period": 100, "num_evaluation_episodes": 2}
RUN = RunConfig(envs_per_actor=2, max_env_steps=150, publish_period=1, **EVALUATIONS)


def parts(module):
    return [each for each in module.modules() if isinstance(each, Deep)]


@pytest.mark.parametrize("name", AGENTS)
def test_they_learn_and_are_in_the_checkpoint_and_in_evaluations(name, tmp_path):
    config = dataclasses.replace(RUN, directory=str(tmp_path))
    result = launch.launch(make_program(AGENTS[name](), CARTPOLE, config), engine="serial")
    assert result["learner_steps"] > 2
    loaded = load_policy(tmp_path, allow=(__name__,))
    (trained,) = parts(loaded.networks)
    torch.manual_seed(0)
    (fresh,) = parts(AGENTS[name]().make_networks(loaded.spec))
    assert not torch.equal(trained[0].weight, fresh[0].weight)
    assert loaded(loaded.make_environment(3).reset().observation).shape == (3,)
    resumed = dataclasses.replace(config, max_env_steps=300)
    again = launch.launch(make_program(AGENTS[name](), CARTPOLE, resumed), engine="threads")
    assert again["env_steps"] >= 300 and again["learner_steps"] > result["learner_steps"]


def test_they_travel_to_other_processes():
    result = launch.launch(make_program(AGENTS["ppo"](), CARTPOLE, RUN), engine="processes")
    assert result["reason"] == "max_env_steps" and result["learner_steps"] > 0


def test_a_function_without_a_name_trains_but_cannot_be_loaded(tmp_path):
    config = dataclasses.replace(RUN, directory=str(tmp_path), max_env_steps=100, evaluate_period=None)
    agent = DQN(DQNConfig(**LEARNS), lambda config, spec: deep_q(config, spec))
    launch.launch(make_program(agent, CARTPOLE, config), engine="serial")
    with pytest.raises(RunError, match="networks_fn was a function that cannot be imported"):
        load_policy(tmp_path)


class Forgetful(PPONetworks):
    def __init__(self, config, spec):
        super().__init__(config, spec)
        del self.normalizer


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (DQN(networks_fn=lambda config, spec: nn.Linear(1, 1)), "Linear without actions, num_actions, q_net"),
        (PPO(networks_fn=Forgetful), "Forgetful without normalizer, expected .* forward"),
        (MPO(networks_fn=lambda config, spec: nn.Module()), "without actions, policy, critics, duals, atoms"),
        (SAC(networks_fn=lambda config, spec: nn.Module()), "without actions, policy, critics"),
        (D4PG(networks_fn=lambda config, spec: nn.Module()), "policy, critics, values, atoms"),
        (TD3(networks_fn=lambda config, spec: nn.Module()), "without actions, policy, critics, values"),
        (A2C(networks_fn=lambda config, spec: nn.Module()), "without actions, normalizer, initial_state"),
        (IMPALA(networks_fn=lambda config, spec: nn.Module()), "actor_critic.unroll"),
        (TD7(networks_fn=lambda config, spec: nn.Module()), "values, embeddings, target_range, renew"),
        (IMPALA(networks_fn=with_memory), "with a memory and lstm_size None, expected both"),
    ],
)
def test_an_error_names_what_is_missing(agent, message):
    with pytest.raises(ValueError, match=message):
        agent.make_networks(specs.make_environment_spec(environments.make(CARTPOLE)))
