"""Small agents of every kind that learns by gradient descent, with the specs that they learn from."""

import numpy as np
from agent_batches import CONTINUOUS, COSTS, DISCRETE

from agents.a2c import A2C, A2CConfig
from agents.appo import APPO, APPOConfig
from agents.bc import BC, BCConfig
from agents.c51 import C51, C51Config
from agents.cql import CQL, CQLConfig
from agents.crossq import CrossQ, CrossQConfig
from agents.d4pg import D4PG, D4PGConfig
from agents.dqn import DQN, DQNConfig
from agents.dreamer import Dreamer, DreamerConfig
from agents.droq import DroQ, DroQConfig
from agents.edac import EDAC, EDACConfig
from agents.impala import IMPALA, IMPALAConfig
from agents.iql import IQL, IQLConfig
from agents.iqn import IQN, IQNConfig
from agents.mpo import MPO, MPOConfig
from agents.ppo import PPO, PPOConfig
from agents.ppo_lagrangian import PPOLagrangian, PPOLagrangianConfig
from agents.pqn import PQN, PQNConfig
from agents.qr_dqn import QRDQN, QRDQNConfig
from agents.r2d2 import R2D2, R2D2Config
from agents.rainbow import Rainbow, RainbowConfig
from agents.rebrac import ReBRAC, ReBRACConfig
from agents.recurrent_td3 import RecurrentTD3, RecurrentTD3Config
from agents.rlpd import RLPD, RLPDConfig
from agents.sac import SAC, SACConfig
from agents.simba_v2 import SimBaV2, SimBaV2Config
from agents.td3 import DDPG, TD3, DDPGConfig, TD3Config
from agents.td3_bc import TD3BC, TD3BCConfig
from agents.td7 import TD7, TD7Config
from agents.tqc import TQC, TQCConfig
from framework import datasets, environments
from framework.environments.testing import FakeEnvironment

ITEMS = {"hidden_sizes": (8, 8), "batch_size": 16}
SEQUENCES = {"unroll_length": 6, "burn_in": 3, "period": 3, "batch_size": 4, "lstm_size": 6}
UNROLLS = {"hidden_sizes": (8,), "batch_size": 4, "unroll_length": 6}
MINIBATCHES = {"hidden_sizes": (8, 8), "unroll_length": 6, "epochs": 2, "minibatch_size": 8}
RATES = {"learning_rate": 1e-2, "critic_learning_rate": 1e-2, "embedding_learning_rate": 1e-2}
# Targets that move at each step show in three steps what they change.
OFTEN = {"target_update_period": 1, "target_update_rate": 0.1}
EMBEDDINGS = {"embedding_size": 6, "embedding_hidden_sizes": (8,), "min_replay_size": 50}
MEMORY = {"recurrent": "gru", "recurrent_size": 6}
SHOWN = f"{__name__}:shown"
LATENTS = {"deter_size": 8, "blocks": 2, "hidden_size": 4, "stoch_size": 3, "classes": 3}
IMAGINED = {"imagination_length": 4, "imagination_rows": 3, "learning_rate": 1e-2, "learning_rate_warmup": 0}
WORLD = {**LATENTS, **IMAGINED, "units": 8, "num_layers": 1, "depth": 1, "num_bins": 11, "batch_size": 4}
SMALL = {
    "a2c": A2C(A2CConfig(hidden_sizes=(8, 8), unroll_length=6)),
    "appo": APPO(APPOConfig(**UNROLLS)),
    "bc": BC(BCConfig(**UNROLLS, **MEMORY)),
    "c51": C51(C51Config(**ITEMS)),
    "cql": CQL(CQLConfig(**ITEMS, num_samples=2, calibrated=True)),
    "crossq": CrossQ(CrossQConfig(**ITEMS, critic_hidden_sizes=(8,))),
    "d4pg": D4PG(D4PGConfig(**ITEMS, **OFTEN, n_step=1, v_min=-9.0, v_max=9.0)),
    "ddpg": DDPG(DDPGConfig(**ITEMS)),
    "dqn": DQN(DQNConfig(**ITEMS)),
    "dreamer": Dreamer(DreamerConfig(**WORLD, unroll_length=6, burn_in=1, period=3, free_nats=0.0)),
    "droq": DroQ(DroQConfig(**ITEMS, actor_delay=2, dropout=0.2)),
    "edac": EDAC(EDACConfig(**ITEMS, num_critics=3)),
    "impala": IMPALA(IMPALAConfig(**UNROLLS)),
    "iql": IQL(IQLConfig(**ITEMS)),
    "iqn": IQN(IQNConfig(**ITEMS, num_policy_quantiles=4)),
    "mpo": MPO(MPOConfig(**ITEMS, n_step=1)),
    "ppo": PPO(PPOConfig(**MINIBATCHES)),
    "ppo_lagrangian": PPOLagrangian(PPOLagrangianConfig(**MINIBATCHES)),
    "pqn": PQN(PQNConfig(hidden_sizes=(8, 8), unroll_length=6, minibatch_size=8)),
    "qr_dqn": QRDQN(QRDQNConfig(**ITEMS)),
    "r2d2": R2D2(R2D2Config(**SEQUENCES, n_step=3, hidden_sizes=(8,), head_sizes=(8,))),
    "rainbow": Rainbow(RainbowConfig(**ITEMS)),
    "rebrac": ReBRAC(ReBRACConfig(**ITEMS)),
    "recurrent_td3": RecurrentTD3(RecurrentTD3Config(**SEQUENCES, encoder_sizes=(8,), hidden_sizes=(8, 8))),
    "rlpd": RLPD(RLPDConfig(**ITEMS, demonstrations=SHOWN, num_critics=4, actor_delay=2)),
    "sac": SAC(SACConfig(**ITEMS)),
    "simba_v2": SimBaV2(SimBaV2Config(**ITEMS, critic_hidden_sizes=(8,))),
    "td3": TD3(TD3Config(**ITEMS)),
    "td3_bc": TD3BC(TD3BCConfig(**ITEMS)),
    "td7": TD7(TD7Config(**ITEMS, **EMBEDDINGS, **RATES, target_update_period=1)),
    "tqc": TQC(TQCConfig(**ITEMS, num_critics=3, critic_hidden_sizes=(8,))),
}
NUMBERS_ONLY = ("crossq", "d4pg", "ddpg", "edac", "mpo", "rebrac", "recurrent_td3", "td3", "td3_bc", "td7")
NUMBERS_ONLY += ("simba_v2", "tqc")


def spec_of(name):
    """The spec of a small agent."""
    if name == "ppo_lagrangian":
        return COSTS
    return CONTINUOUS if name in (*NUMBERS_ONLY, "cql", "droq", "iql", "rlpd", "sac") else DISCRETE


def shown():
    """An episode for RLPD."""
    made = environments.make(FakeEnvironment, num_envs=1, options={"spec": CONTINUOUS})
    return datasets.record(made, lambda observation: np.zeros((1, 2), np.float32), 1)
