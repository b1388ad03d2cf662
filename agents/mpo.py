"""MPO: maximum a posteriori policy optimization (Abdolmaleki et al., 2018a and 2018b), for bounded actions.

The critic rates actions that the target policy draws. The E-step weighs them by exp(Q / temperature), and the
M-step moves the policy toward the weighted actions, while learned multipliers bound by how much its mean and
its standard deviation differ from the target policy's. No gradient passes through the critic. The critic
learns n-step returns that bootstrap from the same actions; with `num_atoms`, it learns the distribution of
the return on fixed atoms (Bellemare et al., 2017), which is Acme's DMPO.

One learner step follows the gradient of the sum of all losses. Each loss has its own parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from agents.d4pg import DM_CONTROL_RUN
from agents.td3 import PENDULUM, PENDULUM_RUN
from framework import config_checks as check
from framework import losses, networks
from framework.learners import LossContext, LossOutput
from framework.networks import DiagonalGaussian
from framework.replay import ReplaySample
from framework.runs.presets import CONTROL_RUN, MUJOCO, Preset
from framework.specs import EnvironmentSpec
from framework.torch_agents import OffPolicyAgent, OffPolicyConfig, TorchPolicy
from framework.types import Nest, Transition


@dataclass(frozen=True)
class MPOConfig(OffPolicyConfig):
    """Settings of MPO, in addition to `OffPolicyConfig`'s. Bounds are divergences in nats."""

    # What is learned from.
    n_step: int = 5  # Rewards summed before bootstrapping. More: faster propagation, but more off-policy.
    max_replay_size: int = 1_000_000  # Maximum number of items; the oldest are removed first.
    batch_size: int = 256  # Items per learner step.
    samples_per_insert: float = 64.0  # Draws of an item. Divided by batch_size: learner steps per item.
    insert_burst: int = 32  # Items by which inserts may lead or trail the ratio; also the limit in flight.

    # Learning.
    learning_rate: float = 3e-4  # Initial learning rate of the policy (Adam).
    critic_learning_rate: float = 3e-4  # Initial learning rate of the critic (Adam).
    target_update_period: int = 100  # Learner steps between updates of the target policy and critic.
    target_update_rate: float = 1.0  # Weight of the online networks in each target update; 1 copies them.
    num_atoms: int = 1  # K, the possible returns of a distributional critic. 1 learns expected returns.
    v_min: float = -150.0  # Smallest return that the atoms can represent. Smaller ones count as this.
    v_max: float = 150.0  # Largest return that the atoms can represent. Larger ones count as this.

    # E-step.
    num_samples: int = 20  # S, the actions drawn for each observation. More estimate better, and slower.
    epsilon: float = 0.1  # KL bound of the action weights. Larger values follow the best actions more.
    epsilon_penalty: float | None = 1e-3  # The same bound for out-of-range actions; None: no penalty.
    initial_temperature: float = 10.0  # Initial temperature, in units of the return.

    # M-step.
    epsilon_mean: float = 2.5e-3  # KL bound of the mean, per dimension. Larger: faster, less stable learning.
    epsilon_std: float = 1e-6  # KL bound of the std, per dimension. Larger: exploration ends sooner.
    initial_mean_multiplier: float = 10.0  # Initial weight of the mean's divergence.
    initial_std_multiplier: float = 1000.0  # Initial weight of the standard deviation's divergence.
    # Learning rate of temperatures and multipliers before their softplus (Adam).
    dual_learning_rate: float = 1e-2

    # Networks.
    hidden_sizes: tuple[int, ...] = (256, 256)  # Hidden layers of the policy and of the critic.
    layer_norm: bool = True  # Normalizes the hidden layers of policy and critic.
    initial_std: float = 0.7  # Standard deviation of the first policy; 1 is half the range of an action.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "num_atoms", "hidden_sizes")
        check.at_least(self, 2, "num_samples")
        check.at_least(self, 0, "critic_learning_rate", "dual_learning_rate")
        check.above(
            self, 0, "epsilon", "epsilon_penalty", "epsilon_mean", "epsilon_std", "initial_temperature"
        )
        check.above(self, 0, "initial_mean_multiplier", "initial_std_multiplier", "initial_std")
        most = math.log(self.num_samples)
        for field in ("epsilon", "epsilon_penalty"):
            value = getattr(self, field)
            if value is not None and not value < most:
                raise ValueError(
                    f"{field}: got {value!r}, expected less than the logarithm of num_samples, {most:.3f}, "
                    "which is the largest divergence of the weights of that many actions. Raise num_samples."
                )
        check.return_limits(self)


# Smallest temperature or multiplier before `Duals.positive`, as in Acme's MPO (Hoffman et al., 2020).
# It keeps a multiplier whose bound is far away from falling on and on: the way back takes as many steps.
_LEAST_DUAL = -18.0


class Duals(nn.Module):
    """The temperatures, and the multipliers of `size` dimensions, before `positive`."""

    def __init__(self, config: MPOConfig, size: int):
        super().__init__()

        def dual(value: float, *shape: int) -> nn.Parameter:
            return nn.Parameter(torch.full(shape, value + math.log(-math.expm1(-value))))

        self.temperature = dual(config.initial_temperature)
        self.penalty_temperature = dual(1.0)
        self.penalty_temperature.requires_grad_(config.epsilon_penalty is not None)
        self.mean_multiplier = dual(config.initial_mean_multiplier, size)
        self.std_multiplier = dual(config.initial_std_multiplier, size)

    @staticmethod
    def positive(dual: torch.Tensor) -> torch.Tensor:
        """Its softplus, as in Acme. An exponential would grow without limit while a bound is exceeded."""
        return nn.functional.softplus(dual) + 1e-8


class MPONetworks(nn.Module):
    """The variables of MPO: `policy`, `critics` (one critic) and `duals`.

    Attributes:
      atoms: `[K]` possible returns; `[1]` if the critic learns expected returns.
    """

    atoms: torch.Tensor

    def __init__(self, config: MPOConfig, spec: EnvironmentSpec):
        super().__init__()
        self.actions = networks.make_squashed_actions(spec.actions, "MPO")
        (size,) = self.actions.head_spec.shape

        def make_head(width: int) -> nn.Module:
            return networks.SoftplusGaussianHead(width, size, config.initial_std)

        sizes, make_body = config.hidden_sizes, networks.make_body("mlp", layer_norm=config.layer_norm)
        self.policy = networks.PolicyNetwork(spec.observations, sizes, make_head, make_body)
        self.critics = networks.Critics(
            spec.observations, size, sizes, 1, make_body, outputs_per_action=config.num_atoms
        )
        self.duals = Duals(config, size)
        # A resumed run may have other limits, so they are not saved.
        atoms = torch.linspace(config.v_min, config.v_max, config.num_atoms)
        self.register_buffer("atoms", atoms, persistent=False)

    def expected(self, outputs: torch.Tensor) -> torch.Tensor:
        """Expected returns `[...]` of the critic's outputs for actions: `[...]`, or logits `[..., K]`."""
        if len(self.atoms) == 1:
            return outputs
        return losses.expected_returns(outputs, self.atoms)


class MPOPolicy(TorchPolicy):
    """Samples actions from the policy network, or takes its mean.

    Args:
      networks: the networks, which the policy reads at each step.
      evaluation: whether to take the mean.
    """

    def __init__(self, networks: MPONetworks, evaluation: bool = False):
        super().__init__(networks, networks.actions, variables=("policy",))
        self._policy, self._greedy = networks.policy, evaluation

    def act(self, observation: Nest, state: Nest) -> tuple[torch.Tensor, Nest, Nest]:
        distribution = self._policy(observation)
        drawn = distribution.mode() if self._greedy else distribution.sample(self.random)
        return drawn, (), state


class MPO(OffPolicyAgent):
    """Maximum a posteriori policy optimization.

    ```python
    agent = MPO(MPOConfig(num_atoms=51, v_min=0.0, v_max=100.0))      # with a distributional critic
    config = programs.RunConfig(max_env_steps=200_000)
    program = programs.make_program(agent, "dm_control:cartpole/swingup", config)
    ```
    """

    config: MPOConfig = MPOConfig()
    target_names = ("policy", "critics")
    learning_rates = {
        "policy": "learning_rate",
        "critics": "critic_learning_rate",
        "duals": "dual_learning_rate",
    }

    def make_networks(self, spec: EnvironmentSpec) -> MPONetworks:
        members = ("actions", "policy", "critics", "duals", "atoms", "expected")
        return self.custom_networks(spec, MPONetworks, members)

    def make_policy(self, networks: MPONetworks, evaluation: bool = False) -> MPOPolicy:
        return MPOPolicy(networks, evaluation)

    def make_optimizer(self, networks: MPONetworks) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer(networks)
        optimizer.param_groups[-1]["minimum"] = _LEAST_DUAL
        return optimizer

    def loss(self, networks: MPONetworks, batch: ReplaySample, context: LossContext) -> LossOutput:
        """The sum of the losses of critic, policy and duals on a batch of `Transition`s."""
        data = batch.data
        target_policy, target_critics = context.targets["policy"], context.targets["critics"]

        def drawn(observation: Nest) -> tuple[DiagonalGaussian, torch.Tensor, torch.Tensor]:
            """The target policy, S actions of it `[N, S, D]`, and the target critic's outputs for them."""
            policy = target_policy(observation)
            noise = context.normal_like(policy.mean.unsqueeze(1).expand(-1, self.config.num_samples, -1))
            actions = policy.mean.unsqueeze(1) + policy.log_std.exp().unsqueeze(1) * noise
            return policy, actions, target_critics(observation, actions.clamp(-1.0, 1.0))[0]

        with torch.no_grad():
            _, _, next_outputs = drawn(data.next_observation)
            old, actions, outputs = drawn(data.observation)
        critic, metrics = self._critic_loss(networks, data, next_outputs)
        policy, more = self._policy_loss(networks, data.observation, old, actions, outputs)
        return LossOutput(critic + policy, metrics | more)

    def _critic_loss(
        self, networks: MPONetworks, data: Transition, next_outputs: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss toward the mean over S next actions, of which `next_outputs [N, S, ...]` are given."""
        rewards, discounts = self.rewards(data)
        outputs = networks.critics(data.observation, networks.actions.drawn(data))[0]
        metrics = {"q_mean": networks.expected(outputs.detach()).mean()}
        if len(networks.atoms) == 1:
            targets = rewards + losses.discounted(discounts, next_outputs.mean(1))
            loss = losses.value_loss(outputs, targets)
        else:
            mixture = next_outputs.softmax(-1).mean(1)
            targets = losses.categorical_projection(networks.atoms, mixture, rewards, discounts)
            loss = losses.categorical_cross_entropy(outputs, targets)[0].mean()
            metrics["target_at_limits"] = (targets[:, 0] + targets[:, -1]).mean()
        return loss, metrics | {"critic_loss": loss}

    def _policy_loss(
        self,
        networks: MPONetworks,
        observation: Nest,
        old: DiagonalGaussian,
        actions: torch.Tensor,
        outputs: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The losses of policy and duals, of actions `[N, S, D]` of the policy `old` and outputs for them."""
        config, duals = self.config, networks.duals
        values, temperature = networks.expected(outputs), duals.positive(duals.temperature)
        weights = losses.mpo_weights(values, temperature)
        dual = losses.mpo_temperature_loss(values, temperature, config.epsilon)
        divergence = weights.xlogy(weights * config.num_samples).sum(-1).mean()
        metrics = {"temperature": temperature, "weights_kl": divergence}
        if config.epsilon_penalty is not None:
            # A second objective with a temperature of its own: MO-MPO (Abdolmaleki et al., 2020).
            inside = -(actions - actions.clamp(-1.0, 1.0)).norm(dim=-1)
            temperature = duals.positive(duals.penalty_temperature)
            weights = weights + losses.mpo_weights(inside, temperature)
            dual = dual + losses.mpo_temperature_loss(inside, temperature, config.epsilon_penalty)
            metrics["outside"] = -inside.mean()
        new = networks.policy(observation)
        only_mean = DiagonalGaussian(new.mean.unsqueeze(1), old.log_std.unsqueeze(1))
        only_std = DiagonalGaussian(old.mean.unsqueeze(1), new.log_std.unsqueeze(1))
        log_probs = only_mean.log_prob(actions) + only_std.log_prob(actions)
        total = dual + losses.mpo_likelihood_loss(weights, log_probs)
        kls = losses.decoupled_gaussian_kl(old.mean, old.log_std, new.mean, new.log_std)
        for name, kl, dual_multiplier, epsilon in (
            ("mean", kls[0], duals.mean_multiplier, config.epsilon_mean),
            ("std", kls[1], duals.std_multiplier, config.epsilon_std),
        ):
            multiplier = duals.positive(dual_multiplier)
            bound = losses.kl_constraint(kl, multiplier, epsilon)
            total = total + bound.penalty + bound.multiplier_loss
            metrics[f"kl_{name}"] = kl.mean()
            metrics[f"{name}_multiplier"] = multiplier.mean()
        metrics["policy_std"] = new.log_std.exp().mean()
        return total, metrics


PRESETS: Mapping[str, Preset] = {
    "gymnasium:Pendulum-v1": Preset(
        agent={
            **PENDULUM,
            "n_step": 1,
            "num_samples": 10,
            "epsilon_mean": 0.01,
            "target_update_period": 50,
            "learning_rate": 1e-3,
        },
        run=PENDULUM_RUN,
    ),
    # Rewards are between 0 and 1. Acme's settings are for millions of learner steps. Here there are 50,000,
    # each of which follows the best actions more closely, and the targets move 4 times as often.
    **dict.fromkeys(
        ("dm_control:cartpole/swingup", "dm_control:walker/walk"),
        Preset(
            agent={
                "num_atoms": 51,
                "v_min": 0.0,
                "v_max": 100.0,
                "learning_rate": 1e-3,
                "critic_learning_rate": 1e-3,
                "target_update_period": 25,
                "num_samples": 10,
                "epsilon": 0.3,
                "epsilon_mean": 0.01,
                "epsilon_std": 1e-4,
                "initial_std_multiplier": 10.0,
                "initial_std": 0.5,
                "batch_size": 128,
                "samples_per_insert": 32.0,
                "min_replay_size": 2_000,
            },
            run=DM_CONTROL_RUN,
        ),
    ),
    **dict.fromkeys(
        (MUJOCO, "dm_control:*"),
        Preset(
            {
                "n_step": 4,
                "max_gradient_norm": 40.0,
                "epsilon_mean": 0.01,
                "initial_std": 0.5,
                "hidden_sizes": (256, 256, 256),
            },
            CONTROL_RUN,
            "Hoffman et al. (2020), run_mpo.py of Acme",
        ),
    ),
}
