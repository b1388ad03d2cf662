"""Agents on Keras: one step on every back end is the step of our own agents on torch, in float64."""

from __future__ import annotations

import functools
import io
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
import tree
from agent_batches import DISCRETE, VECTOR, make_learner, make_policy, transitions
from dm_env import specs as dm_specs
from keras_steps import AGENTS, DQN_FIELDS, PPO_FIELDS, batch_of, drawn, steps, with_log_probs
from torch import nn

import launch
from agents.dqn import DQN, DQNConfig, DQNNetworks
from agents.keras_dqn import KerasDQN, KerasDQNConfig
from agents.keras_ppo import KerasPPO, KerasPPOConfig
from agents.ppo import PPO, PPOConfig
from framework.backends.functions import load
from framework.environments.testing import make_spec
from framework.networks import as_tensors
from framework.parameters import NamedArrays
from framework.programs import RunConfig, make_agent, make_program
from framework.variables import VariableBlock, VariableClient

OTHERS = [
    ("torch", "compile"),
    *((name, mode) for name in ("tensorflow", "jax") for mode in ("eager", "compile")),
]
PLAIN = {"normalize_observations": False, "normalize_rewards": False}


def expected(name):
    """The same step of the agent on torch."""
    agent = DQN(DQNConfig(**DQN_FIELDS)) if name == "dqn" else PPO(PPOConfig(**PPO_FIELDS, **PLAIN))
    learner = make_learner(agent)
    learner.networks.double(), learner.targets.double()
    if name == "dqn":
        learner.networks.q_network.encoder = learner.targets["q_network"].encoder = nn.Identity()
        parts, targets = [learner.networks.q_network], [learner.targets]
    else:
        own = learner.networks
        own.encoder, targets = nn.Identity(), []
        parts = [own.body, own.head, own.value_body, own.value_head]
    parameters, followers = ([p for part in each for p in part.parameters()] for each in (parts, targets))
    for own, seed in ((parameters, 0), (followers, 1)):
        with torch.no_grad():
            for parameter, values in zip(own, drawn([p.shape[::-1] for p in own], seed), strict=True):
                parameter.copy_(torch.as_tensor(values.T.copy()))
    batch = batch_of(name)
    batch = batch._replace(data=as_tensors(batch.data))
    seen, gradient = [], learner._gradient
    learner._gradient = lambda *inputs: seen.append(gradient(*inputs)) or seen[-1]
    result = learner.step(batch)
    grown = {"weights": parameters, "targets": followers}
    found = {key: [p.detach().numpy().T for p in each] for key, each in grown.items()}
    of = dict(zip(map(id, learner._parameters), seen[0][1], strict=True))
    found["gradients"] = [of[id(p)].numpy().T for p in parameters]
    metrics = {"loss": result.metrics["loss"], "norm": result.metrics["gradient_norm"]}
    return found | {key: [np.asarray(value)] for key, value in metrics.items()}


expected_of = functools.cache(expected)


def assert_alike(found):
    for name, parts in found.items():
        wanted = expected_of(name)
        for key, arrays in parts.items():
            for got, want in zip(arrays, wanted[key], strict=True):
                assert got.dtype == np.float64
                np.testing.assert_allclose(got, want, rtol=0, atol=1e-9, err_msg=f"{name} {key}")


def test_a_step_is_that_of_the_agents_on_torch():
    found = steps("torch", "eager")
    assert {*found["dqn"]} == {"loss", "norm", "gradients", "weights", "targets"}
    assert_alike(found)


@pytest.mark.release  # Other back ends are no part of the environment of `make test`; one is compiled.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("backend", "mode"), OTHERS)
def test_every_back_end_makes_the_same_step(backend, mode, tmp_path):
    script, file = sys.modules["keras_steps"].__file__, tmp_path / "found"
    subprocess.run([sys.executable, script, backend, mode, str(file)], check=True)
    assert_alike(pickle.loads(file.read_bytes()))


def small(name, **fields):
    agent_class, config, own = AGENTS[name]
    minibatches = {"minibatch_size": 8, "epochs": 2} if name == "ppo" else {}
    return agent_class(config(**{**own, **minibatches, **fields}))


def batches(name, count):
    return [
        with_log_probs(transitions(seed=seed) if name == "dqn" else batch_of(name)) for seed in range(count)
    ]


@pytest.mark.parametrize("name", AGENTS)
def test_a_restored_learner_goes_on_bit_by_bit(name):
    agent, file = small(name, learning_rate_decay=9), io.BytesIO()
    *before, last = batches(name, 4)
    straight, resumed = make_learner(agent), make_learner(agent)
    for number, batch in enumerate(before):
        straight.env_steps = number
        straight.step(batch)
    pickle.dump(straight.save(), file)
    resumed.step(last)  # Anything: restoring takes it all back.
    resumed.restore(pickle.loads(file.getvalue()))
    for learner in (straight, resumed):
        learner.step(last)
    tree.map_structure(np.testing.assert_array_equal, straight.save(), resumed.save())
    assert (resumed.steps, resumed.env_steps) == (4, 2)


def test_nothing_changes_in_a_step_that_is_not_finite():
    learner, (batch,) = make_learner(small("dqn")), batches("dqn", 1)
    before = learner.save()
    with pytest.raises(FloatingPointError, match=r"Learner step 0: got loss nan.*expected finite"):
        learner.step(batch._replace(data=batch.data._replace(reward=batch.data.reward * np.nan)))
    tree.map_structure(np.testing.assert_array_equal, before, learner.save())


@pytest.mark.parametrize("name", AGENTS)
def test_a_policy_acts_with_the_variables_that_it_names_and_repeats_from_its_seed(name):
    agent = small(name)
    trained, policy = agent.make_networks(DISCRETE), make_policy(agent)
    for leaf in trained.leaves():
        leaf[...] = np.random.default_rng(1).normal(size=leaf.shape)
    block = VariableBlock(NamedArrays(trained).arrays)
    block.publish(3, NamedArrays(trained).arrays, 70)
    assert VariableClient(block, policy.networks, policy).update() and policy.progress == (3, 70)
    observation, greedy = (
        np.random.default_rng(0).normal(size=(64, 4)),
        agent.make_policy(trained, evaluation=True),
    )
    wanted = {"dqn": "q_network", "ppo": "policy"}[name]
    assert policy.variables == (wanted,)
    outputs = np.asarray(getattr(trained, wanted)(observation.astype(np.float32)).detach())
    assert not np.array_equal(
        greedy.step(observation, ())[0], outputs.argmax(-1)
    )  # Its layers are as they were made.
    state, drawn_before = policy.save(), policy.step(observation, ())[0]
    policy.restore(state)
    np.testing.assert_array_equal(policy.step(observation, ())[0], drawn_before)
    assert drawn_before.dtype == DISCRETE.actions.dtype and len({*drawn_before}) > 1
    again = agent.make_policy(policy.networks, evaluation=True)
    np.testing.assert_array_equal(again.step(observation, ())[0], greedy.step(observation, ())[0])


CHANGED = {
    "dqn": {
        "huber_delta": 0.01,
        "double": False,
        "layer_norm": False,
        "hidden_sizes": (9,),
        "discount": 0.9,
        "max_gradient_norm": None,
        "target_update_rate": 0.5,
        "target_update_period": 2,
        "adam_epsilon": 0.1,
        "learning_rate": 0.1,
        "learning_rate_decay": 2,
    },
    "ppo": {
        "gae_lambda": 0.9,
        "normalize_advantages": False,
        "clip": 0.01,
        "value_coefficient": 9.0,
        "epochs": 3,
        "entropy_coefficient": 0.0,
        "minibatch_size": 4,
        "activation": "relu",
        "reward_clip": 0.1,
    },
}


@functools.cache
def learned(name, **fields):
    """All parameters after six steps."""
    learner = make_learner(small(name, **{"learning_rate": 0.3, **fields}))
    for number, batch in enumerate(batches(name, 6)):
        learner.env_steps = number
        learner.step(batch)
    return np.concatenate([leaf.ravel() for leaf in learner.save()["networks"].values()])


@pytest.mark.parametrize(("name", "field"), [(name, field) for name in AGENTS for field in CHANGED[name]])
def test_every_field_changes_what_is_learned(name, field):
    found = learned(name), learned(name, **{field: CHANGED[name][field]})
    assert found[0].shape != found[1].shape or not np.array_equal(*found)


def normalizing(config, spec):
    """A network with statistics, which no gradient changes."""
    from keras import Sequential, layers

    model = Sequential([layers.BatchNormalization(momentum=0.5), layers.Dense(3)])
    model.build((None, 4))
    return {"q_network": model}


def test_statistics_of_layers_are_variables_that_no_gradient_changes():
    agent = KerasDQN(KerasDQNConfig(**DQN_FIELDS), networks_fn=normalizing)
    networks = agent.make_networks(DISCRETE)
    assert [*networks["q_network"]][2:4] == ["2/moving_mean", "3/moving_variance"]
    learner, (batch,) = make_learner(agent), batches("dqn", 1)
    learner.step(batch)
    np.testing.assert_array_equal(
        learner.parameters()["q_network"]["2/moving_mean"], 0.0
    )  # It does not train.


def with_a_shared_torso(config, spec):
    from keras import Input, Model, layers

    inputs = Input((4,))
    features = layers.Dense(8, "tanh")(inputs)
    return {
        "policy": Model(inputs, layers.Dense(3)(features)),
        "value": Model(inputs, layers.Dense(1)(features)),
    }


def test_what_layers_share_is_one_variable_that_both_losses_train():
    agent = KerasPPO(KerasPPOConfig(**PPO_FIELDS), networks_fn=with_a_shared_torso)
    learner, (batch, last) = make_learner(agent), batches("ppo", 2)
    before = learner.parameters()["policy"]["0/kernel"]
    learner.step(batch)
    after = learner.parameters()
    assert not np.array_equal(after["policy"]["0/kernel"], before)
    np.testing.assert_array_equal(after["policy"]["0/kernel"], after["value"]["0/kernel"])
    again = make_learner(agent)
    again.restore(learner.save())
    learner.step(last), again.step(last)
    tree.map_structure(np.testing.assert_array_equal, learner.save(), again.save())


def on_keras(config, spec):
    """DQN's networks with a Keras model as the network of values."""
    load("torch")
    from keras import Sequential, layers

    networks = DQNNetworks(config, spec)
    # Names, because Keras counts the layers of a process, and all networks have equal entries.
    hidden, last = layers.Dense(16, "relu", name="hidden"), layers.Dense(networks.num_actions, name="last")
    networks.q_network = Sequential([hidden, last], name="q")
    networks.q_network.build((None, *spec.observations.shape))
    return networks


def test_an_agent_on_torch_takes_layers_of_keras():
    config = RunConfig(
        envs_per_actor=2, max_env_steps=200, evaluate_period=200, num_evaluation_episodes=1, seed=0
    )
    fields = DQNConfig(min_replay_size=32, batch_size=16, insert_burst=16, samples_per_insert=2.0)
    program = make_program(DQN(fields, networks_fn=on_keras), "gymnasium:CartPole-v1", config)
    assert launch.launch(program, engine="serial")["learner_steps"] > 10


def test_a_process_has_one_back_end():
    load("torch")
    with pytest.raises(ValueError, match=r"backend: got 'jax', expected 'torch'.*Start a new process"):
        load("jax")


@pytest.mark.parametrize(
    "field",
    [
        {"device": "cuda"},
        {"devices": {"q_network": "cpu"}},
        {"autocast": True},
        {"step_mode": "cuda_graph"},
        {"backend": "mxnet"},
    ],
)
def test_settings_that_keras_has_no_use_for_are_refused(field):
    (name,) = field
    with pytest.raises(ValueError, match=f"^{name}: got .*, expected"):
        KerasDQNConfig(**field)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (make_spec({"a": VECTOR}, DISCRETE.actions), "observation: got .*expected one array of floats"),
        (
            make_spec(VECTOR, dm_specs.BoundedArray((2,), np.float32, -1, 1)),
            "action spec: got .*one discrete action",
        ),
    ],
)
def test_specs_that_do_not_fit_are_refused(spec, text):
    with pytest.raises(ValueError, match=text):
        KerasDQN().make_networks(spec)


def test_only_agents_on_keras_import_it():
    code = (
        "import sys; from framework.programs import make_agent, make_program; "
        "make_program(make_agent('keras_dqn', backend='jax'), 'gymnasium:CartPole-v1'); "
        "print([name for name in ('keras', 'tensorflow', 'jax') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
@pytest.mark.parametrize("name", AGENTS)
def test_programs_of_processes_run_on_other_back_ends(name, backend):
    fields = {"min_replay_size": 32, "batch_size": 16, "insert_burst": 16, "samples_per_insert": 2.0}
    agent = make_agent(
        f"keras_{name}", backend=backend, **(fields if name == "dqn" else {"unroll_length": 8})
    )
    config = RunConfig(num_actors=2, max_env_steps=400, evaluate_period=200, num_evaluation_episodes=1)
    result = launch.launch(make_program(agent, "gymnasium:CartPole-v1", config), engine="processes")
    assert result["reason"] == "max_env_steps" and result["learner_steps"] > 5


SAVED = """
import sys
import fresh_runs
import numpy as np
from agent_batches import DISCRETE
from framework.export import export
from framework.programs import load_policy, make_agent

for name, made in (("dqn", "a"), ("ppo", "b")):
    agent = make_agent(f"keras_{name}", backend="tensorflow", hidden_sizes=(8,))
    run = fresh_runs.make(f"{sys.argv[1]}/{made}", agent, DISCRETE).path
    policy = load_policy(run)
    path = export(policy, run, format="saved_model")
    assert export(policy, path, format="saved_model") == path == run / "policy"
    import tensorflow as tf

    observation = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    action = tf.saved_model.load(str(path)).signatures["serving_default"](observation=observation)["action"]
    np.testing.assert_array_equal(action.numpy(), policy(observation, np.ones(50, bool)))
    assert 0 < action.numpy().mean() and action.dtype == DISCRETE.actions.dtype
"""


@pytest.mark.release
def test_tensorflow_may_have_computed_already():
    code = (
        "import tensorflow as tf; tf.constant(1.0) + 1.0; "
        "from framework.backends.functions import load; load('tensorflow')"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "KERAS_BACKEND": "tensorflow"},
    )


@pytest.mark.release
def test_a_saved_model_acts_as_the_policy(tmp_path):
    paths = f"import sys; sys.path[:] = {sys.path!r}"
    subprocess.run([sys.executable, "-c", f"{paths}\n{SAVED}", str(tmp_path)], check=True)
