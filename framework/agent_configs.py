"""Settings that agents in PyTorch share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from framework import config_checks as check
from framework.adders.hindsight import STRATEGIES
from framework.learners.gradient import STEP_MODES
from framework.networks import ACTIVATIONS, BODIES


@dataclass(frozen=True)
class AgentConfig(check.NamedFields):
    """Settings of every agent that learns by gradient descent. A *learner step* is one batch."""

    may_be_infinite: ClassVar[tuple[str, ...]] = ("max_gradient_norm",)  # for the check of types

    discount: float = 0.99  # Per env step. Higher values look further ahead and learn more slowly.
    learning_rate: float = 1e-3  # Initial learning rate of Adam.
    learning_rate_decay: int | None = None  # Env steps over which the learning rate falls. None keeps it.
    learning_rate_end: float = 0.0  # Final learning rate, as a fraction of the initial one.
    adam_epsilon: float = 1e-8  # Epsilon of Adam. Larger values damp steps where gradients are small.
    max_gradient_norm: float | None = None  # Larger gradients are scaled down to this.
    # What networks take observations for, if not for what they look like: NAME=KIND, as in
    # observation/camera=pixels. Kinds: pixels (a picture, / 255), planes (one as it is), bytes (/ 255),
    # numbers.
    inputs: tuple[str, ...] = ()
    device: str = "cpu"  # Device of the learner.
    # Parts of the learner's networks on other devices: beginnings of the names of parts, with a device each.
    devices: Mapping[str, Any] = field(default_factory=dict, hash=False)
    # How losses and their gradients are computed: eager (as written), compile (a minute to begin with, then
    # faster), cuda_graph (for GPUs), or auto: compile, if the run is long enough for it to pay.
    step_mode: str = "eager"
    autocast: bool = False  # bfloat16 mixed precision in the learner.

    def __post_init__(self) -> None:
        check.types(self, may_be_infinite=self.may_be_infinite)
        check.fraction(self, "discount", "learning_rate_end")
        check.at_least(self, 0, "learning_rate", "adam_epsilon")
        check.at_least(self, 1, "learning_rate_decay")
        check.above(self, 0, "max_gradient_norm")
        check.device(self, "device", "devices")
        check.one_of(self, ("auto", *STEP_MODES), "step_mode")


@dataclass(frozen=True)
class OffPolicyConfig(AgentConfig):
    """Settings of agents that learn from replay. An *item* is one n-step transition.

    An episode of T steps has T + n_step - 1 items: one per env step with `n_step` 1, and more with shorter
    episodes. With `hindsight_goals`, it has `hindsight_goals` * T more.
    """

    n_step: int = 1  # Rewards summed before bootstrapping. More: faster propagation, but more off-policy.
    reward_clip: float | None = None  # Each reward is clipped to +- this before n are summed; None keeps it.
    normalize_observations: bool = False  # Scales observations to mean 0, variance 1 by running statistics.
    max_replay_size: int = 100_000  # Maximum number of items; the oldest are removed first.
    min_replay_size: int = 1_000  # Items in replay before learning begins.
    batch_size: int = 128  # Items per learner step.
    # Times an item is drawn on average. Divided by `batch_size`: learner steps per item.
    samples_per_insert: float = 16.0
    # A folder of episodes, or module:function that returns them, for a share of each batch; see
    # framework.datasets.files. An item of the actors then has 1 / (1 - share) times the learner steps.
    demonstrations: str | None = None
    demonstration_fraction: float = 0.5  # That share. Larger shares keep to the data longer.
    insert_burst: int = 256  # Items by which inserts may lead or trail the ratio; also the limit in flight.
    # Goals with which each step is written again when its episode ends: hindsight experience replay, for
    # environments with goals. 0: none.
    hindsight_goals: int = 0
    # Which achieved goals: of later steps ("future"), of any steps ("episode"), or the last one ("final").
    hindsight_strategy: str = "future"
    target_update_period: int = 1  # Learner steps between updates of the target networks.
    target_update_rate: float = 0.02  # Weight of the online networks in each target update; 1 copies them.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "n_step", "max_replay_size", "min_replay_size", "batch_size", "insert_burst")
        check.at_least(self, 1, "target_update_period")
        check.at_least(self, 0, "hindsight_goals")
        check.one_of(self, STRATEGIES, "hindsight_strategy")
        check.ordered(self, "min_replay_size", "max_replay_size")
        check.ordered(self, "batch_size", "max_replay_size")
        check.above(self, 0, "samples_per_insert", "target_update_rate", "reward_clip")
        check.between(self, 0, 1, "demonstration_fraction")
        check.fraction(self, "target_update_rate")


@dataclass(frozen=True)
class ControlConfig(OffPolicyConfig):
    """Settings of agents with a policy and critics of its actions (SAC, TD3), beside `OffPolicyConfig`'s."""

    max_replay_size: int = 1_000_000  # Maximum number of items; the oldest are removed first.
    batch_size: int = 256  # Items per learner step.
    samples_per_insert: float = 256.0  # Draws of an item. Divided by batch_size: learner steps per item.
    insert_burst: int = 32  # Items by which inserts may lead or trail the ratio; also the limit in flight.
    critic_learning_rate: float = 1e-3  # Initial learning rate of the critics (Adam).
    num_critics: int = 2  # Critics; targets use the smallest value. More: more conservative, slower.
    target_update_rate: float = 0.005  # Weight of the online networks in each target update; 1 copies them.
    random_start: bool = True  # Acts uniformly at random until learning begins, not with the first policy.
    hidden_sizes: tuple[int, ...] = (256, 256)  # Hidden layers of the policy and of each critic.
    critic_hidden_sizes: tuple[int, ...] | None = None  # Hidden layers of each critic. None: hidden_sizes.
    # "simba": residual blocks with layer norms of their own, one for each hidden size; "simba_v2": the same
    # with features and weights of norm 1.
    network: str = "mlp"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "num_critics", "hidden_sizes", "critic_hidden_sizes")
        check.at_least(self, 0, "critic_learning_rate")
        check.one_of(self, BODIES, "network")

    @property
    def critic_sizes(self) -> tuple[int, ...]:
        return self.hidden_sizes if self.critic_hidden_sizes is None else self.critic_hidden_sizes


@dataclass(frozen=True)
class UnrollConfig(AgentConfig):
    """Settings of agents that learn from fresh unrolls, not from a large replay."""

    unroll_length: int = 128  # Steps of an env in an unroll. More: less bias, and older data.
    reward_clip: float | None = None  # Rewards are clipped to +- this in the learner; None keeps them.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 2, "unroll_length")
        check.above(self, 0, "reward_clip")


@dataclass(frozen=True)
class OnPolicyConfig(UnrollConfig):
    """Settings of agents with a policy and a value, in addition to `UnrollConfig`'s."""

    value_coefficient: float = 0.5  # Weight of half the squared error of the values.
    entropy_coefficient: float = 0.01  # Weight of the policy's entropy in nats. Higher values explore longer.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 0, "value_coefficient", "entropy_coefficient")


@dataclass(frozen=True)
class ActorCriticConfig(OnPolicyConfig):
    """Settings of agents with `networks.ActorCritic` (PPO, A2C), in addition to `OnPolicyConfig`'s."""

    gae_lambda: float = 0.95  # 0 trusts the values, 1 the returns: less bias, more variance.
    adam_epsilon: float = 1e-5  # Epsilon of Adam. Larger values damp steps where gradients are small.
    max_gradient_norm: float | None = 0.5  # Larger gradients are scaled down to this.

    # Networks.
    hidden_sizes: tuple[int, ...] = (64, 64)  # Hidden layers of the policy and of the value.
    activation: str = "tanh"  # Activation of the hidden layers: relu, tanh, elu or silu.
    shared: bool = False  # Policy and value share hidden layers: faster, but the two losses compete.
    recurrent: str | None = None  # "lstm" or "gru" after the hidden layers, then shared. None: feed-forward.
    recurrent_size: int = 64  # Width of the recurrent layer.
    initial_std: float = 1.0  # Initial standard deviation of actions, in half-widths of their range.
    tanh_mean: bool = False  # A tanh keeps the mean of actions in their range; it learns slower at bounds.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "hidden_sizes", "recurrent_size")
        check.above(self, 0, "initial_std")
        check.fraction(self, "gae_lambda")
        check.one_of(self, ("lstm", "gru"), "recurrent")
        check.one_of(self, ACTIVATIONS, "activation")

    def network_settings(self) -> dict[str, Any]:
        """Keyword arguments of `networks.ActorCritic`."""
        names = ("hidden_sizes", "activation", "shared", "recurrent", "recurrent_size", "initial_std")
        return {name: getattr(self, name) for name in (*names, "tanh_mean")}
