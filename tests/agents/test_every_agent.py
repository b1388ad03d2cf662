"""What every agent does: resume exactly, repeat from its seed, take masks and nests, run in a program.

Its loss against a second formulation, and what is particular to it, are in the file of its name.
"""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import pytest
import torch
import tree
from agent_batches import (
    CHOICE,
    DISCRETE,
    IMAGES,
    NUMBERS,
    VECTOR,
    apart,
    batch_of,
    learn,
    make_learner,
    make_policy,
    moved_by,
    played,
)
from agent_cases import ITEMS, NUMBERS_ONLY, SEQUENCES, SMALL, UNROLLS, WORLD, spec_of
from dm_env import specs as dm_specs
from torch import nn

import launch
from agents.ppo import PPO
from framework import datasets, environments
from framework.environments.testing import FakeEnvironment, MaskedEnvironment, make_spec
from framework.networks import as_numpy
from framework.parameters import NamedArrays
from framework.programs import RunConfig, make_agent, make_program
from framework.runs.registry import agent_names
from framework.variables import VariableBlock, VariableClient

ALIKE = ("rainbow", "bc")  # Their actions need not differ with the seed.
NORMALIZED = {"normalize_observations": True, "normalize_rewards": True}
MEMORY = PPO(dataclasses.replace(SMALL["ppo"].config, recurrent="lstm", **NORMALIZED))
AGENTS = {name: (agent, spec_of(name)) for name, agent in SMALL.items()}
AGENTS |= {"ppo, memory": (MEMORY, DISCRETE), "sac, discrete": (SMALL["sac"], DISCRETE)}
TD3_OF_SCALED = dataclasses.replace(SMALL["td3"].config, normalize_observations=True)
AGENTS["td3, statistics"] = type(SMALL["td3"])(TD3_OF_SCALED), spec_of("td3")


def assert_equal(one, other):
    assert one.keys() == other.keys()
    tree.map_structure(lambda a, b: np.testing.assert_array_equal(a, b), one, other)


# --- learners ---


@pytest.mark.parametrize("name", AGENTS)
def test_a_restored_learner_goes_on_bit_by_bit(name):
    agent, spec = AGENTS[name]
    straight, file = make_learner(agent, spec), io.BytesIO()
    for seed in range(3):
        straight.env_steps = 5 * seed
        learn(straight, batch_of(agent, spec, seed))
    torch.save(straight.save(), file)
    file.seek(0)
    resumed = make_learner(agent, spec)
    learn(resumed, batch_of(agent, spec, 9))  # Anything: restoring takes it all back.
    resumed.restore(torch.load(file, weights_only=True))
    metrics = [learn(each, batch_of(agent, spec, 4)).metrics for each in (straight, resumed)]
    assert_equal(*metrics)
    assert_equal(straight.save(), resumed.save())
    assert resumed.steps == 4 and all(np.isfinite(float(value)) for value in metrics[0].values())


@pytest.mark.parametrize("name", ["c51", "d4pg", "mpo"])
def test_a_resumed_learner_has_the_limits_of_its_config(name):
    changes = ({"num_atoms": 5, "v_max": limit} for limit in (10.0, 100.0))
    agents = (type(SMALL[name])(dataclasses.replace(SMALL[name].config, **each)) for each in changes)
    narrow, wide = (make_learner(agent, spec_of(name)) for agent in agents)
    wide.restore(narrow.save())
    assert wide.networks.atoms[-1] == 100.0


RATES = {"learning_rate": "policy", "critic_learning_rate": "critics", "dual_learning_rate": "duals"}
RATES |= {"temperature_learning_rate": "temperature", "embedding_learning_rate": "embeddings"}


@pytest.mark.parametrize(
    "name", ["crossq", "d4pg", "ddpg", "droq", "mpo", "sac", "sac, discrete", "simba_v2", "td3", "td7", "tqc"]
)
def test_each_loss_moves_its_own_parameters_only(name):
    agent, spec = AGENTS[name]
    rates = {rate: part for rate, part in RATES.items() if hasattr(agent.config, rate)}
    for rate, part in rates.items():
        changes = {**dict.fromkeys(rates, 0.0), rate: 1e-2, "actor_delay": 1}
        changes |= {"target_update_period": 100} if agent.target_names else {}
        changes = {field: value for field, value in changes.items() if hasattr(agent.config, field)}
        learner = make_learner(type(agent)(dataclasses.replace(agent.config, **changes)), spec)
        assert moved_by(apart(learner), batch_of(agent, spec)) == {part}
        assert all(p.requires_grad for n, p in learner.networks.named_parameters() if ".embeddings." not in n)


@pytest.mark.parametrize("name", SMALL)
def test_the_learner_goes_to_the_configured_device(name):
    agent, spec = AGENTS[name]
    agent = type(agent)(dataclasses.replace(agent.config, device="cuda"))
    if torch.cuda.is_available():
        learner = make_learner(agent, spec)
        assert torch.isfinite(torch.as_tensor(learn(learner, batch_of(agent, spec)).metrics["loss"]))
        assert next(learner.networks.parameters()).is_cuda
    else:
        with pytest.raises(ValueError, match=r"^device: got 'cuda', expected a device of this process"):
            make_learner(agent, spec)


@pytest.mark.parametrize("name", AGENTS)
def test_autocast_changes_the_loss_by_rounding_only(name):
    (agent, spec), found = AGENTS[name], []
    for autocast in (False, True):
        agent = type(agent)(dataclasses.replace(agent.config, autocast=autocast))
        found.append(learn(make_learner(agent, spec), batch_of(agent, spec)).metrics["loss"].item())
    assert found[0] == pytest.approx(found[1], rel=0.03, abs=0.02) and found[0] != found[1]


@pytest.mark.parametrize("name", ["dqn", "dreamer", "impala", "ppo", "r2d2", "td3"])
@pytest.mark.parametrize("autocast", [False, True])
def test_images_are_learned_from(name, autocast):
    changes = {"autocast": autocast, "batch_size": 3, "unroll_length": 4, "actor_autocast": autocast}
    config = SMALL[name].config
    agent = type(SMALL[name])(
        dataclasses.replace(config, **{k: v for k, v in changes.items() if hasattr(config, k)})
    )
    spec = IMAGES._replace(actions=spec_of(name).actions)
    learner = make_learner(agent, spec)
    before = {name: p.detach().clone() for name, p in learner.networks.named_parameters()}
    for seed in range(2):  # The policy of TD3 waits for the second step.
        assert np.isfinite(learn(learner, batch_of(agent, spec, seed)).metrics["loss"].item())
    convolutions = {name: p for name, p in learner.networks.named_parameters() if ".images." in name}
    assert convolutions and all(not torch.equal(p, before[name]) for name, p in convolutions.items())


# --- policies ---


@pytest.mark.parametrize("name", AGENTS)
def test_choices_fit_the_spec_and_repeat_from_the_seed_and_from_the_saved_state(name):
    agent, spec = AGENTS[name]
    observation = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)

    def act(policy, times=3):
        state, actions = policy.initial_state(64), []
        for _ in range(times):
            action, _, state = policy.step(observation, state)
            assert action.shape == (64, *spec.actions.shape) and action.dtype == spec.actions.dtype
            for each in action:
                spec.actions.validate(each)
            actions.append(action.tolist())
        return actions

    for version in (0, 1):  # Before the first learner step some act uniformly.
        first, second = (make_policy(agent, spec, version=version) for _ in range(2))
        first.seed(3)
        second.seed(3)
        assert act(first) == act(second)
        second.restore(first.save())
        assert act(first) == act(second)
        second.seed(4)
        assert (act(first) != act(second)) != getattr(agent.config, "noisy", False) or name in ALIKE
    greedy = make_policy(agent, spec, evaluation=True)
    assert act(greedy) == act(greedy)


@pytest.mark.parametrize("name", AGENTS)
def test_a_policy_names_the_variables_it_needs_and_no_others(name):
    agent, spec = AGENTS[name]
    torch.manual_seed(0)
    trained, fresh = agent.make_networks(spec), agent.make_networks(spec)
    for parameter in trained.parameters():
        nn.init.uniform_(parameter, -1.0, 1.0)
    policy, expected = (agent.make_policy(nets, evaluation=True) for nets in (fresh, trained))
    needed = set(policy.variables)
    others = "critics values value_body value_head temperature duals embeddings"
    assert not needed & set(others.split())
    untouched = {n: p.clone() for n, p in fresh.named_parameters() if n.split(".")[0] not in needed}
    block = VariableBlock(NamedArrays(trained).arrays)
    block.publish(3, NamedArrays(trained).arrays, 70)
    assert VariableClient(block, fresh, policy).update()
    assert policy.progress == (3, 70)
    for parameter_name, before in untouched.items():
        assert torch.equal(fresh.get_parameter(parameter_name), before)
    observation = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    acted, wanted = (p.step(observation, p.initial_state(5))[0] for p in (policy, expected))
    np.testing.assert_array_equal(acted, wanted)


SHAPES = {
    "scalar": dm_specs.BoundedArray((), np.float32, -2, 1),
    "matrix": dm_specs.BoundedArray((2, 3), np.float32, -1, [1, 2, 3]),
    "float64": dm_specs.BoundedArray((2,), np.float64, -1, 1),
    "constants": dm_specs.BoundedArray((2, 2), np.float32, [[-1, 0], [3, -1]], [[1, 0], [3, 1]]),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["crossq", "mpo", "sac", "simba_v2", "td3", "tqc"])
def test_learns_and_acts_with_every_shape_of_bounded_action(name, shape):
    actions, agent = SHAPES[shape], SMALL[name]
    spec = make_spec(VECTOR, actions)
    learner = make_learner(agent, spec)
    for seed in range(3):
        metrics = learn(learner, batch_of(agent, spec, seed)).metrics
        assert all(np.isfinite(float(value)) for value in metrics.values())
    observation = 100 * np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    if name == "td3":  # With noise that leaves the range.
        agent = type(agent)(dataclasses.replace(agent.config, exploration_std=3.0))
    for version, evaluation in ((0, False), (1, False), (1, True)):
        taken = make_policy(agent, spec, evaluation, version).step(observation, ())[0]
        assert taken.shape == (64, *actions.shape) and taken.dtype == actions.dtype
        for action in taken:
            actions.validate(action)
    moves = np.broadcast_to(actions.minimum < actions.maximum, actions.shape)
    np.testing.assert_array_equal(taken.std(0) > 0, moves)


UNBOUNDED = dm_specs.Array((2,), np.float32)
EQUAL, HALF = (dm_specs.BoundedArray((2,), np.float32, low, 1) for low in (1, -np.inf))
WHOLE = dm_specs.BoundedArray((2,), np.int64, 0, 4)
REFUSED = [
    *(
        (name, actions, "bounded real numbers")
        for name in NUMBERS_ONLY
        for actions in (CHOICE, UNBOUNDED, WHOLE)
    ),
    *((name, EQUAL, "some of them not equal") for name in ("sac", "td3")),
    *((name, HALF, "finite") for name in ("mpo", "sac")),
    ("td3", {"a": NUMBERS, "b": CHOICE}, r"bounded real numbers.*PPO"),
    ("sac", UNBOUNDED, "bounded real numbers"),
    ("sac", WHOLE, "one discrete action"),
    *((name, NUMBERS, "got BoundedArray.*expected one discrete action") for name in ("dqn", "r2d2")),
    ("ppo", dm_specs.Array((2,), np.int64), "action spec: got"),
    ("ppo", {"a": dm_specs.Array((2,), np.int64)}, "action spec: got"),
]


@pytest.mark.parametrize(("name", "actions", "message"), REFUSED)
def test_actions_that_do_not_fit_are_refused(name, actions, message):
    with pytest.raises(ValueError, match=message):
        SMALL[name].make_networks(make_spec(VECTOR, actions))


# --- masks ---


class Masked(MaskedEnvironment):
    """Observations are a nest; an illegal action of an actor or of the evaluator raises an error."""

    def observation_spec(self):
        return {**super().observation_spec(), "more": (VECTOR, CHOICE)}

    def _observe(self):
        more = self._rng.normal(size=4).astype(np.float32), self._rng.integers(3)
        return {**super()._observe(), "more": more}


WITH_MASKS = [name for name, agent in SMALL.items() if agent.takes_action_masks and name != "ppo_lagrangian"]


@pytest.mark.parametrize("name", WITH_MASKS)
def test_no_target_is_of_an_illegal_action(name):
    batch, _, spec = played(SMALL[name], Masked, steps=120)
    assert abs(learn(make_learner(SMALL[name], spec), batch).metrics["loss"].item()) < 20


# --- programs ---


def shown():
    """Demonstrations for DQfD."""
    environment = environments.make(FakeEnvironment, num_envs=1, seed=0)
    return datasets.record(environment, lambda observation: np.array([1]), 3)


NESTED = make_spec(
    {"a": VECTOR, "b": (CHOICE,)}, {"x": NUMBERS, "y": (dm_specs.BoundedArray((), np.float32, 0, 1),)}
)
OFF = {"min_replay_size": 20, "insert_burst": 16, "samples_per_insert": 1.0}
REPLAY, DETERMINISTIC = {**ITEMS, **OFF}, {**ITEMS, **OFF, "n_step": 2}
ON = {"hidden_sizes": (8,), "unroll_length": 6}
QUEUE = {**UNROLLS, "batch_size": 4}
# Fields of the config, and the environment.
PROGRAMS = {
    **dict.fromkeys(("c51", "dqn", "iqn", "qr_dqn", "rainbow"), (REPLAY, Masked)),
    **dict.fromkeys(("bc", "cql", "iql"), (REPLAY, Masked)),
    **dict.fromkeys(("apex", "droq", "sac"), ({**REPLAY, "normalize_observations": True}, Masked)),
    **dict.fromkeys(("a2c", "a3c", "ppo", "pqn"), (ON, Masked)),
    **dict.fromkeys(("appo", "impact", "impala"), (QUEUE, Masked)),
    **dict.fromkeys(("d4pg", "ddpg", "mpo", "td3", "td3_bc"), (DETERMINISTIC, NESTED)),
    **dict.fromkeys(("crossq", "edac", "rebrac", "simba", "simba_v2", "tqc"), (REPLAY, NESTED)),
    "td7": ({**DETERMINISTIC, "normalize_observations": True}, NESTED),
    "batch_ppo": ({**ON, "episodes_per_batch": 4, "epochs": 2}, NESTED),
    "dqfd": (
        {
            **REPLAY,
            "demonstrations": f"{__name__}:shown",
            "pretraining_steps": 3,
            "normalize_observations": True,
        },
        FakeEnvironment,
    ),
    "dreamer": (
        {
            **WORLD,
            **OFF,
            "min_replay_size": 4,
            "unroll_length": 6,
            "period": 3,
            "normalize_observations": True,
        },
        FakeEnvironment,
    ),
    "keras_dqn": (REPLAY, FakeEnvironment),
    "keras_ppo": ({**ON, "epochs": 2}, FakeEnvironment),
    "maml": ({**ON, "unroll_length": 5, "tasks_per_worker": 1, "evaluation_tasks": 2}, "tasks:Navigation2D"),
    "mappo": ({**ON, "share_parameters": False}, "multi_agent:CartPole"),
    "mbmpo": (
        {**ON, "models": 2, "meta_steps": 2, "imagined_envs": 2, "horizon": 4, "model_epochs": 2},
        FakeEnvironment,
    ),
    "ppo_dqn": (
        {
            "ppo": {"unroll_length": 8, "epochs": 1, "hidden_sizes": (8,)},
            "dqn": {"min_replay_size": 20, "normalize_observations": True},
        },
        "multi_agent:CartPole",
    ),
    "rlpd": (
        {**REPLAY, "demonstrations": f"{__name__}:shown", "num_critics": 3, "actor_delay": 1},
        FakeEnvironment,
    ),
    "r2d2": (
        {**SEQUENCES, **OFF, "min_replay_size": 4, "hidden_sizes": (8,), "normalize_observations": True},
        Masked,
    ),
    "ppo_lagrangian": (ON, "tasks:WindingRoad"),
    "random_actions": ({"batch_size": 8}, NESTED),
    "recurrent_td3": ({**SEQUENCES, **OFF, "min_replay_size": 4, "encoder_sizes": (8,)}, NESTED),
}


def run(name, monkeypatch):
    """How a program of 240 steps ends, and the parameters of its learners."""
    fields, environment = PROGRAMS[name]
    options = {}
    if environment is NESTED:
        environment, options = FakeEnvironment, {"spec": NESTED, "episode_length": 6}
    agent, learners = make_agent(name, **fields), []
    original = type(agent).make_learner

    def make(self, networks, spec):
        learners.append(original(self, networks, spec))
        return learners[-1]

    monkeypatch.setattr(type(agent), "make_learner", make)
    config = RunConfig(
        num_actors=2, envs_per_actor=2, max_env_steps=240, evaluate_period=240, num_evaluation_episodes=2,
        environment_options=options, seed=3,
    )  # fmt: skip
    result = launch.launch(make_program(agent, environment, config), engine="serial")
    monkeypatch.undo()
    return result, [leaf for each in learners for leaf in tree.flatten(as_numpy(each.parameters()))]


def test_every_agent_has_a_program():
    assert sorted(PROGRAMS) == agent_names()


# Of agents that share their parts, the first one repeats in every change, all of them before a release.
TWICE = (
    "a2c",
    "batch_ppo",
    "dqfd",
    "dqn",
    "dreamer",
    "impala",
    "maml",
    "ppo",
    "ppo_dqn",
    "r2d2",
    "sac",
    "td7",
)


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        *((name, 2 if name in TWICE else 1) for name in PROGRAMS),
        *(pytest.param(name, 2, marks=pytest.mark.release) for name in PROGRAMS if name not in TWICE),
    ],
)
def test_a_program_ends_with_its_counts_and_repeats_from_its_seed(name, runs, monkeypatch):
    result, parameters = run(name, monkeypatch)
    assert (result["reason"], result["env_steps"]) == ("max_env_steps", 240)
    assert result["learner_steps"] > 2 and np.isfinite(result["episode_return"])
    assert all(np.isfinite(leaf).all() for leaf in parameters) and (parameters or name == "random_actions")
    if runs > 1:
        again, others = run(name, monkeypatch)
        assert again == result
        for one, other in zip(parameters, others, strict=True):
            np.testing.assert_array_equal(one, other)
