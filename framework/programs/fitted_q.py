"""Off-policy evaluation: what a policy would reach, from data that others have recorded.

Fitted Q evaluation (Le et al., 2019, "Batch Policy Learning under Constraints", algorithm 3): a critic learns
the values of the policy's actions, `Q(s, a) = r + discount * Q(s', policy(s'))`, from the transitions of the
data. Its mean at the first observations of the episodes is the estimate. Actions that the data does not have
near the policy's make it wrong, and no figure here says how wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import tree
from dm_env import specs as dm_specs
from torch import nn

from framework import learners, losses, networks
from framework.datasets.episodes import EpisodeDataset
from framework.own_settings import OwnSettings, seeded
from framework.specs import EnvironmentSpec
from framework.types import Nest

_ROWS = 1024  # Observations for which the policy acts at once.
# Weight of the critic in each update of its target network. With less, values grow too slowly.
_TARGET_RATE = 0.05


class _Critic(nn.Module):
    def __init__(self, spec: EnvironmentSpec, hidden_sizes: tuple[int, ...]):
        super().__init__()
        discrete = isinstance(spec.actions, dm_specs.DiscreteArray)
        size = 0 if discrete else int(np.prod(spec.actions.shape))
        num_actions = int(spec.actions.num_values) if discrete else None
        self.critic = networks.Critics(spec.observations, size, hidden_sizes, 1, num_actions=num_actions)


def fitted_q_evaluation(
    policy: Callable[[Nest], Any],
    spec: EnvironmentSpec,
    episodes: EpisodeDataset,
    *,
    discount: float = 0.99,
    learner_steps: int = 20_000,
    batch_size: int = 256,
    learning_rate: float = 3e-4,
    hidden_sizes: tuple[int, ...] = (256, 256),
    seed: int = 0,
) -> dict[str, Any]:
    """Estimates the discounted return of `policy` from the first observations of `episodes`.

    Args:
      policy: observations `[N, ...]` to actions `[N, ...]`, such as a `LoadedPolicy`. It has no memory.
      spec: the specs of one env, with one discrete action or one array of real ones, and one reward.
      episodes: the data, which is held in memory.
      discount: of the return, between 0 and 1.
      learner_steps: optimizer steps of the critic.
      batch_size: transitions of a learner step.
      learning_rate: of the critic (Adam).
      hidden_sizes: hidden layers of the critic.
      seed: of the critic's first parameters and of the batches.

    Returns:
      `value`, the estimate; `data_return`, the mean discounted return of the episodes themselves; `discount`,
      `episodes`, `transitions`, `learner_steps`, and `loss`, the mean squared error of the last tenth.

    Raises:
      ValueError: The data does not fit `spec`, or the actions or rewards are of another kind.
    """
    if tree.is_nested(spec.actions) or tree.is_nested(spec.rewards) or spec.rewards.shape:
        raise ValueError(
            f"actions and rewards: got {spec.actions!r} and {spec.rewards!r}, expected one array of actions "
            "and one number. Fitted Q evaluation knows no others."
        )
    episodes.check(spec)
    data = [episodes[index] for index in range(len(episodes))]
    observations = tree.map_structure(lambda *leaves: np.concatenate(leaves), *[each[0] for each in data])
    given, rewards, discounts = (np.concatenate([each[field] for each in data]) for field in (1, 2, 3))
    ends = np.cumsum([len(each.start_of_episode) for each in data])
    firsts = np.concatenate([[0], ends[:-1]])
    rows = np.setdiff1d(np.arange(ends[-1]), ends - 1)  # The closing rows have no action.
    chosen = _actions(policy, observations, int(ends[-1]))
    convert = _converter(spec.actions)
    taken, wanted = convert(given), convert(chosen)
    tensors = tree.map_structure(torch.as_tensor, observations)
    reward, factor = (torch.as_tensor(each, dtype=torch.float32) for each in (rewards, discount * discounts))
    generator = np.random.default_rng(seed)

    def loss(modules: Any, at: np.ndarray, context: learners.LossContext) -> learners.LossOutput:
        here, then = torch.as_tensor(at), torch.as_tensor(at + 1)
        with torch.no_grad():
            following = _values(context.targets["critic"], _rows(tensors, then), wanted[then])
            targets = reward[here] + losses.discounted(factor[here], following)
        error = (_values(modules.critic, _rows(tensors, here), taken[here]) - targets).square().mean()
        return learners.LossOutput(error, {})

    with seeded(seed):
        modules = _Critic(spec, hidden_sizes)
    optimizer = functools.partial(learners.Adam, lr=learning_rate)
    learner = learners.SGDLearner(
        modules, loss, optimizer, target_names=("critic",), target_update_rate=_TARGET_RATE
    )
    errors = []
    for step in range(learner_steps):
        result = learner.step(generator.choice(rows, batch_size))  # type: ignore[arg-type]
        if step >= learner_steps - max(1, learner_steps // 10):
            errors.append(float(result.metrics["loss"]))
    with OwnSettings(modules.parameters()), torch.no_grad():
        at = torch.as_tensor(firsts)
        value = float(_values(modules.critic, _rows(tensors, at), wanted[at]).mean())
    returns = [_discounted_sum(each.reward[:-1], discount * each.discount[:-1]) for each in data]
    return {
        "value": value,
        "data_return": float(np.mean(returns)),
        "discount": discount,
        "episodes": len(data),
        "transitions": len(rows),
        "learner_steps": learner_steps,
        "loss": float(np.mean(errors)),
    }


def _actions(policy: Callable[[Nest], Any], observations: Nest, count: int) -> np.ndarray:
    """What the policy does at each of `count` observations."""
    parts = []
    for at in range(0, count, _ROWS):
        parts.append(np.asarray(policy(_rows(observations, slice(at, at + _ROWS)))))
        if getattr(policy, "has_memory", False):
            raise ValueError(
                "policy: got one with a memory, expected one whose action follows from one observation."
            )
    return np.concatenate(parts)


def _converter(spec: Any) -> Callable[[np.ndarray], torch.Tensor]:
    """Actions of the environment to what the critic takes: bounded ones between -1 and 1."""
    if isinstance(spec, dm_specs.DiscreteArray):
        return lambda actions: torch.as_tensor(actions.astype(np.int64))
    if not np.issubdtype(spec.dtype, np.floating):
        raise ValueError(f"actions: got {spec!r}, expected one discrete action or an array of real numbers.")
    bounds = [np.broadcast_to(getattr(spec, name, np.inf), spec.shape) for name in ("minimum", "maximum")]
    ranged = np.isfinite(bounds).all(0) & (bounds[0] < bounds[1])
    low, high = np.where(ranged, bounds[0], -1.0), np.where(ranged, bounds[1], 1.0)
    middle, half = (low + high) / 2, (high - low) / 2
    return lambda actions: torch.as_tensor(
        ((actions - middle) / half).reshape(len(actions), -1), dtype=torch.float32
    )


def _values(critic: nn.Module, observation: Nest, actions: torch.Tensor) -> torch.Tensor:
    """Values `[N]` of the actions: discrete ones `[N]`, or real ones `[N, D]`."""
    if actions.dim() > 1:
        values: torch.Tensor = critic(observation, actions)[0]
        return values
    picked: torch.Tensor = critic(observation)[0].gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    return picked


def _rows(nest: Nest, index: Any) -> Nest:
    return tree.map_structure(lambda leaf: leaf[index], nest)


def _discounted_sum(rewards: np.ndarray, discounts: np.ndarray) -> float:
    factors = np.concatenate([[1.0], np.cumprod(discounts[:-1], dtype=np.float64)])
    return float((rewards * factors).sum())
