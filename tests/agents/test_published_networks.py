"""Networks of the presets for Atari, against the parameters of those of the papers, counted by hand."""

import dataclasses

import numpy as np
import pytest
from dm_env import specs as dm_specs

from agents.c51 import C51
from agents.dqn import DQN
from agents.impala import IMPALA
from agents.iqn import IQN
from agents.iqn import PRESETS as IQN_PRESETS
from agents.ppo import PPO
from agents.qr_dqn import QRDQN
from agents.r2d2 import R2D2
from agents.rainbow import Rainbow
from framework import environments
from framework.environments.testing import FakeEnvironment, make_spec
from framework.specs import StackedBoundedArray, make_environment_spec

A, K = 6, 51
PIXELS = StackedBoundedArray((4, 84, 84), np.uint8, 0, 255)
ATARI = make_spec(PIXELS, dm_specs.DiscreteArray(A))


def conv(inputs, outputs, size):
    return size * size * inputs * outputs + outputs


def dense(inputs, outputs):
    return inputs * outputs + outputs


def lstm(inputs, size):
    """Four gates, each with weights of inputs and state, and torch's two biases."""
    return 4 * (inputs * size + size * size + 2 * size)


def heads(features):
    return dense(features, A) + dense(features, 1)


def residual(inputs, outputs):
    return conv(inputs, outputs, 3) + 4 * conv(outputs, outputs, 3)


NATURE = conv(4, 32, 8) + conv(32, 64, 4) + conv(64, 64, 3)  # then 7 * 7 * 64 = 3,136 features
SHALLOW = conv(4, 16, 8) + conv(16, 32, 4) + dense(9 * 9 * 32, 256)
DEEP = residual(4, 16) + residual(16, 32) + residual(32, 32) + dense(11 * 11 * 32, 256)
MONOBEAST = NATURE + dense(3136, 512)  # then the last action, one-hot, and the last reward
SEEN = 512 + A + 1
CASES = {
    "DQN, Mnih et al. (2015)": (DQN, {}, NATURE + dense(3136, 512) + dense(512, A)),
    "dueling, Wang et al. (2016)": (DQN, {"dueling": True}, NATURE + 2 * dense(3136, 512) + heads(512)),
    "C51, Bellemare et al. (2017)": (C51, {}, NATURE + dense(3136, 512) + dense(512, A * K)),
    "QR-DQN, Dabney et al. (2018)": (QRDQN, {}, NATURE + dense(3136, 512) + dense(512, A * 200)),
    "IQN, Dabney et al. (2018b)": (IQN, {}, NATURE + dense(64, 3136) + dense(3136, 512) + dense(512, A)),
    "Beyond the Rainbow, Clark et al. (2024)": (
        IQN,
        IQN_PRESETS["beyond_the_rainbow"].agent,
        residual(4, 32)
        + residual(32, 64)
        + residual(64, 64)
        + dense(64, 6 * 6 * 64)
        + 2 * (2 * dense(6 * 6 * 64, 512) + heads(512)),
    ),
    # A noisy layer has a mean and a standard deviation for each parameter.
    "Rainbow, Hessel et al. (2018)": (
        Rainbow,
        {},
        NATURE + 2 * (2 * dense(3136, 512) + dense(512, A * K) + dense(512, K)),
    ),
    "R2D2, Kapturowski et al. (2019)": (
        R2D2,
        {},
        NATURE + dense(3136, 512) + lstm(512 + A + 1, 512) + 2 * dense(512, 512) + heads(512),
    ),
    "PPO, Schulman et al. (2017)": (PPO, {}, NATURE + dense(3136, 512) + heads(512)),
    "IMPALA, shallow, Espeholt et al. (2018)": (IMPALA, {"torso": "shallow"}, SHALLOW + heads(257)),
    "PolyBeast": (IMPALA, {}, DEEP + heads(257)),
    "PolyBeast, LSTM": (IMPALA, {"lstm_size": 256}, DEEP + lstm(257, 256) + heads(256)),
    "MonoBeast": (
        IMPALA,
        {"torso": "nature", "previous_action_and_reward": True},
        MONOBEAST + heads(SEEN),
    ),
    "MonoBeast, LSTM": (
        IMPALA,
        {"torso": "nature", "previous_action_and_reward": True, "lstm_size": SEEN, "lstm_layers": 2},
        MONOBEAST + 2 * lstm(SEEN, SEEN) + heads(SEEN),
    ),
}
# The first three as numbers, so that the helpers above are held against something.
KNOWN = {"DQN, Mnih et al. (2015)": 1_687_206, "dueling, Wang et al. (2016)": 3_293_863}
KNOWN["Beyond the Rainbow, Clark et al. (2024)"] = 5_266_606
KNOWN["Rainbow, Hessel et al. (2018)"] = 6_868_842


def made(kind, changes):
    agent = kind(dataclasses.replace(kind.preset("atari:Breakout"), **changes))
    environment = environments.make(lambda: FakeEnvironment(ATARI), wrappers=agent.environment_wrappers())
    return agent.make_networks(make_environment_spec(environment))


@pytest.mark.parametrize("name", CASES)
def test_the_networks_of_the_presets_have_as_many_parameters_as_those_of_the_papers(name):
    kind, changes, expected = CASES[name]
    networks = made(kind, changes)
    assert sum(parameter.numel() for parameter in networks.parameters()) == expected
    assert KNOWN.get(name, expected) == expected


def test_rainbows_noise_begins_at_the_convolutions():
    parameters = made(Rainbow, {}).named_parameters()
    shapes = [tuple(parameter.shape) for name, parameter in parameters if "weight_noise" in name]
    assert sorted(shapes) == [(51, 512), (306, 512), (512, 3136), (512, 3136)]


def test_iqn_multiplies_the_features_of_the_convolutions():
    assert made(IQN, {}).q_network.embedding.weight.shape == (3136, 64)
