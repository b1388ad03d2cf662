"""PPO and DQN trained together, each for some agents of one multi-agent environment, as a plan.

Each env of a worker has all agents. The unrolls of PPO's agents return to the plan, and the transitions of
DQN's agents go to replay. Two branches of the plan learn at the same time, as in RLlib Flow (Liang et al.,
2021).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agents.dqn import DQN, DQNConfig
from agents.ppo import PPO, PPOConfig
from framework import config_checks as check
from framework.flow import Flow, Node, Par, concurrent
from framework.multi_agent import AgentGroup
from framework.programs import MultiAgentPlanAgent, MultiAgentWorker, PlanLearner, Preset, concatenate
from framework.replay import ReplaySample
from framework.specs import EnvironmentSpec, agents

# Fields that differ from the defaults of the algorithms.
_PPO = {"unroll_length": 64, "epochs": 8, "minibatch_size": 128, "learning_rate": 1e-3}
_DQN = {"samples_per_insert": 8.0}


@dataclass(frozen=True)
class PPODQNConfig(check.NamedFields):
    """Settings of both algorithms. Those that only one of them has are in `ppo` and `dqn`."""

    ppo_agents: tuple[str, ...] = ("agent_0", "agent_1")  # These learn by PPO, all others by DQN.
    discount: float = 0.99  # Per env step. Higher values look further ahead and learn more slowly.
    learning_rate_decay: int | None = None  # Env steps over which both learning rates fall. None keeps them.
    # What networks take observations for, if not for what they look like: NAME=KIND, as in
    # observation/camera=pixels. Kinds: pixels (a picture, / 255), planes (one as it is), bytes (/ 255),
    # numbers.
    inputs: tuple[str, ...] = ()
    device: str = "cpu"  # Device of the learner.
    # Fields of `PPOConfig`, such as epochs=4. Others: unroll_length 64, epochs 8, minibatch_size 128,
    # learning_rate 1e-3, and PPO's defaults.
    ppo: Mapping[str, Any] = field(default_factory=dict)
    # Fields of `DQNConfig`, such as n_step=3. Others: samples_per_insert 8, and DQN's defaults.
    dqn: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check.types(self)
        self.ppo_config(), self.dqn_config()  # Their own checks.

    def ppo_config(self) -> PPOConfig:
        return PPOConfig(**self._shared("ppo", PPOConfig), **{**_PPO, **self.ppo})

    def dqn_config(self) -> DQNConfig:
        return DQNConfig(**self._shared("dqn", DQNConfig), **{**_DQN, **self.dqn})

    def _shared(self, part: str, config_class: type) -> dict[str, Any]:
        """The fields of both. Raises ValueError for one in `part` that it does not take."""
        names = ("discount", "learning_rate_decay", "inputs", "device")
        shared = {name: getattr(self, name) for name in names}
        known = [each.name for each in dataclasses.fields(config_class) if each.name not in shared]
        check.names(part, getattr(self, part), known)
        return shared


class PPODQN(MultiAgentPlanAgent):
    """Proximal policy optimization for some agents and deep Q-learning for the others, at the same time."""

    def __init__(self, config: PPODQNConfig | None = None):
        self.config: PPODQNConfig = config or PPODQNConfig()  # type: ignore[assignment]
        self.parts = {"ppo": PPO(self.config.ppo_config()), "dqn": DQN(self.config.dqn_config())}

    def groups(self, spec: EnvironmentSpec) -> dict[str, AgentGroup]:
        known = agents(spec)
        if unknown := [name for name in self.config.ppo_agents if name not in known]:
            raise ValueError(
                f"ppo_agents: got {', '.join(unknown)}, expected agents of the environment: "
                f"{', '.join(known)}.{check.nearest(unknown[0], known)}"
            )
        return super().groups(spec)

    def policy_of(self, agent: str) -> str:
        return "ppo" if agent in self.config.ppo_agents else "dqn"

    def plan(self, workers: Sequence[Node], learner: PlanLearner) -> Flow:
        step, replay = self.steps(learner), learner.dataset
        assert replay is not None
        dqn = Flow.of(replay, replay.ready).map(step["dqn"])
        rounds = Par(workers, MultiAgentWorker.sample).sync()
        ppo = rounds.map(_unrolls).map(step["ppo"])
        # On the serial engine, nothing is collected while DQN has a batch: its items would find no room.
        return concurrent(Flow(ppo.__next__, lambda: not dqn.ready()), dqn)


def _unrolls(samples: Sequence[Mapping[str, ReplaySample]]) -> ReplaySample:
    return concatenate([each["ppo"] for each in samples])


PRESETS: Mapping[str, Preset] = {
    "multi_agent:CartPole": Preset(
        agent={"learning_rate_decay": 100_000, "ppo": {"clip_end": 0.1}, "dqn": {"epsilon_decay": 12_000}},
        run={
            "num_actors": 1,
            "envs_per_actor": 8,
            "max_env_steps": 100_000,
            "evaluate_period": 10_000,
            "num_evaluation_episodes": 50,
            "learner_log_period": 200,
        },
    ),
}
