"""One learner step of the agents on Keras in float64, from weights and batches that no back end decides.

python keras_steps.py BACKEND MODE FILE     writes what `steps` returns
"""

import os
import pickle
import sys
from unittest import mock

import numpy as np
import tree
from agent_batches import DISCRETE, transitions, unrolls

from agents.keras_dqn import KerasDQN, KerasDQNConfig
from agents.keras_ppo import KerasPPO, KerasPPOConfig
from agents.ppo import PPO, PPOConfig
from framework.backends.functions import load

# Numbers that float32 holds exactly: the agents on torch make float32 of rewards and discounts.
SHARED = {"hidden_sizes": (8, 8), "learning_rate": 0.01, "max_gradient_norm": 0.1, "discount": 0.5}
DQN_FIELDS = {**SHARED, "adam_epsilon": 1e-3, "n_step": 1}
PPO_FIELDS = {**SHARED, "gae_lambda": 0.5, "unroll_length": 6, "epochs": 1, "minibatch_size": None}
PPO_FIELDS["entropy_coefficient"] = 0.1
AGENTS = {"dqn": (KerasDQN, KerasDQNConfig, DQN_FIELDS), "ppo": (KerasPPO, KerasPPOConfig, PPO_FIELDS)}


def batch_of(name):
    """A batch for the agent on torch, in float64."""
    batch = transitions() if name == "dqn" else unrolls(PPO(PPOConfig(**PPO_FIELDS)))
    batch = tree.map_structure(
        lambda leaf: leaf.astype(np.float64) if leaf.dtype.kind == "f" else leaf, batch
    )
    return batch._replace(data=batch.data._replace(reward=np.round(8 * batch.data.reward) / 8))


def drawn(shapes, seed):
    """Weights and biases."""
    random = np.random.default_rng(seed)
    return [0.5 * random.normal(size=shape) for shape in shapes]


def with_log_probs(batch):
    """The batch with the extras of the agent on Keras."""
    if "policy" not in batch.data.extras:
        return batch
    logits = batch.data.extras["policy"]["logits"]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    taken = np.take_along_axis(log_probs, batch.data.action[..., None], -1)[..., 0]
    return batch._replace(data=batch.data._replace(extras={"log_prob": taken}))


def step(name, backend, mode):
    """The loss, the gradients, and the weights and target weights after a step."""
    agent_class, config, fields = AGENTS[name]
    agent = agent_class(config(**fields, backend=backend, step_mode=mode))
    networks = agent.make_networks(DISCRETE)
    learner = agent.make_learner(networks, DISCRETE)
    state, shapes = learner.save(), [leaf.shape for leaf in networks.leaves()]
    for part, seed in (("networks", 0), ("targets", 1)):
        state[part] = dict(zip(state[part], drawn(shapes, seed), strict=bool(agent.target_names)))
    learner.restore(state)
    computed, gradients = [], learner.gradient
    learner.gradient = lambda *arguments: computed.append(gradients(*arguments)) or computed[-1]
    result = learner.step(with_log_probs(batch_of(name)))
    after = learner.save()
    found = {"loss": [result.metrics["loss"]], "norm": [result.metrics["gradient_norm"]]}
    found |= {"weights": list(after["networks"].values()), "targets": list(after["targets"].values())}
    if mode == "eager":
        found["gradients"] = computed[0][1]
    return {key: [np.asarray(each) for each in values] for key, values in found.items()}


def steps(backend, mode):
    """What `step` finds of each agent, by its name."""
    load(backend)
    import keras
    from keras.src.backend.common import dtypes

    before, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")  # The first layer of a process keeps it.
    try:
        # On torch and JAX, Keras makes 32 bits of 64 wherever types meet, whatever `floatx` is.
        with mock.patch.dict(dtypes.BIT64_TO_BIT32_DTYPE, float64="float64", int64="int64"):
            return {name: step(name, backend, mode) for name in AGENTS}
    finally:
        keras.config.set_floatx(before)
        keras.config.set_dtype_policy(policy)


if __name__ == "__main__":
    os.environ["JAX_ENABLE_X64"] = "1"
    with open(sys.argv[3], "wb") as file:
        pickle.dump(steps(*sys.argv[1:3]), file)
