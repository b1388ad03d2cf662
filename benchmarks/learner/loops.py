"""The loops in plain torch that `step.py` compares learners with.

Each is a function of an agent, its networks, a batch on the device and `wrap`, to a function that makes a
step. `wrap` gets the parts of a step that only compute, each with the same sizes at every call.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from agents.dqn import DQN
from agents.impala import IMPALA
from agents.ppo import PPO
from agents.sac import SAC
from agents.td3 import TD3

Loop = Callable[[], None]
Function = Callable[..., Any]


def leanrl(function: Function) -> Function:
    """`function` compiled, and captured as a CUDA graph, as in LeanRL."""
    from tensordict.nn import CudaGraphModule

    captured: Function = CudaGraphModule(torch.compile(function), warmup=5)
    return captured


def plain(function: Function) -> Function:
    return function


def ready(optimizer: torch.optim.Optimizer, wrap: Function) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group["capturable"] = wrap is leanrl
    return optimizer


def dqn_loop(agent: DQN, networks: Any, batch: Any, wrap: Function = plain) -> Loop:
    config, online, data = agent.config, networks.q_network, batch.data
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=config.learning_rate, eps=config.adam_epsilon)
    ready(optimizer, wrap)

    def step() -> None:
        with torch.no_grad():
            best = online(data.next_observation).argmax(-1, keepdim=True)
            following = target(data.next_observation).gather(-1, best).squeeze(-1)
            wanted = data.reward + config.discount * data.discount * following
        values = online(data.observation).gather(-1, data.action.long().unsqueeze(-1)).squeeze(-1)
        optimizer.zero_grad()
        F.huber_loss(values, wanted).backward()
        clip(online, config.max_gradient_norm)
        optimizer.step()
        move(target, online, config.target_update_rate)

    return wrap(step)


def sac_loop(agent: SAC, networks: Any, batch: Any, wrap: Function = plain) -> Loop:
    config, policy, critics = agent.config, networks.policy, networks.critics
    log_temperature, data, target = networks.temperature.log, batch.data, copy.deepcopy(critics)
    optimizer = torch.optim.Adam(
        [
            {"params": list(policy.parameters()), "lr": config.learning_rate},
            {"params": list(critics.parameters()), "lr": config.critic_learning_rate},
            {"params": [log_temperature], "lr": config.temperature_learning_rate},
        ],
        eps=config.adam_epsilon,
    )
    ready(optimizer, wrap)

    def act(observation: torch.Tensor) -> Any:
        drawn = policy(observation)
        return drawn.rsample_with_log_prob(noise=torch.randn_like(drawn.base.mean))

    def step() -> None:
        temperature = log_temperature.exp().detach()
        with torch.no_grad():
            action, log_prob = act(data.next_observation)
            following = target(data.next_observation, action).amin(0) - temperature * log_prob
            wanted = data.reward + config.discount * data.discount * following
        values = critics(data.observation, networks.actions.drawn(data))
        loss = 0.5 * (values - wanted).square().mean(-1).sum()
        action, log_prob = act(data.observation)
        critics.requires_grad_(False)
        own = critics(data.observation, action).amin(0)
        critics.requires_grad_(True)
        loss = loss + (temperature * log_prob - own).mean()
        loss = loss - (log_temperature * (log_prob.detach() + networks.target_entropy)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        move(target, critics, config.target_update_rate)

    return wrap(step)


def td3_loop(agent: TD3, networks: Any, batch: Any, wrap: Function = plain) -> Loop:
    config, policy, critics, data = agent.config, networks.policy, networks.critics, batch.data
    target_policy, target = copy.deepcopy(policy), copy.deepcopy(critics)
    optimizer = torch.optim.Adam(
        [
            {"params": list(policy.parameters()), "lr": config.learning_rate},
            {"params": list(critics.parameters()), "lr": config.critic_learning_rate},
        ],
        eps=config.adam_epsilon,
    )
    ready(optimizer, wrap)

    def critic_loss() -> torch.Tensor:
        with torch.no_grad():
            action = target_policy(data.next_observation)
            noise = (config.smoothing_std * torch.randn_like(action)).clamp(
                -config.smoothing_clip, config.smoothing_clip
            )
            following = target(data.next_observation, (action + noise).clamp(-1.0, 1.0)).amin(0)
            wanted = data.reward + config.discount * data.discount * following
        values = critics(data.observation, networks.actions.drawn(data))
        return 0.5 * (values - wanted).square().mean(-1).sum()

    def learn(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def update_critics() -> None:
        learn(critic_loss())

    def update_all() -> None:
        loss = critic_loss()
        critics.requires_grad_(False)
        own = networks.values(data.observation, policy(data.observation))
        critics.requires_grad_(True)
        learn(loss - own.mean())
        move(target, critics, config.target_update_rate)
        move(target_policy, policy, config.target_update_rate)

    turns = itertools.cycle([wrap(update_critics), wrap(update_all)])  # The config's `actor_delay` is 2.
    return lambda: next(turns)()


def impala_loop(agent: IMPALA, networks: Any, batch: Any, wrap: Function = plain) -> Loop:
    config, model, data = agent.config, networks.actor_critic, batch.data
    optimizer = ready(agent.make_optimizer(networks), wrap)  # torch's RMSprop
    length = config.unroll_length
    rewards, discounts = data.reward[:, :length], config.discount * data.discount[:, :length]

    def step() -> None:
        policy, values = model.unroll(data.observation, (), data.start_of_episode)
        log_probs = policy.log_prob(data.action)
        with torch.no_grad():
            ratios = (log_probs - data.extras["log_prob"])[:, :length].exp()
            rhos, cs = ratios.clamp(max=config.clip_rho), ratios.clamp(max=config.clip_c)
            errors = rhos * (rewards + discounts * values[:, 1:] - values[:, :length])
            trace, traces = torch.zeros_like(values[:, 0]), []
            for t in reversed(range(length)):
                trace = errors[:, t] + discounts[:, t] * cs[:, t] * config.vtrace_lambda * trace
                traces.append(trace)
            targets = values[:, :length] + torch.stack(traces[::-1], 1)
            following = torch.cat([targets[:, 1:], values[:, length:]], 1)
            advantages = rhos * (rewards + discounts * following - values[:, :length])
        loss = -(log_probs[:, :length] * advantages).mean()
        loss = loss + config.value_coefficient * 0.5 * F.mse_loss(values[:, :length], targets)
        loss = loss - config.entropy_coefficient * policy.entropy()[:, :length].mean()
        optimizer.zero_grad()
        loss.backward()
        clip(networks, config.max_gradient_norm)
        optimizer.step()

    return wrap(step)


def ppo_loop(agent: PPO, networks: Any, batch: Any, wrap: Function = plain) -> Loop:
    config, data, length = agent.config, batch.data, agent.config.unroll_length
    optimizer = torch.optim.Adam(networks.parameters(), lr=config.learning_rate, eps=config.adam_epsilon)
    ready(optimizer, wrap)
    observation, action = (
        leaf[:, :length].flatten(0, 1) for leaf in (data.observation, networks.actions.drawn(data))
    )
    count = len(observation)

    @torch.no_grad()
    def prepare() -> tuple[torch.Tensor, ...]:
        values = networks(data.observation)[1]
        policy = {key: leaf[:, :length].flatten(0, 1) for key, leaf in data.extras["policy"].items()}
        old = networks.actions.distribution(policy).log_prob(action)
        trace, traces = torch.zeros_like(values[:, 0]), []
        for t in reversed(range(length)):
            discount = config.discount * data.discount[:, t]
            error = data.reward[:, t] + discount * values[:, t + 1] - values[:, t]
            trace = error + discount * config.gae_lambda * trace
            traces.append(trace)
        advantages = torch.stack(traces[::-1], 1)
        targets = (advantages + values[:, :length]).flatten()
        scaled = ((advantages - advantages.mean()) / (advantages.std() + 1e-8)).flatten()
        return old, targets, scaled

    def update(
        observation: torch.Tensor,
        action: torch.Tensor,
        old: torch.Tensor,
        targets: torch.Tensor,
        scaled: torch.Tensor,
    ) -> None:
        distribution, value = networks(observation)
        ratios = (distribution.log_prob(action) - old).exp()
        clipped = ratios.clamp(1 - config.clip, 1 + config.clip)
        loss = -torch.minimum(ratios * scaled, clipped * scaled).mean()
        loss = loss + config.value_coefficient * 0.5 * F.mse_loss(value, targets)
        optimizer.zero_grad()
        loss.backward()
        clip(networks, config.max_gradient_norm)
        optimizer.step()

    prepare, update = wrap(prepare), wrap(update)

    def step() -> None:
        leaves = (observation, action, *prepare())
        for _ in range(config.epochs):
            for rows in torch.randperm(count, device=observation.device).split(config.minibatch_size):
                update(*[leaf[rows] for leaf in leaves])

    return step


def clip(module: nn.Module, largest: float | None) -> None:
    if largest is not None:
        nn.utils.clip_grad_norm_(module.parameters(), largest)


def move(target: nn.Module, online: nn.Module, rate: float) -> None:
    with torch.no_grad():
        torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), rate)


LOOPS: dict[str, Callable[..., Loop]] = {
    "dqn": dqn_loop,
    "impala": impala_loop,
    "impala_deep": impala_loop,
    "ppo": ppo_loop,
    "sac": sac_loop,
    "td3": td3_loop,
}
