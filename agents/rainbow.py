"""Rainbow: C51 with all of DQN's extensions at once (Hessel et al., 2018).

Each of the six parts is a field: `double`, `prioritized`, `dueling`, `n_step` above 1, `num_atoms` above 1
and `noisy`. This file has the paper's choices as defaults; networks and loss are those of C51.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agents.c51 import C51, C51Config
from agents.dqn import MINATAR, MINATAR_RUN
from agents.dqn import PRESETS as DQN_PRESETS
from framework.core import NetworksFn
from framework.programs.presets import Preset


@dataclass(frozen=True)
class RainbowConfig(C51Config):
    """Settings of Rainbow. Those that differ from `C51Config` are the paper's, except where noted."""

    n_step: int = 3  # Rewards summed before bootstrapping. More passes rewards on faster, off-policy.
    prioritized: bool = True  # Draws items with large errors more often.
    priority_exponent: float = 0.5  # 0 draws uniformly, 1 proportionally to the error.
    dueling: bool = True  # A stream for the state's value, another for the actions' advantages.
    noisy: bool = True  # Explores by learned noise on the weights after the encoder.


class Rainbow(C51):
    """Double, dueling, distributional, n-step Q-learning with prioritized replay and noisy networks."""

    config: RainbowConfig

    def __init__(self, config: RainbowConfig | None = None, networks_fn: NetworksFn | None = None):
        super().__init__(config or RainbowConfig(), networks_fn)


# The noise alone explores too little in short runs: see docs/agents/rainbow.md.
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
            **_EXPLORATION,
            "n_step": 5,
            "epsilon_decay": 12_000,
            "v_min": 0.0,
            "v_max": 100.0,
            "samples_per_insert": 24.0,
            "learning_rate_decay": 50_000,
        },
        run={"envs_per_actor": 4, "max_env_steps": 50_000, "evaluate_period": 2_000},
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
}
