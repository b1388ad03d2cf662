"""Learners of all agents that divide their batches, and the batches that they learn from."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pathlib
import socket

import numpy as np
import torch
import tree
from dm_env import specs as dm_specs

from agents.appo import APPO, APPOConfig
from agents.d4pg import D4PG, D4PGConfig
from agents.dqn import DQN, DQNConfig
from agents.dreamer import Dreamer, DreamerConfig
from agents.impala import IMPALA, IMPALAConfig
from agents.iqn import IQN, IQNConfig
from agents.mpo import MPO, MPOConfig
from agents.ppo import PPO, PPOConfig
from agents.r2d2 import R2D2, R2D2Config
from agents.rainbow import Rainbow, RainbowConfig
from agents.recurrent_td3 import RecurrentTD3, RecurrentTD3Config
from agents.sac import SAC, SACConfig
from agents.simba_v2 import SimBaV2, SimBaV2Config
from agents.td3 import TD3, TD3Config
from agents.td7 import TD7, TD7Config
from framework import adders
from framework.environments import testing
from framework.networks import as_tensors
from framework.types import Step, Transition

Info = collections.namedtuple("Info", "key probability table_size")
Sample = collections.namedtuple("Sample", "info data")

STEPS, BATCH, UNROLL = 12, 16, 5
FEW_STEPS = 2  # For agents with dozens of minibatches in each.
DISCRETE = dm_specs.DiscreteArray(3, np.int64)
CONTINUOUS = dm_specs.BoundedArray((2,), np.float32, -2, 1)
ITEMS = {"hidden_sizes": (8, 8), "batch_size": BATCH}
SEQUENCES = {"batch_size": BATCH, "burn_in": 2, "unroll_length": UNROLL - 2, "period": 1}
SEQUENCES |= {"hidden_sizes": (8,)}
# One minibatch an epoch.
MINIBATCHES = {"unroll_length": UNROLL, "epochs": 2, "minibatch_size": 1000, "entropy_coefficient": 0.01}
RATES = {"learning_rate": 1e-3, "learning_rate_decay": 3000}
NORMAL = {"normalize_observations": True, "normalize_rewards": True}
PPO_CONFIG = PPOConfig(hidden_sizes=(8, 8), **MINIBATCHES, **RATES, **NORMAL)
PENALTY = {"target_kl": 1e-3, "discount": 0.9}
D4PG_CONFIG = D4PGConfig(**ITEMS, prioritized=True, learning_rate=1e-3, target_update_period=2)
TD7_CONFIG = TD7Config(**ITEMS, embedding_size=6, embedding_hidden_sizes=(8,), target_update_period=3)
WORLD = DreamerConfig(
    batch_size=BATCH, burn_in=2, unroll_length=UNROLL - 2, period=1, learning_rate=1e-2, discount=0.9,
    learning_rate_warmup=0, deter_size=8, blocks=2, hidden_size=4, stoch_size=3, units=8, num_layers=1,
    num_bins=41, imagination_length=4,
)  # fmt: skip


def ppo(**changes):
    return PPO(dataclasses.replace(PPO_CONFIG, **changes))


AGENTS = {
    "dqn": (DQN(DQNConfig(**ITEMS)), DISCRETE),
    "prioritized dqn": (
        DQN(DQNConfig(**ITEMS, prioritized=True, importance_sampling_annealing=9)),
        DISCRETE,
    ),
    "iqn": (IQN(IQNConfig(**ITEMS, num_quantiles=4)), DISCRETE),
    # All learners draw the same noise.
    "rainbow": (Rainbow(RainbowConfig(**ITEMS)), DISCRETE),
    # With a policy that is left out of every second step.
    "discrete sac": (SAC(SACConfig(**ITEMS, actor_delay=2)), DISCRETE),
    "d4pg": (D4PG(D4PG_CONFIG), CONTINUOUS),
    "td3": (TD3(TD3Config(**ITEMS, normalize_observations=True)), CONTINUOUS),
    "td7": (TD7(TD7_CONFIG), CONTINUOUS),
    "ppo": (ppo(), DISCRETE),
    "ppo with a penalty": (ppo(**PENALTY), CONTINUOUS),
    "ppo with a memory": (ppo(recurrent="lstm"), DISCRETE),
    # So small (or of one env, with a memory) that a learner often has nothing of a minibatch.
    "ppo in small minibatches": (ppo(minibatch_size=2), DISCRETE),
    "ppo in minibatches": (ppo(minibatch_size=9, value_clip=0.5), DISCRETE),
    "ppo in minibatches with a penalty": (ppo(minibatch_size=3, **PENALTY), CONTINUOUS),
    "ppo in minibatches with a memory": (ppo(minibatch_size=3, recurrent="gru"), DISCRETE),
    "dreamer": (Dreamer(WORLD), CONTINUOUS),
    "appo": (APPO(APPOConfig(**ITEMS, learning_rate=1e-3, target_update_period=3)), DISCRETE),
    "impala": (IMPALA(IMPALAConfig(**ITEMS, lstm_size=8)), DISCRETE),
    "r2d2": (R2D2(R2D2Config(**SEQUENCES)), DISCRETE),
    "recurrent td3": (
        RecurrentTD3(RecurrentTD3Config(**SEQUENCES, prioritized=True, normalize_observations=True)),
        CONTINUOUS,
    ),
    "mpo": (MPO(MPOConfig(**ITEMS, num_atoms=11)), CONTINUOUS),
    "simba_v2": (SimBaV2(SimBaV2Config(**ITEMS, critic_hidden_sizes=(8,), learning_rate=1e-2)), CONTINUOUS),
    "sac": (SAC(SACConfig(**ITEMS)), CONTINUOUS),
}
ON_POLICY = [
    name for name in AGENTS if "ppo" in name or name in ("impala", "r2d2", "recurrent td3", "dreamer")
]


def make_spec(actions):
    return testing.make_spec(dm_specs.Array((4,), np.float32), actions)


def make_batch(step, name):
    agent, actions = AGENTS[name]
    if name in ON_POLICY:
        return make_unrolls(step, agent, make_spec(actions))
    random = np.random.default_rng(step)
    observation, next_observation = random.normal(size=(2, BATCH, 4)).astype(np.float32)
    if isinstance(actions, dm_specs.DiscreteArray):
        action = random.integers(0, 3, BATCH)
    else:
        action = random.uniform(-2, 1, (BATCH, 2)).astype(np.float32)
    discount = (random.random(BATCH) < 0.8).astype(np.float32)
    reward, returns = random.normal(size=(2, BATCH)).astype(np.float32)
    data = Transition(
        observation, action, reward, discount, next_observation, {adders.RUNNING_RETURN: returns}
    )
    return Sample(make_info(random), data)


def make_unrolls(step, agent, spec):
    """Unrolls of random experience; the later the env, the more of its rows are masked."""
    random = np.random.default_rng(step)
    torch.manual_seed(step + 100)
    policy = agent.make_policy(agent.make_networks(spec))
    policy.seed(step)
    state = policy.initial_state(BATCH)
    rows = []
    for t in range(UNROLL + 1):
        observation = random.normal(1.0, 2.0, size=(BATCH, 4)).astype(np.float32)
        action, extras, state = policy.step(observation, state)
        real = ((t < UNROLL) * (random.random(BATCH) > np.linspace(0.0, 0.8, BATCH))).astype(np.float32)
        reward = random.normal(2.0, 3.0, BATCH).astype(np.float32) * real
        discount = (random.random(BATCH) < 0.8) * real
        start = random.random(BATCH) < 0.2
        rows.append(Step(observation, action, reward, discount, start, extras, real))
    data = tree.map_structure(lambda *leaves: np.stack(leaves, 1), *rows)
    if "state" in data.extras:  # replay keeps that of the first row only
        data.extras["state"] = tuple(part[:, 0] for part in data.extras["state"])
    return Sample(make_info(random), data)


def make_info(random):
    """Items that were drawn from a table of 1000, the later ones of the batch with less of a chance."""
    probability = random.uniform(0.5, 1.5, BATCH) * np.linspace(2e-3, 1e-4, BATCH)
    return Info(np.arange(BATCH, dtype=np.uint64), probability, np.full(BATCH, 1000))


def make_learner(name, rank=0, size=1):
    agent, actions = AGENTS[name]
    torch.manual_seed(rank)  # Each begins elsewhere: the first one's state is what counts.
    agent = agent.for_program(BATCH, size, rank)
    return agent.make_learner(agent.make_networks(make_spec(actions)), make_spec(actions))


def learn(name, learner, rank, size):
    mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    # Unrolls take longer to make than to learn from, so few are made and learned from in turn.
    batches = [tree.map_structure(lambda leaf: leaf[mine], make_batch(step, name)) for step in range(3)]
    for step in range(FEW_STEPS if "minibatches" in name else STEPS):
        batch = batches[step % len(batches)]
        learner.env_steps = step
        result = learner.step(batch._replace(data=as_tensors(batch.data)))
    return {
        "parameters": {k: v.numpy() for k, v in learner.networks.state_dict().items()},
        "targets": {k: v.numpy() for k, v in learner.targets.state_dict().items()},
        "priorities": [] if result.priorities is None else result.priorities.tolist(),
        "norm": float(result.metrics["gradient_norm"]),
        "noise": torch.rand(3, generator=learner._generator).tolist(),
    }


def listening():
    """Addresses and ports on which this process accepts connections."""
    inodes = set()
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    addresses = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in pathlib.Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                packed = bytes.fromhex(fields[1].split(":")[0])
                words = [packed[i : i + 4][::-1] for i in range(0, len(packed), 4)]
                port = int(fields[1].split(":")[1], 16)
                addresses.add((socket.inet_ntop(family, b"".join(words)), port))
    return addresses
