"""Several policies in one multi-agent environment: rows, mapping, what each adder and learner gets."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re

import dm_env
import numpy as np
import pytest
import torch
import tree
from helpers.two_agents import TwoAgents

import launch
from agents.dqn import DQN, DQNConfig
from agents.impala import IMPALA, IMPALAConfig
from agents.ppo import PPO, PPOConfig
from agents.ppo_dqn import PPODQN, PPODQNConfig
from framework import environments, specs
from framework.actors import EnvironmentLoop, PolicyActor
from framework.adders import NStepTransitionAdder, UnrollAdder
from framework.environments import FIRST, LAST, MID
from framework.environments.testing import make_spec
from framework.flow import Par
from framework.learners import LossContext
from framework.multi_agent import (
    MultiAgentAdder,
    MultiAgentLearner,
    MultiAgentNetworks,
    MultiAgentPolicy,
    group_agents,
)
from framework.networks import as_tensors
from framework.programs import MultiAgentPlanAgent, MultiAgentWorker, RunConfig, concatenate, make_program
from framework.replay import EmbeddedClient, Table
from framework.types import MultiAgentTimeStep
from framework.workers.worker import Setup

SMALL = {"hidden_sizes": (8,)}


def half(agent):
    return "first" if agent in ("agent_0", "agent_1") else "second"


def cartpoles(num_envs, **options):
    return environments.make("multi_agent:CartPole", num_envs=num_envs, seed=1, **options)


def two_policies(spec, evaluation=False):
    """PPO for agents 0 and 1, DQN for 2 and 3, and their networks."""
    groups = group_agents(spec, half)
    parts = {"first": PPO(PPOConfig(**SMALL)), "second": DQN(DQNConfig(**SMALL))}
    networks = MultiAgentNetworks(
        groups, {name: part.make_networks(groups[name].spec) for name, part in parts.items()}
    )
    policies = {name: part.make_policy(networks.part(name), evaluation) for name, part in parts.items()}
    return networks, MultiAgentPolicy(networks, policies), parts


@pytest.mark.parametrize("name", ["", "a.b", "train", "steps", "groups"])
def test_a_name_that_a_policy_cannot_have_is_refused(name):
    with pytest.raises(ValueError, match=f"policy: got the name '{name}', expected"):
        MultiAgentNetworks({}, {name: torch.nn.Linear(1, 1)})


def test_agents_are_grouped_by_policy():
    groups = group_agents(cartpoles(1).spec, half)
    assert {name: group.agents for name, group in groups.items()} == {
        "first": ("agent_0", "agent_1"),
        "second": ("agent_2", "agent_3"),
    }
    assert groups["first"].spec.actions.num_values == 2


def test_agents_that_cannot_share_a_policy():
    with pytest.raises(ValueError, match="expected a dict with an entry for each agent"):
        group_agents(make_spec(), half)
    actions = {"a": specs.DiscreteArray(2), "b": specs.DiscreteArray(3)}
    parts = (dict.fromkeys("ab", leaf) for leaf in make_spec())
    spec = specs.EnvironmentSpec(*parts)._replace(actions=actions)
    with pytest.raises(ValueError, match=r"policy 'one': got agents 'a' and 'b' with different specs"):
        group_agents(spec, lambda agent: "one")
    assert len(group_agents(spec, str)) == 2
    with pytest.raises(ValueError, match=r"got agents for \['dqn'\], expected some for each"):
        PPODQN(PPODQNConfig(ppo_agents=())).make_networks(cartpoles(1).spec)
    with pytest.raises(ValueError, match=r"ppo_agents: got agent1, .* Did you mean 'agent_1'"):
        PPODQN(PPODQNConfig(ppo_agents=("agent_0", "agent1"))).make_networks(cartpoles(1).spec)


def test_rows_are_the_agents_of_each_env():
    group = group_agents(cartpoles(1).spec, half)["second"]
    nest = {f"agent_{agent}": np.array([[10 * env + agent] for env in range(3)]) for agent in range(4)}
    rows = group.rows(nest)
    assert rows[:, 0].tolist() == [2, 3, 12, 13, 22, 23]
    assert group.of_envs(rows)[..., 0].tolist() == [[2, 3], [12, 13], [22, 23]]
    split = group.split(rows)
    assert sorted(split) == ["agent_2", "agent_3"]
    for agent, value in split.items():
        np.testing.assert_array_equal(value, nest[agent])


def test_each_policy_acts_for_its_agents():
    torch.manual_seed(0)
    spec = cartpoles(1).spec
    networks, policy, parts = two_policies(spec, evaluation=True)
    rng = np.random.default_rng(0)
    names = specs.agents(spec)
    observation = {name: rng.normal(size=(5, 4)).astype(np.float32) for name in names}
    actions, extras, _ = policy.step(observation, policy.initial_state(5))
    assert tree.map_structure(np.shape, extras["first"]["version"]) == (5, 2)
    for name in names:
        part = half(name)
        alone = parts[part].make_policy(networks.part(part), evaluation=True)
        expected, _, _ = alone.step(observation[name], alone.initial_state(5))
        np.testing.assert_array_equal(actions[name], expected)


def visits(agents):
    """Time steps of one env, from the first letters of its agents' step types. They see zeros while FIRST."""
    rng = np.random.default_rng(0)
    kinds = {agent: ["FML".index(kind) for kind in row] for agent, row in agents.items()}
    for of_agents in zip(*kinds.values(), strict=True):
        types = dict(zip(kinds, of_agents, strict=True))
        plays = {agent: kind != FIRST for agent, kind in types.items()}
        yield MultiAgentTimeStep(
            np.array([max(of_agents) if LAST not in of_agents else MID]),
            {agent: np.float32([moved]) for agent, moved in plays.items()},
            {agent: np.float32([1.0]) for agent in types},
            {agent: np.float32(rng.normal(size=(1, 3)) * moved) for agent, moved in plays.items()},
            {agent: np.array([kind]) for agent, kind in types.items()},
        )


@pytest.mark.parametrize("recurrent", ["lstm", "gru"])
def test_an_agent_that_comes_late_acts_as_its_learner_has_it(recurrent):
    # Unrolls of 4 steps: b comes in the first, leaves in the second and comes again in the last.
    timesteps = list(visits({"a": "FMMMMMMMMMMMMMMMM", "b": "FFFFMMMLFFFFFFMMM"}))
    parts = (dict.fromkeys("ab", leaf) for leaf in make_spec())
    groups = group_agents(specs.EnvironmentSpec(*parts), lambda agent: "all")
    part = PPO(PPOConfig(**SMALL, unroll_length=4, recurrent=recurrent, recurrent_size=6)).for_program(2)
    torch.manual_seed(0)
    networks = MultiAgentNetworks(groups, {"all": part.make_networks(groups["all"].spec)})
    own = networks.part("all")
    with torch.no_grad():
        for parameter in own.parameters():  # Memories and policies far from their initial ones.
            parameter.normal_()
    client = EmbeddedClient([Table.queue("queue", 100)], concurrent=False)
    adder = MultiAgentAdder(groups, {"all": part.make_adder(client, groups["all"].spec)})
    actor = PolicyActor(MultiAgentPolicy(networks, {"all": part.make_policy(own)}), adder, seed=0)
    actor.observe_first(timesteps[0])
    for before, after in itertools.pairwise(timesteps):
        actor.observe(actor.select_action(before.observation), after)
    batch = client.sample_batch("queue", 8)
    batch = batch._replace(data=as_tensors(batch.data))
    assert batch.data.mask[:, :4].tolist() == [
        [1, 1, 1, 1], [0, 0, 0, 1],  # Those of a and of b, one unroll after the other.
        [1, 1, 1, 1], [1, 1, 1, 0],
        [1, 1, 1, 1], [0, 0, 0, 0],
        [1, 1, 1, 1], [0, 1, 1, 1],
    ]  # fmt: skip
    context = LossContext(torch.nn.ModuleDict(), torch.tensor(0), torch.tensor(0), torch.Generator())
    with torch.no_grad():
        rows = part.prepare(own, batch, context).data
        learned, _ = own(rows.observation, rows.state, rows.starts)
        divergence = own.actions.distribution(rows.policy).kl(learned) * rows.mask
    assert float(learned.entropy().std()) > 0.01
    assert float(divergence.abs().max()) < 1e-6


def _play(num_steps, unroll_length=8):
    """Plays with two policies. Returns the time steps, and the items of both tables."""
    environment = cartpoles(3)
    _, policy, _ = two_policies(environment.spec)
    clients = {
        "first": EmbeddedClient([Table.queue("queue", 10_000)], concurrent=False),
        "second": EmbeddedClient([Table.queue("replay", 10_000)], concurrent=False),
    }
    parts = {
        "first": UnrollAdder(clients["first"], unroll_length),
        "second": NStepTransitionAdder(clients["second"], 1, 0.9),
    }
    adder = MultiAgentAdder(group_agents(environment.spec, half), parts)
    timesteps = []

    class Watch:
        def observe_first(self, environment, timestep):
            timesteps.append(tree.map_structure(np.array, timestep))

        def observe(self, environment, timestep, action):
            timesteps.append(tree.map_structure(np.array, timestep))

        def get_metrics(self, envs):
            return {}

    loop = EnvironmentLoop(environment, PolicyActor(policy, adder, num_envs=3, seed=0), observers=[Watch()])
    returns = []
    for _ in range(num_steps):
        finished = loop.step()
        if finished is not None:
            returns.append(finished["episode_return"])
    adder.flush()
    items = {
        name: client.server_info()[table].current_size
        for (name, client), table in zip(clients.items(), ("queue", "replay"), strict=True)
    }
    return timesteps, clients, items, returns


def test_replay_gets_what_the_agents_did_and_nothing_while_they_wait():
    timesteps, clients, items, returns = _play(64)
    moved = {
        agent: np.stack([each.agents[agent] for each in timesteps[1:]]) != FIRST
        for agent in timesteps[0].agents
    }
    assert moved["agent_0"].sum() != moved["agent_1"].sum()  # They end at different times.
    assert items["second"] == moved["agent_2"].sum() + moved["agent_3"].sum()
    data = clients["second"].sample_batch("replay", items["second"]).data
    assert np.abs(data.observation).sum(-1).min() > 0.0  # Observations of agents that wait are zeros.
    assert data.reward.tolist() == [1.0] * items["second"]
    # A queue of unrolls: 3 envs of 2 agents, every 8 steps, those that waited throughout among them.
    assert items["first"] == 6 * 64 // 8
    data = clients["first"].sample_batch("queue", items["first"]).data
    assert data.mask.sum() == moved["agent_0"].sum() + moved["agent_1"].sum()
    assert data.mask.sum(1).min() == 0.0
    # The loop's returns are those of each agent.
    assert sum(each["agent_2"].sum() for each in returns) <= moved["agent_2"].sum()


def test_a_step_of_the_learner_is_one_of_one_policy():
    torch.manual_seed(0)
    _, clients, _, _ = _play(16, unroll_length=4)
    spec = cartpoles(1).spec
    networks, policy, parts = two_policies(spec)
    groups = networks.groups
    learner = MultiAgentLearner(
        networks,
        {name: part.make_learner(networks.part(name), groups[name].spec) for name, part in parts.items()},
    )
    learner.env_steps = 7
    sample = clients["second"].sample_batch("replay", 8)
    sample = sample._replace(data={"second": tree.map_structure(torch.as_tensor, sample.data)})
    before = {name: networks.part(name).state_dict() for name in parts}
    before = tree.map_structure(torch.clone, before)
    result = learner.step(sample)
    assert result.metrics["second/steps"] == 1 and "second/loss" in result.metrics
    same = tree.map_structure(
        torch.equal, before, {name: dict(networks.part(name).state_dict()) for name in parts}
    )
    assert all(same["first"].values()) and not all(same["second"].values())
    parameters = learner.parameters()
    assert set(parameters) == {"first", "second", "steps"}
    policy.loaded(policy.progress._replace(version=40, env_steps=50))
    assert policy._policies["second"].progress == (1, 50) and policy._policies["first"].progress == (0, 50)

    broken = tree.map_structure(torch.as_tensor, clients["second"].sample_batch("replay", 8).data)
    broken.reward[0] = np.nan
    with pytest.raises(FloatingPointError, match=r"policy 'second': Learner step 1: the loss .* not finite"):
        learner.step(sample._replace(data={"second": broken}))
    learner._learners["first"]._unchecked.append((3, torch.tensor(np.nan)))  # As on a GPU.
    with pytest.raises(FloatingPointError, match="policy 'first': Learner step 3"):
        learner.parameters()
    learner._learners["first"]._unchecked.clear()

    state = learner.save()
    fresh, _, _ = two_policies(spec)
    again = MultiAgentLearner(
        fresh, {name: part.make_learner(fresh.part(name), groups[name].spec) for name, part in parts.items()}
    )
    again.restore(state)
    for one, other in zip(tree.flatten(learner.parameters()), tree.flatten(again.parameters()), strict=True):
        np.testing.assert_array_equal(one, other)


def test_unrolls_in_which_all_agents_waited_are_no_step():
    class Learner:
        names, published = [], 0

        def step(self, sample):
            self.names += sample.data

        def publish(self):
            self.published += 1

    _, clients, items, _ = _play(64)
    learner = Learner()
    steps = PPODQN().steps(learner)
    sample = clients["first"].sample_batch("queue", items["first"])
    waited = np.flatnonzero(sample.data.mask.sum(1) == 0)
    steps["ppo"](sample._replace(data=tree.map_structure(lambda leaf: leaf[waited], sample.data)))
    assert len(waited) and learner.names == [] and learner.published == 0
    steps["ppo"](sample)
    assert learner.names == ["ppo"] and learner.published == 1  # For the workers' next unrolls.
    steps["dqn"](clients["second"].sample_batch("replay", 8))
    assert learner.names == ["ppo", "dqn"] and learner.published == 1


def test_settings_reach_both_algorithms():
    shared = {"discount": 0.5, "device": "cuda:0", "learning_rate_decay": 9, "inputs": ("observation=bytes",)}
    config = PPODQNConfig(**shared, ppo={"epochs": 3}, dqn={"n_step": 2, "hidden_sizes": [3]})
    ppo, dqn = config.ppo_config(), config.dqn_config()
    for name, value in shared.items():
        assert getattr(ppo, name) == getattr(dqn, name) == value
    assert (ppo.epochs, ppo.unroll_length, dqn.n_step, dqn.hidden_sizes) == (3, 64, 2, (3,))
    for part, values, text in (
        ("ppo", {"epochs": 0}, "epochs: got 0"),
        ("dqn", {"nstep": 1}, "dqn has no field 'nstep'.* Did you mean 'n_step'"),
        ("ppo", {"discount": 0.9}, "ppo has no field 'discount'"),
    ):
        with pytest.raises(ValueError, match=text):
            PPODQNConfig(**{part: values})


class Masked(TwoAgents):
    """Episodes of 8 steps, in which each agent may do what its mask shows: the steps' parity."""

    observation = {"board": specs.Array((1,), np.float32), "action_mask": specs.Array((2,), bool)}

    def reset(self):
        self.steps = 0
        return dm_env.restart(self.observe())

    def observe(self):
        mask = (np.arange(2) == self.steps % 2) & (self.steps < 8)  # Nothing is legal at the end.
        return self.of_both({"board": np.float32([self.steps]), "action_mask": mask})

    def step(self, action):
        assert all(int(action[name]) == self.steps % 2 for name in action), "an illegal action"
        self.steps += 1
        end = dm_env.truncation if self.steps == 8 else dm_env.transition
        return end(self.of_both(1.0), self.observe(), self.of_both(1.0))


def test_both_algorithms_take_action_masks():
    parts = {"ppo": {"unroll_length": 8}, "dqn": {"min_replay_size": 50, "batch_size": 16}}
    config = PPODQNConfig(ppo_agents=("agent_0",), **parts)
    run = RunConfig(envs_per_actor=4, max_env_steps=300, evaluate_period=300, num_evaluation_episodes=4)
    result = launch.launch(make_program(PPODQN(config), Masked, run), "serial")
    assert result["env_steps"] == 300 and result["episode_length"] == 8


@dataclasses.dataclass
class OwnConfig:
    device: str = "cpu"


@pytest.mark.parametrize("config", [PPOConfig(), OwnConfig()])
def test_the_plan_of_two_on_policy_policies_on_the_page_needs_no_replay(config):
    page = pathlib.Path(__file__).parents[1] / "docs" / "agents" / "ppo_dqn.md"
    _, code, *_ = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names = {each.__name__: each for each in (MultiAgentPlanAgent, MultiAgentWorker, Par, PPO, PPOConfig)}
    names |= {"concatenate": concatenate}
    exec(compile(code.replace("adversary", "agent_0"), str(page), "exec"), names)
    agent = names["Chase"](PPOConfig(**SMALL, unroll_length=8))
    agent.config = config
    run = RunConfig(num_actors=2, max_env_steps=100, evaluate_period=100, num_evaluation_episodes=1)
    rows = []
    program = make_program(agent, "multi_agent:CartPole", run, on_write=rows.append)
    assert launch.launch(program, "serial")["env_steps"] == 100
    last = rows[-1]["labels"]["learner"]
    assert last["hunter/steps"] >= 4 and last["prey/steps"] >= 4


class OneForEach(MultiAgentPlanAgent):
    def __init__(self, first, second):
        self.parts, self.config = {"first": first, "second": second}, OwnConfig()

    def policy_of(self, agent):
        return half(agent)


IMPALA_8 = IMPALA(IMPALAConfig(**SMALL, batch_size=8))


@pytest.mark.parametrize(
    ("second", "error"),
    [
        (IMPALA_8, "items_per_step: got 8 in policy 'second', expected 4, the unrolls of a worker"),
        (PPO(PPOConfig(max_policy_lag=1)), "max_policy_lag: got 1 in policy 'second', expected 0"),
        (PPO(PPOConfig(episodes_per_batch=4)), "episodes_per_batch: got 4 in policy 'second', expected None"),
        (
            IMPALA(IMPALAConfig(previous_action_and_reward=True)),
            "environment_wrappers: got .* expected \\[\\]",
        ),
    ],
)
def test_parts_whose_settings_a_plan_does_not_follow_are_refused(second, error):
    with cartpoles(2) as environment:
        spec = specs.make_environment_spec(environment)
    setup = Setup(OneForEach(PPO(), second), lambda **_: None, spec, RunConfig(envs_per_actor=2))
    with pytest.raises(ValueError, match=error):
        MultiAgentWorker(setup, learner=None, counter=None, monitor=None)


def test_a_plan_has_one_off_policy_part_at_most():
    with cartpoles(2) as environment, pytest.raises(ValueError, match="got first, second, expected one"):
        OneForEach(DQN(), DQN()).make_tables(specs.make_environment_spec(environment))
