"""SAC and TD3 of peers on HalfCheetah, for ``peers.py``: a learner step of 128 items per env step.

pip has no CleanRL for Python 3.11 that holds them, so its rows are the loops of ``sac_continuous_action.py``
and ``td3_continuous_action.py``, in their order, with their optimizers, and replay in NumPy arrays.
"""

from __future__ import annotations

import contextlib
from typing import Any

from benchmarks.common import Window

ENVIRONMENT, BATCH, START, CAPACITY, GAMMA, TAU = "HalfCheetah-v5", 128, 500, 1_000_000, 0.99, 0.005


def stable_baselines3(window: Window, name: str) -> None:
    """Its class ``name`` with two hidden layers of 256 and the learning rates of ours."""
    import stable_baselines3 as sb3
    from stable_baselines3.common.callbacks import BaseCallback

    class Stop(BaseCallback):
        def _on_step(self) -> bool:
            return window.at(self.num_timesteps)

    model = getattr(sb3, name)(
        "MlpPolicy",
        ENVIRONMENT,
        batch_size=BATCH,
        learning_starts=START,
        train_freq=1,
        gradient_steps=1,
        learning_rate=1e-3,
        device="cpu",
        policy_kwargs={"net_arch": [256, 256]},
    )
    with contextlib.suppress(KeyboardInterrupt):
        model.learn(10**9, callback=Stop())


def cleanrl(window: Window, sac: bool) -> None:
    """CleanRL's loop of SAC, or of TD3: two critics, a policy that learns at every second step.

    SAC then learns it twice, as CleanRL does.
    """
    import gymnasium
    import numpy as np
    import torch
    from torch import nn, optim
    from torch.nn import functional

    envs = gymnasium.vector.SyncVectorEnv(
        [lambda: gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make(ENVIRONMENT))]
    )
    width = int(np.prod(envs.single_observation_space.shape))
    size = int(np.prod(envs.single_action_space.shape))

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.fc3 = (
                nn.Linear(width + size, 256),
                nn.Linear(256, 256),
                nn.Linear(256, 1),
            )

        def forward(self, observation: Any, action: Any) -> Any:
            hidden = functional.relu(self.fc1(torch.cat([observation, action], 1)))
            return self.fc3(functional.relu(self.fc2(hidden)))

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(width, 256), nn.Linear(256, 256)
            self.mean, self.log_std = nn.Linear(256, size), nn.Linear(256, size)

        def forward(self, observation: Any) -> Any:
            hidden = functional.relu(self.fc2(functional.relu(self.fc1(observation))))
            if not sac:
                return torch.tanh(self.mean(hidden)), None
            log_std = -5 + 0.5 * (2 + 5) * (torch.tanh(self.log_std(hidden)) + 1)
            normal = torch.distributions.Normal(self.mean(hidden), log_std.exp())
            drawn = normal.rsample()
            action = torch.tanh(drawn)
            log_prob = normal.log_prob(drawn) - torch.log(1 - action.pow(2) + 1e-6)
            return action, log_prob.sum(1, keepdim=True)

    policy, first, second, first_target, second_target = Policy(), Critic(), Critic(), Critic(), Critic()
    first_target.load_state_dict(first.state_dict())
    second_target.load_state_dict(second.state_dict())
    policy_target = Policy()
    policy_target.load_state_dict(policy.state_dict())
    q_optimizer = optim.Adam([*first.parameters(), *second.parameters()], lr=1e-3)
    policy_optimizer = optim.Adam(policy.parameters(), lr=3e-4)
    log_alpha = torch.zeros(1, requires_grad=True)
    alpha, alpha_optimizer = log_alpha.exp().item(), optim.Adam([log_alpha], lr=1e-3)
    shapes = ((width,), (size,), (), (width,), ())
    memory = [np.zeros((CAPACITY, *shape), np.float32) for shape in shapes]

    def follow(networks: list[tuple[nn.Module, nn.Module]]) -> None:
        for network, target in networks:
            for param, target_param in zip(network.parameters(), target.parameters(), strict=True):
                target_param.data.copy_(TAU * param.data + (1 - TAU) * target_param.data)

    seen, _ = envs.reset(seed=1)
    step = 0
    while window.at(step):
        if step < START:
            actions = np.array([envs.single_action_space.sample()])
        else:
            with torch.no_grad():
                drawn, _ = policy(torch.Tensor(seen))
                if not sac:
                    drawn = (drawn + torch.normal(0.0, 0.1 * torch.ones(size))).clamp(-1.0, 1.0)
            actions = drawn.numpy()
        following, rewards, terminations, _, _ = envs.step(actions)
        row = (seen[0], actions[0], rewards[0], following[0], float(terminations[0]))
        for column, value in zip(memory, row, strict=True):
            column[step % CAPACITY] = value
        seen = following
        step += 1
        if step <= START:
            continue
        rows = np.random.randint(0, min(step, CAPACITY), BATCH)
        observation, action, reward, after, done = (torch.from_numpy(column[rows]) for column in memory)
        with torch.no_grad():
            if sac:
                next_action, next_log_prob = policy(after)
            else:
                noise = (torch.randn_like(action) * 0.2).clamp(-0.5, 0.5)
                next_action = (policy_target(after)[0] + noise).clamp(-1.0, 1.0)
            least = torch.min(first_target(after, next_action), second_target(after, next_action))
            if sac:
                least = least - alpha * next_log_prob
            target = reward + (1 - done) * GAMMA * least.view(-1)
        loss = functional.mse_loss(first(observation, action).view(-1), target)
        loss = loss + functional.mse_loss(second(observation, action).view(-1), target)
        q_optimizer.zero_grad()
        loss.backward()
        q_optimizer.step()
        if step % 2 == 0:
            for _ in range(2 if sac else 1):
                own, log_prob = policy(observation)
                value = first(observation, own)
                if sac:
                    value = torch.min(value, second(observation, own)) - alpha * log_prob
                policy_optimizer.zero_grad()
                (-value.mean()).backward()
                policy_optimizer.step()
                if sac:
                    with torch.no_grad():
                        _, log_prob = policy(observation)
                    alpha_loss = (-log_alpha.exp() * (log_prob - size)).mean()
                    alpha_optimizer.zero_grad()
                    alpha_loss.backward()
                    alpha_optimizer.step()
                    alpha = log_alpha.exp().item()
        if sac:
            follow([(first, first_target), (second, second_target)])
        elif step % 2 == 0:
            follow([(first, first_target), (second, second_target), (policy, policy_target)])
