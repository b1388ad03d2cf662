"""PPO and DQN trained together, each for some agents of one multi-agent environment, as a plan.

Each env of a worker has all agents. The unrolls of PPO's agents return to the plan, and the transitions of
DQN's agents go to replay. Two branches of the plan learn at the same time, as in RLlib Flow (Liang et al.,
2021).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agents.dqn import DQN, DQNConfig
from agents.ppo import PPO, PPOConfig
from framework import config_checks as check
from framework.flow import Flow, Node, Par, concurrent
from framework.multi_agent import AgentGroup
from framework.programs import MultiAgentPlanAgent, MultiAgentWorker, PlanLearner, Preset, concatenate
from framework.replay import ReplaySample
from framework.specs import EnvironmentSpec, agents


@dataclass(frozen=True)
class PPODQNConfig(check.NamedFields):
    """Settings of both algorithms: `ppo_NAME` and `dqn_NAME` are fields of `PPOConfig` and `DQNConfig`."""

    ppo_agents: tuple[str, ...] = ("agent_0", "agent_1")  # These learn by PPO, all others by DQN.
    discount: float = 0.99  # Per env step. Higher values look further ahead and learn more slowly.
    learning_rate_decay: int | None = None  # Env steps over which both learning rates fall. None keeps them.
    # What networks take observations for, if not for what they look like: NAME=KIND, as in
    # observation/camera=pixels. Kinds: pixels (a picture, / 255), planes (one as it is), bytes (/ 255),
    # numbers.
    inputs: tuple[str, ...] = ()
    device: str = "cpu"  # Device of the learner.

    ppo_unroll_length: int = 64  # Steps of an env in an unroll. More: less bias, and older data.
    ppo_epochs: int = 8  # Passes over a batch. More learn more from it, until the policy moves too far.
    ppo_minibatch_size: int = 128  # Approximate number of real steps in a minibatch.
    ppo_learning_rate: float = 1e-3  # Initial learning rate of PPO.
    ppo_gae_lambda: float = 0.95  # 0 trusts the values, 1 the returns: less bias, more variance.
    # Weight of the policy's entropy in nats. Higher values explore longer.
    ppo_entropy_coefficient: float = 0.0
    ppo_clip_end: float = 1.0  # Clip after `learning_rate_decay`, as a fraction of the initial one.
    ppo_hidden_sizes: tuple[int, ...] = (64, 64)  # Hidden layers of PPO's policy and of its value.

    dqn_n_step: int = 5  # Rewards summed before bootstrapping. More: faster propagation, but more off-policy.
    dqn_max_replay_size: int = 100_000  # Maximum number of transitions of DQN's agents in replay.
    dqn_min_replay_size: int = 1_000  # Transitions in replay before DQN learns.
    dqn_batch_size: int = 128  # Transitions per learner step of DQN.
    dqn_samples_per_insert: float = 8.0  # Times a transition is drawn on average.
    dqn_learning_rate: float = 1e-3  # Initial learning rate of DQN.
    dqn_target_update_rate: float = 0.02  # Weight of the online network in each target update; 1 copies it.
    dqn_epsilon_end: float = 0.05  # Chance of a random action after the decay.
    dqn_epsilon_decay: int = 17_000  # Env steps over which that chance falls from 1.
    dqn_hidden_sizes: tuple[int, ...] = (128, 128)  # Hidden layers of DQN's network.

    def __post_init__(self) -> None:
        check.types(self)
        self.ppo(), self.dqn()  # Their own checks.

    def ppo(self) -> PPOConfig:
        """The config of PPO."""
        return PPOConfig(**self._of("ppo"))

    def dqn(self) -> DQNConfig:
        """The config of DQN."""
        return DQNConfig(**self._of("dqn"))

    def _of(self, part: str) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(self) if field.name != "ppo_agents"]
        own = {name[4:]: getattr(self, name) for name in names if name.startswith(f"{part}_")}
        shared = ("discount", "learning_rate_decay", "inputs", "device")
        return {name: getattr(self, name) for name in shared} | own


class PPODQN(MultiAgentPlanAgent):
    """Proximal policy optimization for some agents and deep Q-learning for the others, at the same time."""

    def __init__(self, config: PPODQNConfig | None = None):
        self.config: PPODQNConfig = config or PPODQNConfig()  # type: ignore[assignment]
        self.parts = {"ppo": PPO(self.config.ppo()), "dqn": DQN(self.config.dqn())}

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
        agent={"learning_rate_decay": 100_000, "ppo_clip_end": 0.1, "dqn_epsilon_decay": 12_000},
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
