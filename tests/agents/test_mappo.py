"""MAPPO: what actors and critics see, whose rows are whose, and agents that wait for others."""

import dataclasses

import numpy as np
import pytest
import torch
import tree
from agent_batches import learn, played

from agents.mappo import MAPPO, MAPPOConfig
from framework import environments
from framework.multi_agent import team_rows
from framework.networks import as_tensors

CARTPOLE, AGENTS = "multi_agent:CartPole", [f"agent_{index}" for index in range(4)]
SMALL = MAPPOConfig(hidden_sizes=(8,), unroll_length=12, epochs=1, minibatch_size=None)


def played_rows(**changes):
    """The agent, the rows that it played, whose poles fell at different times, its networks and batch."""
    agent = MAPPO(dataclasses.replace(SMALL, **changes))
    batch, networks, spec = played(agent, CARTPOLE, steps=144)
    batch = batch._replace(data=as_tensors(batch.data))
    return agent, team_rows(networks.group, batch.data), networks, batch, spec


@pytest.mark.parametrize("joint", [True, False])
def test_only_the_critic_sees_the_others(joint):
    agent, data, networks, _, _ = played_rows(joint_critic=joint)
    results = []
    for _ in range(2):
        with torch.no_grad():
            results.append(networks(agent.observations(networks, data)))
        data.observation[2] += 0.5  # Those of the third agent of the first env.
    (before, values), (after, others) = results
    same = [bool((before.logits[row] == after.logits[row]).all()) for row in range(8)]
    assert same == [True, True, False, *[True] * 5]
    seen = [bool((values[row] != others[row]).any()) for row in range(8)]
    assert seen == ([True] * 4 + [False] * 4 if joint else [False, False, True, *[False] * 5])


@pytest.mark.parametrize("share", [True, False])
def test_an_agent_acts_on_its_own_observation(share):
    environment = environments.make(CARTPOLE, num_envs=3, seed=0)
    agent = MAPPO(dataclasses.replace(SMALL, share_parameters=share))
    torch.manual_seed(0)
    policy, observation = (
        agent.make_policy(agent.make_networks(environment.spec)),
        environment.reset().observation,
    )
    seen = []
    for _ in range(2):
        actions, extras, _ = policy.step(observation, ())
        seen.append(extras["policy"]["logits"])
        observation["agent_1"] = observation["agent_1"] + 1.0
    assert sorted(actions) == AGENTS and actions["agent_0"].shape == (3,)
    assert np.equal(*seen).all((0, 2)).tolist() == [True, False, True, True]


@pytest.mark.parametrize("changes", [{}, {"recurrent": "lstm", "recurrent_size": 6}])
@pytest.mark.parametrize("share", [True, False])
def test_the_learner_sees_the_policies_that_acted(share, changes):
    agent, data, networks, batch, _ = played_rows(share_parameters=share, **changes)
    starts = data.start_of_episode.float()
    starts[:, 0] = 0.0
    with torch.no_grad():
        policy, _ = networks(agent.observations(networks, data), data.extras.get("state", ()), starts)
    real = data.mask > 0
    torch.testing.assert_close(policy.logits[real], data.extras["policy"]["logits"][real])
    # An unroll after another: the first agent of the second env is row 4.
    torch.testing.assert_close(data.observation[4], batch.data.observation["agent_0"][1])
    torch.testing.assert_close(data.action[7], batch.data.action["agent_3"][1])
    assert data.mask.sum() == data.reward.sum() < real[:, :-1].numel(), (
        "each step of an agent that plays pays 1"
    )


def test_each_agent_learns_alone_without_shared_parameters():
    agent, _, networks, batch, spec = played_rows(share_parameters=False, normalize_advantages=False)
    batch.data.extras["moved"][..., [0, 2, 3]] = False
    learner = agent.for_program(3).make_learner(networks, spec)
    before = {name: parameter.detach().clone() for name, parameter in networks.named_parameters()}
    learn(learner, batch)
    moved = {name for name, parameter in networks.named_parameters() if not parameter.equal(before[name])}
    assert {name.split(".")[1] for name in moved} == {"1"} and len(moved) == len(before) / 4


def test_the_first_loss_is_ppos_of_the_rows():
    agent, data, networks, batch, spec = played_rows(joint_critic=False, normalize_advantages=False)
    with torch.no_grad():
        _, values = networks(agent.observations(networks, data))
    errors, gae = [], agent.config.discount * agent.config.gae_lambda
    for row in range(len(values)):
        later = 0.0
        for t in reversed(range(SMALL.unroll_length)):
            if not data.mask[row, t]:
                later = 0.0
                continue
            ahead = agent.config.discount * data.discount[row, t] * values[row, t + 1]
            later = float(data.reward[row, t] + ahead - values[row, t] + gae * data.discount[row, t] * later)
            errors.append(later)
    metrics = learn(agent.for_program(3).make_learner(networks, spec), batch).metrics
    assert int(metrics["rows"]) == len(errors)
    assert float(metrics["value_loss"]) == pytest.approx(0.5 * np.mean(np.square(errors)), rel=1e-4)
    assert float(metrics["policy_loss"]) == pytest.approx(-np.mean(errors), rel=1e-4)


def test_the_numbers_of_all_agents_are_scaled_alike():
    agent, data, networks, batch, spec = played_rows(normalize_observations=True, normalize_rewards=True)
    learn(agent.for_program(3).make_learner(networks, spec), batch)
    seen = agent.observations(networks, data)
    real, mean = data.observation[data.mask > 0].double(), networks.normalizer._moments[0].mean
    torch.testing.assert_close(mean, real.mean(0))
    tree.map_structure(torch.testing.assert_close, seen["joint"][3][0], seen["own"][3])


@pytest.mark.parametrize(("field", "value"), [("shared", True), ("episodes_per_batch", 4)])
def test_what_a_team_cannot_have_is_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field}: got {value}, expected one of"):
        MAPPOConfig(**{field: value})


def test_a_session_has_no_team():
    with pytest.raises(ValueError, match=r"^session: got MAPPO, which acts for a team"):
        MAPPO().session(environments.make(CARTPOLE, num_envs=1).spec)
