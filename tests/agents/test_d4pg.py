"""D4PG: every field changes something, and the loss is that of the paper."""

import dataclasses

import agent_probes
import config_fields
import numpy as np
import pytest
import torch
from batches import learn
from test_sac import AGENT_OF, learned, make_batch, make_learner, network
from test_td3 import FIELDS as TD3_FIELDS
from test_td3 import SETTINGS, make_uneven_batch

from agents.d4pg import D4PG, D4PGConfig
from framework.types import Transition

AGENT_OF |= {D4PGConfig: D4PG}
# Targets that move at each step show in three steps what they change.
SMALL = D4PGConfig(
    **SETTINGS, n_step=1, target_update_period=1, target_update_rate=0.1, v_min=-9.0, v_max=9.0
)
FIELDS = {
    **TD3_FIELDS,
    "exploration_std": (0.1, *TD3_FIELDS["exploration_std"][1:]),
    "layer_norm": (False, network, {}),
    "num_atoms": (11, network, {}),
    "v_min": (-3.0, learned, {}),
    "v_max": (3.0, learned, {}),
}


def test_every_field_is_in_the_table():
    config_fields.assert_complete(FIELDS, D4PGConfig)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_changes_something(field):
    config_fields.assert_changes_something(FIELDS, field, SMALL)


@pytest.mark.parametrize(("field", "value"), [("num_atoms", 1), ("v_min", 150.0), ("v_max", np.inf)])
def test_a_value_that_makes_no_sense_is_refused(field, value):
    config_fields.assert_refuses(D4PGConfig, field, value)


@pytest.mark.parametrize("num_critics", [1, 2])
def test_the_losses_against_a_loop(num_critics):
    config = dataclasses.replace(
        SMALL, num_critics=num_critics, num_atoms=5, v_min=-3.0, v_max=2.0, discount=0.9, prioritized=True
    )
    learner, batch = make_learner(config), make_uneven_batch()
    nets, targets = learner.networks, learner.targets
    data = Transition(*(torch.as_tensor(leaf) for leaf in batch.data[:5]))
    scale, centre = torch.tensor([2.0, 0.5]), torch.tensor([0.0, 0.5])
    atoms = [-3.0, -1.75, -0.5, 0.75, 2.0]
    assert nets.atoms.tolist() == atoms
    critic = actor = 0.0
    divergences = []
    smallest = batch.info.probability.min()

    def mean(probabilities):
        return sum(float(p) * z for p, z in zip(probabilities, atoms, strict=True))

    with torch.no_grad():
        for i in range(16):
            following = targets["critics"](
                data.next_observation[i], targets["policy"](data.next_observation[i])
            )
            following = min(following.softmax(-1), key=mean)
            projected = [0.0] * 5
            for p, z in zip(following, atoms, strict=True):
                value = float(data.reward[i]) + 0.9 * float(data.discount[i]) * z
                value = min(max(value, -3.0), 2.0)
                for k, atom in enumerate(atoms):
                    projected[k] += float(p) * max(0.0, 1.0 - abs(value - atom) / 1.25)
            logits = nets.critics(data.observation[i], (data.action[i] - centre) / scale)
            crosses = [
                -sum(q * float(p) for q, p in zip(projected, row, strict=True))
                for row in logits.log_softmax(-1)
            ]
            entropy = -sum(q * np.log(q) for q in projected if q > 0)
            divergences.append(np.mean([cross - entropy for cross in crosses]))
            critic += (smallest / batch.info.probability[i]) ** 0.4 * sum(crosses) / 16
            own = nets.critics(data.observation[i], nets.policy(data.observation[i]))
            actor -= mean(own[0].softmax(-1)) / 16
    result = learn(learner, batch)
    assert result.metrics["critic_loss"].item() == pytest.approx(critic, rel=1e-4)
    assert result.metrics["actor_loss"].item() == pytest.approx(actor, rel=1e-3, abs=1e-5)
    assert result.metrics["kl"].item() == pytest.approx(np.mean(divergences), rel=1e-3)
    assert result.priorities.tolist() == pytest.approx(divergences, rel=1e-3, abs=1e-5)


def test_the_policy_climbs_the_expected_return():
    """Its gradient is not 0, and leaves none in the critics."""
    learner = make_learner(dataclasses.replace(SMALL, critic_learning_rate=0.0))
    before = {name: p.detach().clone() for name, p in learner.networks.named_parameters()}
    observation = torch.as_tensor(make_batch().data.observation)

    def value():
        with torch.no_grad():
            return learner.networks.values(observation, learner.networks.policy(observation)).mean().item()

    first = value()
    for _ in range(30):
        learn(learner, make_batch())
    assert value() > first
    moved = {n.split(".")[0] for n, p in learner.networks.named_parameters() if not p.equal(before[n])}
    assert moved == {"policy"}


def test_a_resumed_learner_has_the_limits_of_its_config():
    narrow, wide = (make_learner(dataclasses.replace(SMALL, v_max=limit)) for limit in (10.0, 100.0))
    wide.restore(narrow.save())
    assert wide.networks.atoms[-1] == 100.0


def test_autocast_changes_the_loss_by_rounding_only():
    found = []
    for autocast in (False, True):
        learner = make_learner(dataclasses.replace(SMALL, autocast=autocast))
        found.append(learn(learner, make_batch()).metrics["critic_loss"].item())
    assert found[0] == pytest.approx(found[1], rel=0.02)


@pytest.mark.parametrize(
    "engine, settings",
    [
        ("serial", {"inference": "alternating"}),
        ("threads", {"inference": "server"}),
        ("processes", {"replay_shards": 2}),
    ],
    ids=["serial", "threads", "processes"],
)
def test_d4pg_in_a_program(engine, settings):
    """With prioritized replay, and a noise of its own for each env."""
    config = dataclasses.replace(
        SMALL, min_replay_size=50, samples_per_insert=4.0, prioritized=True, exploration_ladder=3.0
    )
    agent_probes.assert_trains_in_a_program(D4PG(config), "gymnasium:Pendulum-v1", engine, **settings)
