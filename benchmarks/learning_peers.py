"""One training run of a peer, for ``learning.py``, by an interpreter that has the peer.

    PYTHON benchmarks/learning_peers.py sb3 cartpole-ppo --seed 1

prints one line of JSON: the mean return of 100 greedy episodes after the row's steps, and the CPU seconds of
everything before them. Stable-Baselines3 runs with the settings of its Zoo, CleanRL's scripts with those that
they start from.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import resource
import runpy
import sys
import tempfile
from typing import Any

EPISODES = 100

# By row: class, environment, envs, steps, keyword arguments.
STABLE_BASELINES3: dict[str, tuple[str, str, int, int, dict[str, Any]]] = {
    "cartpole-ppo": (
        "PPO",
        "CartPole-v1",
        8,
        60_000,
        {
            "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20,
            "ent_coef": 0.0, "learning_rate": 1e-3, "clip_range": 0.2,
        },
    ),
    "cartpole-dqn": (
        "DQN",
        "CartPole-v1",
        1,
        50_000,
        {
            "learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1000,
            "gamma": 0.99, "target_update_interval": 10, "train_freq": 256, "gradient_steps": 128,
            "exploration_fraction": 0.16, "exploration_final_eps": 0.04,
            "policy_kwargs": {"net_arch": [256, 256]},
        },
    ),
    "pendulum-sac": ("SAC", "Pendulum-v1", 1, 20_000, {"learning_rate": 1e-3}),
    "pendulum-ppo": (
        "PPO",
        "Pendulum-v1",
        4,
        200_000,
        {
            "n_steps": 1024, "gae_lambda": 0.95, "gamma": 0.9, "n_epochs": 10, "ent_coef": 0.0,
            "learning_rate": 1e-3, "clip_range": 0.2, "use_sde": True, "sde_sample_freq": 4,
        },
    ),
}  # fmt: skip

# By row: script, environment, steps, the network of actions among the script's variables.
CLEANRL: dict[str, tuple[str, str, int, str]] = {
    "cartpole-ppo": ("ppo", "CartPole-v1", 60_000, "agent.actor"),
    "cartpole-dqn": ("dqn", "CartPole-v1", 50_000, "q_network"),
}


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def stable_baselines3(row: str, seed: int) -> dict[str, Any]:
    import stable_baselines3 as sb3
    import torch
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    kind, environment, envs, steps, settings = STABLE_BASELINES3[row]
    torch.set_num_threads(1)
    training = make_vec_env(environment, envs, seed=seed)
    model = getattr(sb3, kind)("MlpPolicy", training, seed=seed, device="cpu", **settings)
    model.learn(steps)
    seconds = cpu_seconds()
    mean, _ = evaluate_policy(model, make_vec_env(environment, 1, seed=1), EPISODES)
    return {"return": float(mean), "cpu_seconds": seconds, "steps": steps, "version": sb3.__version__}


def cleanrl(row: str, seed: int) -> dict[str, Any]:
    """Runs the script of CleanRL as it is, then plays greedily with the networks that it leaves behind.

    The scripts of 0.4.8, the last release, are for gym before 0.22 (episodes end with one flag).
    """
    import importlib.metadata

    import cleanrl as package
    import gym
    import torch

    script, environment, steps, network = CLEANRL[row]
    assert package.__file__ is not None
    file = pathlib.Path(package.__file__).parent / f"{script}.py"
    arguments = ["--gym-id", environment, "--total-timesteps", str(steps), "--cuda", "False"]
    torch.set_num_threads(1)
    sys.argv = [str(file), *arguments, "--seed", str(seed)]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # It writes to runs/.
        left: Any = runpy.run_path(str(file), run_name="__main__")
    seconds = cpu_seconds()
    name, _, part = network.partition(".")
    net = getattr(left[name], part) if part else left[name]
    extra = (torch.device("cpu"),) if script == "dqn" else ()
    played, total = gym.make(environment), 0.0
    played.seed(1)
    for _ in range(EPISODES):
        observation, over = played.reset(), False
        while not over:
            with torch.no_grad():
                scores = net(torch.as_tensor(observation, dtype=torch.float32)[None], *extra)
            observation, reward, over, _ = played.step(int(scores.argmax()))
            total += reward
    version = importlib.metadata.version("cleanrl")
    return {"return": total / EPISODES, "cpu_seconds": seconds, "steps": steps, "version": version}


# What --peers calls them: what the table calls them, the rows they have, how one is run.
PEERS = {
    "sb3": ("SB3", STABLE_BASELINES3, stable_baselines3),
    "cleanrl": ("CleanRL", CLEANRL, cleanrl),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("peer", choices=list(PEERS))
    parser.add_argument("row")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    _, rows, train = PEERS[options.peer]
    if options.row not in rows:
        parser.error(f"{options.peer} has no row {options.row!r}; it has {list(rows)}")
    with open(os.devnull, "w", encoding="utf-8") as nothing, contextlib.redirect_stdout(nothing):
        numbers = train(options.row, options.seed)
    print(json.dumps({"seed": options.seed, **numbers, "cpu_seconds": round(numbers["cpu_seconds"], 1)}))


if __name__ == "__main__":
    main()
