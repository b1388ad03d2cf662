"""Rainbow: settings of C51, with all of DQN's extensions at once (Hessel et al., 2018).

Each of the six parts is a field: `double`, `prioritized`, `dueling`, `n_step` above 1, `num_atoms` above 1
and `noisy`. This file has the paper's choices as defaults; networks and loss are C51's. With `torso_size=0`
and `hidden_sizes=(512,)`, as in the preset of all Atari games, both streams begin at the convolutions, each
with a noisy layer of 512, as in the paper: 6.87 million parameters. With `torso_size=None` a layer of 512
comes first, without noise, which both streams share: 3.1 million.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agents.c51 import C51, C51Config
from agents.dqn import ATARI, CARTPOLE, CARTPOLE_RUN, DQN_RUN, MINATAR, MINATAR_RUN, OURS, YOUNG
from agents.dqn import PRESETS as DQN_PRESETS
from framework.runs.presets import ATARI_2015_RUN, Preset


@dataclass(frozen=True)
class RainbowConfig(C51Config):
    """Settings of Rainbow. Those that differ from `C51Config` are the paper's."""

    n_step: int = 3  # Rewards summed before bootstrapping. More: faster propagation, but more off-policy.
    prioritized: bool = True  # Draws items with large errors more often.
    priority_exponent: float = 0.5  # 0 draws uniformly, 1 proportionally to the error.
    dueling: bool = True  # A stream for the state's value, another for the actions' advantages.
    noisy: bool = True  # Explores by learned noise on the weights after the encoder.


class Rainbow(C51):
    """Settings of C51: double, dueling, n-step targets, prioritized replay, and noisy networks at once."""

    config: RainbowConfig = RainbowConfig()


# The noise alone explores too little in short runs: see docs/measurements.md.
_EXPLORATION = {"initial_noise": 0.02, "epsilon_start": 1.0, "epsilon_end": 0.05}
# Both streams of the network have a hidden layer, so that not only the last layer is noisy.
_MINATAR = {
    **MINATAR,
    **_EXPLORATION,
    "hidden_sizes": (128,),
    "importance_sampling_annealing": 1_000_000,
    "v_min": 0.0,
    "v_max": 20.0,
}
PRESETS: Mapping[str, Preset] = {
    "gymnasium:CartPole-v1": Preset(
        agent={
            **CARTPOLE,
            **_EXPLORATION,
            "n_step": 5,
            "v_min": 0.0,
            "v_max": 100.0,
            "learning_rate": 5e-4,
            "importance_sampling_annealing": 50_000,
        },
        run=CARTPOLE_RUN,
    ),
    # Landing well is worth about 250, and flying away costs more than 300.
    "gymnasium:LunarLander-v3": Preset(
        agent={
            **DQN_PRESETS["gymnasium:LunarLander-v3"].agent,
            **_EXPLORATION,
            "v_min": -300.0,
            "v_max": 300.0,
            "importance_sampling_annealing": 200_000,
        },
        run=DQN_PRESETS["gymnasium:LunarLander-v3"].run,
    ),
    "minatar:Breakout": Preset(_MINATAR, MINATAR_RUN),
    "minatar:Seaquest": Preset(_MINATAR, MINATAR_RUN),
    "minatar:Freeway": Preset(_MINATAR, DQN_PRESETS["minatar:Freeway"].run),
    # A good player of Space Invaders hits an alien every four steps: a discounted return of 25.
    "minatar:*": Preset({**_MINATAR, "v_max": 50.0}, MINATAR_RUN, sources=YOUNG),
    # A learner step of 32 items for every 4 env steps, and no sticky actions, as in the paper.
    "atari:Pong": Preset(
        agent={
            **DQN_PRESETS["atari:Pong"].agent,
            "n_step": 5,
            "min_replay_size": 5_000,
            "learning_rate": 2e-4,
            "learning_rate_decay": 500_000,
            "adam_epsilon": 1.5e-4,
            "target_update_period": 500,
            "importance_sampling_annealing": 500_000,
            "initial_noise": 0.1,
            "epsilon_start": 1.0,
            "epsilon_decay": 50_000,
            # A point is worth 1, and the next one is a rally away.
            "v_min": -3.0,
            "v_max": 3.0,
        },
        run={
            **DQN_PRESETS["atari:Pong"].run,
            "environment_options": {"sticky_actions": 0.0},
            "max_env_steps": 500_000,
        },
    ),
    "atari:*": Preset(
        {
            **ATARI,
            "n_step": 3,
            "double": True,
            "importance_sampling_annealing": 50_000_000,
            "epsilon_end": 0.0,
            "evaluation_epsilon": 0.0,
        },
        {**ATARI_2015_RUN, **DQN_RUN},
        "Hessel et al. (2018), table 1",
        OURS,
    ),
}
