"""MB-MPO: what it imagines against a loop, its workers, its learner, and every field of its config."""

import contextlib
import dataclasses
import functools
import itertools
from unittest import mock

import config_fields
import numpy as np
import pytest
import torch
import tree
from agent_batches import DISCRETE, IMAGES, NUMBERS, VECTOR
from dm_env import specs as dm_specs
from torch.func import functional_call

import launch
from agents.maml import collect
from agents.mbmpo import MBMPO, MBMPOConfig, MBMPOLearner, ModelWorker
from framework.environments.testing import FakeEnvironment, make_spec
from framework.networks import BlockGenerator
from framework.programs import RunConfig, make_program
from framework.replay import ReplaySample
from framework.types import Step

SPEC = make_spec({"position": VECTOR, "place": dm_specs.DiscreteArray(3)}, NUMBERS)
SMALL = MBMPOConfig(
    unroll_length=6, meta_steps=2, imagined_envs=3, horizon=4, models=3, model_hidden_sizes=(8,),
    hidden_sizes=(8,), activation="tanh", model_epochs=2,
)  # fmt: skip


def make_unrolls(seed=0, spec=SPEC):
    """Two unrolls of real data. Episodes end in the second one: terminated, and truncated."""
    random = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=random)
    mask, discount, starts = torch.ones(2, 7), torch.ones(2, 7), torch.zeros(2, 7, dtype=torch.bool)
    starts[:, 0] = starts[1, 3] = starts[1, 6] = True
    mask[1, 2] = mask[1, 5] = discount[1, 1] = 0.0
    observation = {"position": draw(2, 7, 4), "place": torch.randint(3, (2, 7), generator=random)}
    action, extras = draw(2, 7, 2), {"action": 2.0 * draw(2, 7, 2), "log_prob": draw(2, 7)}
    if spec is DISCRETE:
        observation, action = observation["position"], torch.randint(3, (2, 7), generator=random)
    return Step(observation, action, draw(2, 7), discount, starts, extras, mask)


def make_learner(config=SMALL, spec=SPEC):
    torch.manual_seed(0)
    agent = MBMPO(config)
    return agent, agent.make_learner(agent.make_networks(spec), spec)


def fitted(config=SMALL, spec=SPEC):
    """The agent, networks and learner after a step on real data."""
    agent, learner = make_learner(config, spec)
    learner.step(ReplaySample((), make_unrolls(spec=spec)))
    return agent, learner._networks, learner


def imagined(agent, networks, rounds=None, models=3, seed=0):
    random = BlockGenerator().manual_seed(seed)
    rounds = 1 + agent.config.inner_steps if rounds is None else rounds
    return agent.imagine(networks, torch.arange(models), rounds, random)


def stacked(rounds):
    return ReplaySample((), tree.map_structure(lambda *leaves: torch.stack(leaves, 1), *rounds))


def test_transitions_are_those_within_episodes_with_clipped_actions():
    _, networks, _ = fitted()
    data = make_unrolls()
    inputs, targets = networks.transitions(data)
    rows = [(n, t) for n in range(2) for t in range(6) if (n, t) not in [(1, 2), (1, 5)]]
    assert len(inputs) == len(targets) == len(rows)
    place = torch.nn.functional.one_hot(data.observation["place"], 3).float()
    encoded = torch.cat([place, data.observation["position"]], -1)
    for (n, t), one, target in zip(rows, inputs, targets, strict=True):
        expected = torch.cat([encoded[n, t], data.extras["action"][n, t].clamp(-1, 1)])
        torch.testing.assert_close(one, expected)
        torch.testing.assert_close(target[:7], encoded[n, t + 1] - encoded[n, t])
        assert target[7:].tolist() == [data.reward[n, t], data.discount[n, t]]


@pytest.mark.parametrize("spec", [SPEC, DISCRETE])
def test_what_is_imagined_is_what_a_loop_over_models_and_steps_gives(spec):
    """Two rounds, the second one with adapted policies; models 1 and 2 of three."""
    agent, networks, _ = fitted(spec=spec)
    with torch.no_grad():
        networks.models.biases[-1][2, 0, -1] = -50.0  # Every step ends model 2's episodes.
    models = torch.tensor([1, 2])
    rounds, last = agent.imagine(networks, models, 2, BlockGenerator().manual_seed(0))
    parameters = dict(networks.policy.named_parameters())
    for index, k in enumerate(models.tolist()):
        adapted = parameters
        for number, each in enumerate(rounds):
            rows = tree.map_structure(lambda leaf, i=index: leaf[i], each)
            alive, total = torch.ones(3), torch.zeros(3)
            for t in range(4):
                observation, action = rows.observation[:, t], rows.action[:, t]
                policy = functional_call(networks.policy, dict(adapted), (observation,))
                torch.testing.assert_close(policy.log_prob(action), rows.log_prob[:, t])
                assert torch.equal(rows.mask[:, t], alive)
                vectors = networks.actions.vectors(action).clamp(-1, 1)
                predicted = networks.models.predict(observation.expand(3, -1, -1), vectors.expand(3, -1, -1))
                after, reward, discount = (leaf[k] for leaf in predicted)
                if t < 3:
                    torch.testing.assert_close(rows.observation[:, t + 1], after, rtol=1e-4, atol=1e-5)
                total, alive = total + alive * reward, alive * discount
            torch.testing.assert_close(rows.episode_return[:, 0], total, rtol=1e-4, atol=1e-5)
            assert (rows.mask[:, 1:] == 0).all() == (k == 2)
            if number == 0:
                adapted = agent.adapt(networks.policy, parameters, rows)
        for name, each in last.items():
            torch.testing.assert_close(each[index], adapted[name].detach())


def test_a_step_on_imagined_rows_moves_the_policy_and_one_on_real_rows_the_models():
    agent, networks, learner = fitted()
    batch = stacked(imagined(agent, networks)[0])
    for sample, moved, kept in (
        (batch, networks.policy, networks.models),
        (ReplaySample((), make_unrolls(1)), networks.models, networks.policy),
    ):
        before, others = config_fields.flat(moved).clone(), config_fields.flat(kept).clone()
        metrics = learner.step(sample).metrics
        assert not torch.equal(before, config_fields.flat(moved))
        assert torch.equal(others, config_fields.flat(kept))
    assert metrics["models/transitions"] == 20 and np.isfinite(metrics["loss"].item())
    again = make_learner()[1]
    again.restore(learner.save())
    results = [each.step(batch).metrics["loss"] for each in (learner, again)]
    assert results[0] == results[1]
    tree.map_structure(np.testing.assert_array_equal, learner.parameters(), again.parameters())


def small_program(config=SMALL, **changes):
    run = {"num_actors": 2, "envs_per_actor": 2, "max_learner_steps": 4, "evaluate_period": None, **changes}
    environment = {"spec": DISCRETE, "episode_length": 20}
    return make_program(MBMPO(config), FakeEnvironment, RunConfig(**run, environment_options=environment))


def test_every_model_has_a_policy_that_collects_and_workers_go_on_with_the_learner_s():
    """Three models of two workers; the second round is the first with models."""
    collected, acting = [], []

    def record(collector, *args):
        collected.append(config_fields.flat(collector.actor.policy.networks.policy).clone())
        return collect(collector, *args)

    def record_rows(self):
        acting.append(config_fields.flat(self.networks.policy).clone())
        return imagine(self)

    imagine = ModelWorker.imagine
    with mock.patch("agents.mbmpo.collect", record), mock.patch.object(ModelWorker, "imagine", record_rows):
        launch.launch(small_program(), engine="serial")
    assert len(collected) == 6 and len(acting) == 4  # Two rounds of collection, one of two outer steps.
    assert all(torch.equal(each, collected[0]) for each in collected[:3])
    assert all(not torch.equal(one, other) for one, other in itertools.combinations(collected[3:], 2))
    assert torch.equal(acting[0], collected[0]) and torch.equal(acting[0], acting[1])


def test_the_last_round_has_all_of_its_outer_steps():
    limits = {"max_env_steps": 2 * 3 * 6, "max_learner_steps": None, "evaluate_period": 36}
    program = small_program(num_actors=1, envs_per_actor=1, num_evaluation_episodes=1, **limits)
    result = launch.launch(program, engine="serial")
    assert (result["env_steps"], result["learner_steps"]) == (36, 6)


def test_what_the_models_cannot_do_is_refused():
    with pytest.raises(ValueError, match="num_actors: got 4, expected at most 3"):
        small_program(num_actors=4)
    with pytest.raises(ValueError, match=r"expected numbers.*Dreamer"):
        MBMPO(SMALL).make_networks(IMAGES)
    with pytest.raises(ValueError, match="expected one array of actions"):
        MBMPO(SMALL).make_networks(SPEC._replace(actions={"a": NUMBERS, "b": NUMBERS}))


def test_actions_without_bounds_are_not_clipped():
    free = SPEC._replace(actions=dm_specs.Array((2,), np.float32))
    for spec, limit in ((SPEC, 1.0), (free, 3.0)):
        assert MBMPO(SMALL).make_networks(spec).vectors(torch.tensor([3.0, -3.0])).tolist() == [limit, -limit]


def learned(agent, spec):
    """Parameters after real and imagined steps, as one vector."""
    _, networks, learner = fitted(agent.config)
    for env_steps in (0, 100):
        learner.env_steps = env_steps
        learner.step(stacked(imagined(agent, networks)[0]))
    return config_fields.flat(networks).double().numpy()


def made(agent, spec):
    policy = make_learner(agent.config)[1]._learners["policy"]
    return type(policy._gradient), policy._eager.precision is contextlib.nullcontext


def rows_of_a_program(agent, spec):
    """The shapes of the batches of the learner."""
    shapes, step = [], MBMPOLearner.step

    def record(self, batch):
        shapes.append(str((type(batch.data), batch.data.mask.shape)))
        return step(self, batch)

    with mock.patch.object(MBMPOLearner, "step", record):
        launch.launch(small_program(agent.config), engine="serial")
    return str(shapes)


def advantages(agent, spec):
    _, networks, _ = fitted()
    return imagined(agent, networks)[0][0].advantage.numpy()


by = config_fields.by
FIELDS = {
    **by(advantages, discount=0.5, gae_lambda=0.3),
    **by(learned, learning_rate=0.1, learning_rate_decay=200, adam_epsilon=0.1, inner_learning_rate=0.5),
    **by(learned, clip=0.01, epochs=2, minibatch_tasks=1, model_learning_rate=0.1, model_batch_size=2),
    **by(learned, model_epochs=3, validation_fraction=0.5),
    **by(learned, needs={"model_epochs": 40, "model_learning_rate": 0.1}, model_persistence=0.0),
    **by(learned, needs={"learning_rate_decay": 100}, learning_rate_end=0.5),
    **by(learned, needs={"adam_epsilon": 1.0}, max_gradient_norm=1e-4),
    **by(made, step_mode="compile", autocast=None),
    **by(rows_of_a_program, unroll_length=5, meta_steps=1, imagined_envs=2, horizon=3, inner_steps=2),
    **by(config_fields.network, hidden_sizes=(4, 4), activation="elu", initial_std=0.5),
    **by(config_fields.network, models=2, model_hidden_sizes=(4,)),
}


def test_every_field_changes_something():
    assert {*FIELDS, "device", "devices", "inputs"} == {
        field.name for field in dataclasses.fields(MBMPOConfig)
    }
    assert config_fields.unchanged(MBMPO(SMALL), SPEC, FIELDS) == []
