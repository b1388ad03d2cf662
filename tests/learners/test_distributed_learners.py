"""Learners in two processes do what one does with the whole batch."""

import collections
import contextlib
import dataclasses
import functools
import multiprocessing
import os
import pathlib
import socket
import threading

import numpy as np
import pytest
import torch
import tree
from dm_env import specs as dm_specs

from agents.appo import APPO, APPOConfig
from agents.d4pg import D4PG, D4PGConfig
from agents.dqn import DQN, DQNConfig
from agents.impala import IMPALA, IMPALAConfig
from agents.mpo import MPO, MPOConfig
from agents.ppo import PPO, PPOConfig
from agents.r2d2 import R2D2, R2D2Config
from agents.rainbow import Rainbow, RainbowConfig
from agents.recurrent_td3 import RecurrentTD3, RecurrentTD3Config
from agents.sac import SAC, SACConfig
from agents.td3 import TD3, TD3Config
from framework import specs
from framework.learners import LearnerGroup, LossContext, distributed
from framework.networks import as_tensors
from framework.programs.learner_group import Barrier
from framework.types import Step, Transition

Info = collections.namedtuple("Info", "key probability table_size")
Sample = collections.namedtuple("Sample", "info data")

STEPS, BATCH, UNROLL = 20, 16, 5
DISCRETE = dm_specs.DiscreteArray(3, np.int64)
CONTINUOUS = dm_specs.BoundedArray((2,), np.float32, -2, 1)
# One minibatch an epoch.
PPO_CONFIG = PPOConfig(
    hidden_sizes=(8, 8),
    unroll_length=UNROLL,
    epochs=2,
    minibatch_size=1000,
    learning_rate=1e-3,
    learning_rate_decay=3000,
    normalize_observations=True,
    normalize_rewards=True,
    entropy_coefficient=0.01,
)
ANNEALED = {"importance_sampling_annealing": 15}
AGENTS = {
    "dqn": (DQN(DQNConfig(hidden_sizes=(8, 8), batch_size=BATCH)), DISCRETE),
    "prioritized dqn": (
        DQN(
            DQNConfig(
                hidden_sizes=(8, 8), batch_size=BATCH, prioritized=True, importance_sampling_annealing=15
            )
        ),
        DISCRETE,
    ),
    # All learners draw the same noise.
    "rainbow": (Rainbow(RainbowConfig(hidden_sizes=(8, 8), batch_size=BATCH)), DISCRETE),
    # With a policy that is left out of every second step.
    "discrete sac": (SAC(SACConfig(hidden_sizes=(8, 8), batch_size=BATCH, actor_delay=2)), DISCRETE),
    "d4pg": (
        D4PG(
            D4PGConfig(
                hidden_sizes=(8, 8),
                batch_size=BATCH,
                prioritized=True,
                learning_rate=1e-3,
                target_update_period=2,
            )
        ),
        CONTINUOUS,
    ),
    "td3": (TD3(TD3Config(hidden_sizes=(8, 8), batch_size=BATCH)), CONTINUOUS),
    "ppo": (PPO(PPO_CONFIG), DISCRETE),
    "ppo with a penalty": (
        PPO(dataclasses.replace(PPO_CONFIG, target_kl=1e-3, discount=0.9)),
        CONTINUOUS,
    ),
    "ppo with a memory": (PPO(dataclasses.replace(PPO_CONFIG, recurrent="lstm")), DISCRETE),
    # So small (or of one env, with a memory) that a learner often has nothing of a minibatch.
    "ppo in small minibatches": (PPO(dataclasses.replace(PPO_CONFIG, minibatch_size=2)), DISCRETE),
    "ppo in minibatches": (
        PPO(dataclasses.replace(PPO_CONFIG, minibatch_size=9, value_clip=0.5)),
        DISCRETE,
    ),
    "ppo in minibatches with a penalty": (
        PPO(dataclasses.replace(PPO_CONFIG, minibatch_size=3, target_kl=1e-3, discount=0.9)),
        CONTINUOUS,
    ),
    "ppo in minibatches with a memory": (
        PPO(dataclasses.replace(PPO_CONFIG, minibatch_size=3, recurrent="gru")),
        DISCRETE,
    ),
    "appo": (APPO(APPOConfig(hidden_sizes=(8, 8), batch_size=BATCH, target_update_period=3)), DISCRETE),
    "impala": (IMPALA(IMPALAConfig(hidden_sizes=(8, 8), batch_size=BATCH, lstm_size=8)), DISCRETE),
    "r2d2": (
        R2D2(R2D2Config(hidden_sizes=(8,), batch_size=BATCH, burn_in=2, unroll_length=UNROLL - 2, period=1)),
        DISCRETE,
    ),
    "recurrent td3": (
        RecurrentTD3(
            RecurrentTD3Config(
                hidden_sizes=(8,),
                batch_size=BATCH,
                burn_in=2,
                unroll_length=UNROLL - 2,
                period=1,
                prioritized=True,
            )
        ),
        CONTINUOUS,
    ),
    "mpo": (MPO(MPOConfig(hidden_sizes=(8, 8), batch_size=BATCH, num_atoms=11)), CONTINUOUS),
    "sac": (SAC(SACConfig(hidden_sizes=(8, 8), batch_size=BATCH)), CONTINUOUS),
}
ON_POLICY = [name for name in AGENTS if "ppo" in name or name in ("impala", "r2d2", "recurrent td3")]


def make_spec(actions):
    return specs.EnvironmentSpec(
        dm_specs.Array((4,), np.float32),
        actions,
        dm_specs.Array((), np.float32),
        dm_specs.BoundedArray((), np.float32, 0, 1),
    )


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
    data = Transition(
        observation, action, random.normal(size=BATCH).astype(np.float32), discount, next_observation
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
    for step in range(STEPS):
        batch = tree.map_structure(lambda leaf: leaf[mine], make_batch(step, name))
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
    """Addresses on which this process accepts connections."""
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
                addresses.add(socket.inet_ntop(family, b"".join(words)))
    return addresses


def peer(rank, ports, results):
    """One of two processes; all agents in turn, each in a group of its own."""
    torch.set_num_threads(1)
    for name in AGENTS:
        learner = make_learner(name, rank, 2)
        learner.restore(make_learner(name, 0, 2).save())
        group = LearnerGroup(rank, 2, ports[name], timeout_s=60)
        learner.distribute(group)
        results.put((name, rank, learn(name, learner, rank, 2) | {"listening": listening()}))
        if rank == 1 and name == "sac":
            return  # without a word
        if rank == 0 and name == "sac":
            # The other one has gone, or goes now: no exchange may hang.
            with pytest.raises(RuntimeError):
                for _ in range(1000):
                    group.counts(1)
            results.put(("noticed", 0, {}))
        group.close()


@pytest.fixture(scope="module")
def together():
    stores = {name: distributed.host_store(2) for name in AGENTS}
    ports = {name: store.port for name, store in stores.items()}
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=peer, args=(rank, ports, results), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    found = {}
    for _ in range(2 * len(AGENTS) + 1):
        name, rank, result = results.get(timeout=90)
        found[name, rank] = result
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    return found


def assert_close(first, second, tolerance):
    assert first.keys() == second.keys()
    for key in first:
        np.testing.assert_allclose(first[key], second[key], rtol=0, atol=tolerance, err_msg=key)


@pytest.mark.parametrize("name", AGENTS)
def test_two_learners_match_one_with_the_whole_batch(name, together):
    learner = make_learner(name)
    before = {k: v.numpy().copy() for k, v in learner.networks.state_dict().items()}
    alone = learn(name, learner, 0, 1)
    for rank in range(2):
        assert_close(together[name, rank]["parameters"], alone["parameters"], 1e-5)
        assert_close(together[name, rank]["targets"], alone["targets"], 1e-5)
        assert together[name, rank]["norm"] == pytest.approx(alone["norm"], rel=1e-3)
        assert together[name, rank]["noise"] == alone["noise"]  # As many draws, from the same generator.
    priorities = [*together[name, 0]["priorities"], *together[name, 1]["priorities"]]
    assert priorities == pytest.approx(alone["priorities"], abs=1e-5)
    moved = [np.abs(alone["parameters"][k] - v).max() for k, v in before.items() if v.dtype == np.float32]
    assert max(moved) > 1e-2


@pytest.mark.parametrize("name", AGENTS)
def test_learners_have_the_same_parameters_to_the_last_bit(name, together):
    assert_close(together[name, 0]["parameters"], together[name, 1]["parameters"], 0)


def test_elements_of_several_learners_are_in_the_minibatch_where_one_would_have_them():
    learner = make_learner("ppo")

    def shuffled(data, before):
        learner._generator.manual_seed(3)
        return [part["row"].tolist() for _, part in learner._shuffled(data, 4, 11, before)]

    rows = {"row": torch.arange(11)}
    for sizes in ((6, 5), (10, 1), (0, 11), (4, 0, 7)):
        starts = np.cumsum((0, *sizes[:-1])).tolist()
        parts = zip(rows["row"].split(sizes), starts, strict=True)
        each = [shuffled({"row": part}, start) for part, start in parts]
        for whole, *pieces in zip(shuffled(rows, 0), *each, strict=True):
            for piece, start, size in zip(pieces, starts, sizes, strict=True):
                assert piece == [row for row in whole if start <= row < start + size]


Group = collections.namedtuple("Group", "rank size")


@pytest.mark.parametrize("shape", [(3, 2), (3, 1), (5, 4, 2)])
def test_several_learners_draw_parts_of_what_one_draws(shape):
    def draw(rank, num_learners):
        group = None if num_learners == 1 else Group(rank, num_learners)
        context = LossContext(None, None, None, torch.Generator().manual_seed(1), group=group)
        items = torch.empty(12 // num_learners * shape[0], *shape[1:])
        return torch.stack([context.normal_like(items) for _ in range(2)])

    assert torch.equal(torch.cat([draw(rank, 4) for rank in range(4)], 1), draw(0, 1))


def test_a_learner_notices_that_a_peer_has_gone(together):
    assert ("noticed", 0) in together


@pytest.mark.skipif(not pathlib.Path("/proc/self/net/tcp").exists(), reason="needs /proc")
def test_nothing_listens_beyond_this_machine(together):
    store = distributed.host_store(2)
    with socket.create_connection(("127.0.0.1", store.port), 10):
        assert listening() == {"127.0.0.1"}
    for name in AGENTS:
        for rank in range(2):
            assert together[name, rank]["listening"] <= {"127.0.0.1", "::1"}
    assert together["dqn", 0]["listening"]  # gloo's own


def test_a_batch_that_cannot_be_divided_is_refused():
    for name in ("dqn", "ppo"):
        with pytest.raises(ValueError, match=r"num_learners: got 3, expected a divisor of 16"):
            AGENTS[name][0].for_program(BATCH, 3)


@pytest.mark.parametrize(("device", "expected"), [("cpu", "cpu"), ("cuda", "cuda:1"), ("cuda:5", "cuda:5")])
def test_each_learner_has_a_gpu_of_its_own(device, expected):
    agent = DQN(DQNConfig(batch_size=8, device=device))
    assert agent.for_program(1, 2, rank=1).device == expected
    assert agent.for_program(1).device == device


def test_a_rank_outside_of_the_group_is_refused():
    with pytest.raises(ValueError, match="rank: got 2, expected 0 to 1"):
        LearnerGroup(2, 2, 1)


def in_threads(calls):
    answers = [None] * len(calls)

    def run(index):
        answers[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    return threads, answers


def test_the_turnstile_lets_all_through_or_none():
    barrier = Barrier(3)
    for _ in range(20):
        threads, answers = in_threads([functools.partial(barrier.arrive, rank) for rank in range(3)])
        for thread in threads:
            thread.join(10)
        assert answers == [True] * 3
    waiting, answers = in_threads([functools.partial(barrier.arrive, rank) for rank in range(2)])
    assert barrier.started
    barrier.close()
    for thread in waiting:
        thread.join(10)
    assert answers == [False] * 2
    assert barrier.arrive(0) is False


def test_who_was_let_through_stays_so_when_it_closes_at_once():
    for _ in range(50):
        barrier = Barrier(2)
        threads, answers = in_threads([functools.partial(barrier.arrive, 1)])
        mine = barrier.arrive(0)
        barrier.close()
        threads[0].join(10)
        assert answers == [mine] == [True]


def test_a_learner_that_was_restarted_while_it_waited_counts_once():
    barrier = Barrier(2)
    orphans, answers = in_threads([functools.partial(barrier.arrive, 1)] * 2)
    orphans[0].join(0.2)
    assert not barrier.started
    assert barrier.arrive(0)
    for thread in orphans:
        thread.join(10)
    assert answers == [True, True]
