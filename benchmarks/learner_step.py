"""Learner steps per second, beside loops written in plain torch, on data that lies on the device already.

    python benchmarks/learner_step.py                                  # one thread of the CPU
    python benchmarks/learner_step.py --device cuda --ways learner group compile cuda_graph autocast

DQN and IMPALA learn at the shapes of Atari, PPO and SAC at those of HalfCheetah. The loops have the agents'
networks and distributions; their losses, targets and optimizers are plain torch. `learner` is
`Learner.step` on the same batch, `group` the same in a group of one process (gloo, on GPUs NCCL), the other
ways are the learner with that field of the config. They take turns; the figures are the medians of the turns,
and the ratio is the median of those of the turns.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import tree
from dm_env import specs as dm_specs
from torch import nn
from torch.nn import functional as F

from agents.dqn import DQN, DQNConfig
from agents.impala import IMPALA, IMPALAConfig
from agents.ppo import PPO, PPOConfig
from agents.sac import SAC, SACConfig
from framework import specs
from framework.learners import LearnerGroup
from framework.networks import as_tensors
from framework.replay import ReplaySample
from framework.types import Step, Transition

Loop = Callable[[], None]
ATARI = (
    dm_specs.BoundedArray((84, 84, 4), np.uint8, 0, 255),
    dm_specs.DiscreteArray(6),
)
HALF_CHEETAH = (
    dm_specs.Array((17,), np.float32),
    dm_specs.BoundedArray((6,), np.float32, -1.0, 1.0),
)


# The ways of the learner: with which fields of the config, and whether in a group.
WAYS: dict[str, dict[str, Any]] = {
    "learner": {},
    "group": {},
    "compile": {"step_mode": "compile"},
    "cuda_graph": {"step_mode": "cuda_graph"},
    "autocast": {"autocast": True},
}


def make_agent(name: str, tiny: bool, **fields: Any) -> Any:
    if name == "dqn":
        return DQN(DQNConfig(batch_size=2 if tiny else 32, **fields))
    if name == "impala":
        sizes: dict[str, Any] = (
            {"batch_size": 2, "unroll_length": 3} if tiny else {"batch_size": 32, "unroll_length": 20}
        )
        return IMPALA(IMPALAConfig(**sizes, **fields))
    if name == "ppo":
        sizes = {"unroll_length": 8, "epochs": 2, "minibatch_size": 8}
        if not tiny:
            sizes = {"unroll_length": 128, "epochs": 10, "minibatch_size": 256}
        return PPO(PPOConfig(**sizes, **fields))
    return SAC(SACConfig(batch_size=2 if tiny else 256, **fields))


def make_spec(name: str) -> specs.EnvironmentSpec:
    observations, actions = ATARI if name in ("dqn", "impala") else HALF_CHEETAH
    return specs.EnvironmentSpec(
        observations, actions, dm_specs.Array((), np.float32), dm_specs.BoundedArray((), np.float32, 0, 1)
    )


def make_batch(agent: Any, spec: specs.EnvironmentSpec, envs: int, device: str) -> ReplaySample:
    """Random experience on the device: transitions, or unrolls whose last row is there to bootstrap from."""
    random = np.random.default_rng(0)
    size = envs if isinstance(agent, PPO) else agent.config.batch_size
    policy = agent.make_policy(agent.make_networks(spec))

    def observe() -> np.ndarray:
        shape = (size, *spec.observations.shape)
        if spec.observations.dtype == np.uint8:
            return random.integers(0, 256, shape, np.uint8)
        return random.normal(size=shape).astype(np.float32)

    rows: list[Any] = []
    on_policy = isinstance(agent, (PPO, IMPALA))
    for t in range(agent.config.unroll_length + 1 if on_policy else 1):
        observation = observe()
        action, extras, _ = policy.step(observation, policy.initial_state(size))
        reward = random.normal(size=size).astype(np.float32)
        discount = (random.random(size) < 0.98).astype(np.float32)
        if on_policy:
            real = np.full(size, float(t < agent.config.unroll_length), np.float32)
            rows.append(
                Step(observation, action, reward * real, discount * real, np.zeros(size, bool), extras, real)
            )
        else:
            rows.append(Transition(observation, action, reward, discount, observe()))
    data = tree.map_structure(lambda *leaves: np.stack(leaves, 1), *rows) if on_policy else rows[0]
    info: Any = None
    return ReplaySample(info, as_tensors(data, device))


# The loops in plain torch.


def dqn_loop(agent: DQN, networks: Any, batch: Any) -> Loop:
    config, online, data = agent.config, networks.q_network, batch.data
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=config.learning_rate, eps=config.adam_epsilon)

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

    return step


def sac_loop(agent: SAC, networks: Any, batch: Any) -> Loop:
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

    return step


def impala_loop(agent: IMPALA, networks: Any, batch: Any) -> Loop:
    config, model, data = agent.config, networks.actor_critic, batch.data
    optimizer = agent.make_optimizer(networks)  # torch's RMSprop
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

    return step


def ppo_loop(agent: PPO, networks: Any, batch: Any) -> Loop:
    config, data, length = agent.config, batch.data, agent.config.unroll_length
    optimizer = torch.optim.Adam(networks.parameters(), lr=config.learning_rate, eps=config.adam_epsilon)
    observation, action = (
        leaf[:, :length].flatten(0, 1) for leaf in (data.observation, networks.actions.drawn(data))
    )
    count = len(observation)

    def step() -> None:
        with torch.no_grad():
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
        for _ in range(config.epochs):
            for rows in torch.randperm(count, device=observation.device).split(config.minibatch_size):
                distribution, value = networks(observation[rows])
                ratios = (distribution.log_prob(action[rows]) - old[rows]).exp()
                clipped = ratios.clamp(1 - config.clip, 1 + config.clip)
                loss = -torch.minimum(ratios * scaled[rows], clipped * scaled[rows]).mean()
                loss = loss + config.value_coefficient * 0.5 * F.mse_loss(value, targets[rows])
                optimizer.zero_grad()
                loss.backward()
                clip(networks, config.max_gradient_norm)
                optimizer.step()

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
    "ppo": ppo_loop,
    "sac": sac_loop,
}


def make_loops(
    name: str, device: str, tiny: bool, ways: Sequence[str] = ("learner", "group")
) -> tuple[dict[str, Loop], dict[str, nn.Module], list[LearnerGroup]]:
    """The ways to make a step, plain torch first, their networks, which begin equal, and open groups."""
    spec, envs = make_spec(name), 2 if tiny else 16
    agents = {way: make_agent(name, tiny, device=device, **WAYS[way]).for_program(envs) for way in ways}
    agent = make_agent(name, tiny, device=device).for_program(envs)
    torch.manual_seed(0)
    networks = agent.make_networks(spec).to(device)
    batch = make_batch(agent, spec, envs, device)
    learners = {way: each.make_learner(copy.deepcopy(networks), spec) for way, each in agents.items()}
    groups = []
    if "group" in learners:
        groups = [LearnerGroup(0, 1, torch.distributed.HashStore(), learners["group"].device)]
        learners["group"].distribute(groups[0])

    def stepper(learner: Any) -> Loop:
        return lambda: learner.step(batch)

    loops = {"torch": LOOPS[name](agent, networks, batch)}
    loops |= {way: stepper(learner) for way, learner in learners.items()}
    modules = {"torch": networks, **{way: learner.networks for way, learner in learners.items()}}
    return loops, modules, groups


def rate(step: Loop, seconds: float, device: str) -> float:
    """Steps per second on the clock of a GPU, or per CPU-second."""
    cuda = torch.device(device).type == "cuda"
    clock = time.perf_counter if cuda else time.process_time
    made, begin = 0, clock()
    while clock() - begin < seconds:
        step()
        made += 1
    if cuda:
        torch.cuda.synchronize()
    return made / (clock() - begin)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--agents", nargs="*", default=list(LOOPS), choices=list(LOOPS))
    parser.add_argument("--ways", nargs="*", default=["learner", "group"], choices=list(WAYS))
    parser.add_argument("--tiny", action="store_true", help="small batches, for tests")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cuda = torch.device(options.device).type == "cuda"
    device = torch.cuda.get_device_name(options.device) if cuda else "CPU, one thread"
    print(f"{device}, torch {torch.__version__}")
    unit = "s" if cuda else "CPU-s"
    print(f"| agent | torch, steps/{unit} | " + "".join(f"{way} | ratio | " for way in options.ways).rstrip())
    print("|---" * (2 + 2 * len(options.ways)) + "|")
    for name in options.agents:
        loops, _, groups = make_loops(name, options.device, options.tiny, options.ways)
        for step in loops.values():
            step()  # The first one compiles.
            rate(step, options.seconds / 5, options.device)
        turns = [
            {way: rate(step, options.seconds, options.device) for way, step in loops.items()}
            for _ in range(options.turns)
        ]
        for group in groups:
            group.close()
        middle = {way: statistics.median(turn[way] for turn in turns) for way in loops}
        ratios = {way: statistics.median(turn[way] / turn["torch"] for turn in turns) for way in loops}
        cells = [f"{middle['torch']:.1f}"]
        cells += [cell for way in options.ways for cell in (f"{middle[way]:.1f}", f"{ratios[way]:.2f}")]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
