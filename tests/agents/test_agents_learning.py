"""Every agent learns in whole programs, and the same wherever its actions come from."""

import dataclasses
import functools
from typing import get_args

import dm_env
import numpy as np
import pytest
from dm_env import specs as dm_specs

from agents.appo import APPO, APPOConfig
from agents.c51 import C51, C51Config
from agents.d4pg import D4PG, D4PGConfig
from agents.dqfd import DQfD, DQfDConfig
from agents.dqn import DQN, DQNConfig
from agents.impact import IMPACT, IMPACTConfig
from agents.impala import IMPALA, IMPALAConfig
from agents.iqn import IQN, IQNConfig
from agents.mpo import MPO, MPOConfig
from agents.ppo import PPO, PPOConfig
from agents.qr_dqn import QRDQN, QRDQNConfig
from agents.r2d2 import R2D2, R2D2Config
from agents.rainbow import Rainbow, RainbowConfig
from agents.recurrent_td3 import RecurrentTD3, RecurrentTD3Config
from agents.sac import SAC, SACConfig
from agents.td3 import DDPG, TD3, DDPGConfig, TD3Config
from agents.td7 import TD7, TD7Config
from framework import demonstrations, environments
from framework.environments.testing import MemoryEnvironment
from framework.programs.run_config import Inference

pytestmark = pytest.mark.timeout(600)  # seconds of CPU each, on whatever the machine has to spare


class Aim(dm_env.Environment):
    """Shows a target in [-1, 1]; an action earns 1 minus its distance from it. Episodes of one step."""

    def __init__(self, seed=None):
        self._random = np.random.default_rng(seed)
        self._over = True

    def observation_spec(self):
        return dm_specs.BoundedArray((1,), np.float32, -1, 1)

    def action_spec(self):
        return dm_specs.BoundedArray((1,), np.float32, -1, 1)

    def reset(self):
        self._over = False
        self._target = self._random.uniform(-1, 1, 1).astype(np.float32)
        return dm_env.restart(self._target)

    def step(self, action):
        if self._over:
            return self.reset()
        self._over = True
        return dm_env.termination(1.0 - float(abs(action - self._target).item()), self._target)


class AimLater(Aim):
    """The target is shown at the first of three steps, and only the last action counts."""

    def reset(self):
        self._time = 0
        return super().reset()

    def step(self, action):
        if self._over:
            return self.reset()
        self._time += 1
        if self._time == 3:
            return super().step(action)
        return dm_env.transition(0.0, np.zeros(1, np.float32), 1.0)


# Which of three cues is shown: a policy that does not look gets 1/3.
cue = functools.partial(MemoryEnvironment, length=1, num_cues=3)
recall = functools.partial(MemoryEnvironment, length=4)


def cues_named():
    environment = environments.make(cue, num_envs=1, seed=0)
    return demonstrations.record(environment, lambda observation: observation[:, :3].argmax(-1), 6)


REPLAY = {"hidden_sizes": (32,), "batch_size": 32, "min_replay_size": 64, "insert_burst": 32, "n_step": 1}
dqn = DQN(DQNConfig(**REPLAY, learning_rate=5e-3, discount=0.5, epsilon_decay=500, samples_per_insert=8.0))
FAMILY = {**vars(dqn.config), "n_step": 1, "v_min": 0.0, "v_max": 2.0}
c51 = C51(C51Config(**FAMILY))
rainbow = Rainbow(RainbowConfig(**{**FAMILY, "prioritized": True, "dueling": True, "noisy": True}))
qr_dqn = QRDQN(QRDQNConfig(**vars(dqn.config), num_quantiles=11))
iqn = IQN(IQNConfig(**vars(dqn.config), num_quantiles=4, num_policy_quantiles=4))
shown = {"demonstrations": f"{__name__}:cues_named", "pretraining_steps": 20}
dqfd = DQfD(DQfDConfig(**vars(dqn.config), **shown))
RATES = {"learning_rate": 5e-3, "critic_learning_rate": 5e-3, "temperature_learning_rate": 1e-2}
MPO_RATES = {"learning_rate": 5e-3, "critic_learning_rate": 5e-3, "target_update_period": 10}
BOUNDS = {"epsilon_mean": 0.05, "epsilon_std": 1e-3, "initial_std_multiplier": 10.0}
mpo = MPOConfig(**REPLAY, **MPO_RATES, **BOUNDS, samples_per_insert=8.0, initial_temperature=0.5)
dmpo = dataclasses.replace(mpo, num_atoms=21, v_min=-1.0, v_max=1.0)
sac = SAC(SACConfig(**REPLAY, **RATES, samples_per_insert=8.0, initial_temperature=0.1))
DETERMINISTIC = {**REPLAY, "learning_rate": 5e-3, "critic_learning_rate": 5e-3, "samples_per_insert": 8.0}
td3, ddpg = TD3(TD3Config(**DETERMINISTIC)), DDPG(DDPGConfig(**DETERMINISTIC))
td7 = TD7(TD7Config(**DETERMINISTIC, target_update_period=25, embedding_size=16))
d4pg = D4PG(
    D4PGConfig(**DETERMINISTIC, target_update_period=1, target_update_rate=0.05, v_min=-1.0, v_max=1.0)
)
UNROLLS = {"hidden_sizes": (16,), "unroll_length": 8, "learning_rate": 1e-2, "discount": 0.95}
ppo = PPO(PPOConfig(**UNROLLS, epochs=4, minibatch_size=32))
ppo_with_penalty = PPO(PPOConfig(**UNROLLS, epochs=4, minibatch_size=32, target_kl=0.03))
ppo_with_memory = PPO(PPOConfig(**UNROLLS, epochs=4, minibatch_size=32, recurrent="gru", recurrent_size=16))
impala = IMPALA(IMPALAConfig(**{**UNROLLS, "learning_rate": 5e-3}, batch_size=8))
appo = APPO(APPOConfig(**{**UNROLLS, "learning_rate": 5e-3}, batch_size=8, target_update_period=4))
impact = IMPACT(IMPACTConfig(**vars(appo.config) | {"samples_per_insert": 2, "queue_batches": 3}))
impala_with_memory = IMPALA(IMPALAConfig(**UNROLLS, batch_size=8, optimizer="adam", lstm_size=16))
impala_without_memory = IMPALA(IMPALAConfig(**UNROLLS, batch_size=8, optimizer="adam"))
SEQUENCES = {"unroll_length": 10, "burn_in": 4, "period": 10, "lstm_size": 16, "head_sizes": (16,)}
r2d2 = R2D2Config(
    **{**REPLAY, **SEQUENCES, "hidden_sizes": (16,), "batch_size": 16, "min_replay_size": 32, "n_step": 2},
    learning_rate=5e-3,
    discount=0.95,
    epsilon_decay=2_000,
)

recurrent_td3 = RecurrentTD3Config(
    **{**DETERMINISTIC, "batch_size": 16, "min_replay_size": 32},
    unroll_length=8,
    burn_in=4,
    period=4,
    encoder_sizes=(16,),
    lstm_size=16,
    discount=0.9,
)

# Agent, environment, steps, and the greedy mean return: least and most.
CASES = {
    "dqn": (dqn, cue, 2_400, 1.0, 1.0),
    "c51": (c51, cue, 2_400, 1.0, 1.0),
    "dqfd": (dqfd, cue, 1_200, 1.0, 1.0),
    "iqn": (iqn, cue, 2_400, 1.0, 1.0),
    "qr_dqn": (qr_dqn, cue, 2_400, 1.0, 1.0),
    "rainbow": (rainbow, cue, 2_400, 1.0, 1.0),
    "mpo": (MPO(mpo), Aim, 2_000, 0.8, 1.0),
    "mpo, distributional": (MPO(dmpo), Aim, 2_000, 0.8, 1.0),
    "sac, discrete": (sac, cue, 2_400, 1.0, 1.0),
    "sac": (sac, Aim, 2_000, 0.9, 1.0),
    "td3": (td3, Aim, 2_000, 0.9, 1.0),
    "td7": (td7, Aim, 2_000, 0.9, 1.0),
    "ddpg": (ddpg, Aim, 2_000, 0.9, 1.0),
    "d4pg": (d4pg, Aim, 2_000, 0.85, 1.0),
    "ppo": (ppo, cue, 2_400, 1.0, 1.0),
    "ppo, numbers": (ppo_with_penalty, Aim, 4_000, 0.9, 1.0),
    "impala": (impala, cue, 3_000, 0.95, 1.0),
    "appo": (appo, cue, 3_000, 0.95, 1.0),
    "impact": (impact, cue, 2_400, 0.95, 1.0),
    "ppo with a memory": (ppo_with_memory, recall, 6_000, 0.95, 1.0),
    "impala with a memory": (impala_with_memory, recall, 12_000, 0.95, 1.0),
    "r2d2 with a memory": (R2D2(r2d2), recall, 6_000, 0.95, 1.0),
    "recurrent td3": (RecurrentTD3(recurrent_td3), AimLater, 3_000, 0.8, 1.0),
    # The best action without a memory is 0, which earns 0.5 on average.
    "recurrent td3 without a memory": (
        RecurrentTD3(dataclasses.replace(recurrent_td3, lstm_size=None)),
        AimLater,
        2_000,
        0.1,
        0.7,
    ),
    # Of two cues and no memory, a policy that always names the same is right every second time.
    "impala without a memory": (impala_without_memory, recall, 4_000, 0.2, 0.8),
    "r2d2 without a memory": (R2D2(dataclasses.replace(r2d2, lstm_size=None)), recall, 3_000, 0.2, 0.8),
}
# Nightly runs all of them in all modes (benchmarks/nightly.py).
ELSEWHERE = ("dqn", "sac", "ppo", "impala")
KINDS = [(name, "local") for name in CASES]
KINDS += [(name, mode) for name in ELSEWHERE for mode in get_args(Inference) if mode != "local"]


@pytest.mark.parametrize(("name", "mode"), KINDS, ids=["-".join(kind) for kind in KINDS])
def test_learns(name, mode, train):
    agent, environment, steps, least, most = CASES[name]
    result, _ = train(agent, environment, steps, inference=mode)
    assert result["env_steps"] == steps
    assert least <= result["episode_return"] <= most


def test_impala_learns_from_each_row_once(train):
    agent, environment, steps, _, _ = CASES["impala"]
    result, rows = train(agent, environment, steps)
    length = environment.keywords["length"]
    learned = result["learner_steps"] * agent.config.batch_size * agent.config.unroll_length
    # But for what was under way at the end; closing rows of episodes are among the learned.
    assert 0.85 * steps < learned < 1.2 * steps * (length + 1) / length
    last = rows[-1]
    assert last["times_sampled"] == 1
    assert 0 <= last["staleness"] <= last["staleness_max"] < 10
    assert 0 <= last["rho_clipped"] <= 1 and np.isfinite(last["loss"])


def test_ppo_learns_cartpole(train):
    agent = PPO(PPOConfig(unroll_length=64, epochs=8, minibatch_size=128, learning_rate=1e-3))
    result, _ = train(
        agent,
        "gymnasium:CartPole-v1",
        16_000,
        num_actors=1,
        envs_per_actor=8,
        num_evaluation_episodes=20,
        seed=1,
    )
    # Random actions get about 22; seeds 1 to 3 got more than 180 at 20,000 steps.
    assert result["episode_return"] > 80
