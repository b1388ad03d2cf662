"""One training run of a peer, for ``learning.py``, by an interpreter that has the peer.

    PYTHON results/peers.py sb3 cartpole-ppo --seed 1

prints one line of JSON: the mean return of 100 greedy episodes after the row's steps, and the CPU seconds of
everything before them. Episode i begins with the seed 10,000 + i, in an environment of gymnasium, as those of
``repertory eval`` do; so CleanRL's interpreter needs gymnasium, too. Stable-Baselines3 and sb3-contrib run
with the settings of the Zoo, CleanRL's scripts with those that they start from, Tianshou with those of its
tests of the algorithm. Beside BatchPPO's experiment, Stable-Baselines3's PPO has its default settings,
batches of 2,048 steps of 8 envs, and normalizes observations and rewards; the line then has the curves, too.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

EPISODES = 100
EVALUATION_SEED = 10_000  # As framework.environments.EVALUATION_SEED.

_SIZES: dict[str, Any] = {"policy_kwargs": {"net_arch": [400, 300]}}
_NOISY: dict[str, Any] = {"learning_starts": 10_000, "noise_std": 0.1, "learning_rate": 1e-3, **_SIZES}
_EQUAL_TD3: dict[str, Any] = {**_NOISY, "batch_size": 256, "policy_kwargs": {"net_arch": [256, 256]}}
_MILLION = {"n_steps": 256, "normalize": True, "period": 50_000}
BATCH_PPO = {"HalfCheetah": 5, "Hopper": 5, "Walker2d": 5, "Reacher": 5, "Pendulum": 1}  # Versions.
# By row: class, environment, envs, steps, keyword arguments, and ours: `normalize` observations and rewards,
# and evaluate with a `period` of env steps.
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
    "cartpole-qr-dqn": (
        "QRDQN",
        "CartPole-v1",
        1,
        50_000,
        {
            "learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1000,
            "gamma": 0.99, "target_update_interval": 10, "train_freq": 256, "gradient_steps": 128,
            "exploration_fraction": 0.16, "exploration_final_eps": 0.04,
            "policy_kwargs": {"net_arch": [256, 256], "n_quantiles": 10},
        },
    ),
    "pendulum-sac": ("SAC", "Pendulum-v1", 1, 20_000, {"learning_rate": 1e-3}),
    "pendulum-ddpg": ("DDPG", "Pendulum-v1", 1, 20_000, {**_NOISY, "gamma": 0.98, "buffer_size": 200_000}),
    "pendulum-td3": ("TD3", "Pendulum-v1", 1, 20_000, {**_NOISY, "gamma": 0.98, "buffer_size": 200_000}),
    "halfcheetah-sac": ("SAC", "HalfCheetah-v5", 1, 200_000, {"learning_starts": 10_000}),
    "hopper-sac": ("SAC", "Hopper-v5", 1, 100_000, {"learning_starts": 10_000, "period": 10_000}),
    "walker2d-sac": ("SAC", "Walker2d-v5", 1, 100_000, {"learning_starts": 10_000, "period": 10_000}),
    "halfcheetah-td3": ("TD3", "HalfCheetah-v5", 1, 200_000, {**_NOISY, "batch_size": 256}),
    "halfcheetah-td3-sb3": ("TD3", "HalfCheetah-v5", 1, 200_000, _EQUAL_TD3),
    "hopper-td3-sb3": ("TD3", "Hopper-v5", 1, 200_000, _EQUAL_TD3),
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
    "walker2d-ppo": ("PPO", "Walker2d-v5", 8, 1_000_000, _MILLION),
    **{
        f"{name.lower()}-batch-ppo": ("PPO", f"{name}-v{version}", 8, 1_000_000, _MILLION)
        for name, version in BATCH_PPO.items()
    },
}  # fmt: skip
EVALUATION_EPISODES = 20  # Greedy episodes of each point of a curve.

# By row: script, environment, steps, the network of actions among the script's variables.
CLEANRL: dict[str, tuple[str, str, int, str]] = {
    "cartpole-ppo": ("ppo", "CartPole-v1", 60_000, "agent.actor"),
    "cartpole-dqn": ("dqn", "CartPole-v1", 50_000, "q_network"),
}

# By row: algorithm, envs, and what differs from the settings that all its tests in CartPole have.
TIANSHOU: dict[str, tuple[str, int, dict[str, Any]]] = {
    "cartpole-c51": ("C51", 8, {}),
    "cartpole-iqn": ("IQN", 10, {"lr": 3e-3}),
    "cartpole-qr-dqn": ("QRDQN", 10, {}),
    "cartpole-rainbow": ("RainbowDQN", 8, {"gamma": 0.95, "prioritized": True}),  # As in test_prainbow.
}


def play(environment: str, act: Callable[[Any], Any], episodes: int = EPISODES) -> float:
    """The mean return of whole episodes, undiscounted, of which episode i begins with the seed 10,000 + i."""
    import gymnasium

    playing, total = gymnasium.make(environment), 0.0
    for episode in range(episodes):
        observation, _ = playing.reset(seed=EVALUATION_SEED + episode)
        over = False
        while not over:
            observation, reward, terminated, truncated, _ = playing.step(act(observation))
            total, over = total + float(reward), terminated or truncated
    playing.close()
    return total / episodes


def stable_baselines3(row: str, seed: int) -> dict[str, Any]:
    import numpy as np
    import stable_baselines3 as sb3
    import torch
    from stable_baselines3.common.callbacks import ConvertCallback, EveryNTimesteps
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.noise import NormalActionNoise
    from stable_baselines3.common.vec_env import VecNormalize

    kind, environment, envs, steps, given = STABLE_BASELINES3[row]
    settings = {**given}
    normalize, period = settings.pop("normalize", False), settings.pop("period", None)
    torch.set_num_threads(1)
    training = make_vec_env(environment, envs, seed=seed)
    if "noise_std" in settings:
        std = np.full(training.action_space.shape, settings.pop("noise_std"))
        settings["action_noise"] = NormalActionNoise(np.zeros_like(std), std)
    if normalize:
        training = VecNormalize(training, gamma=0.99)
    package = sb3
    if not hasattr(sb3, kind):
        import sb3_contrib as package
    model = getattr(package, kind)("MlpPolicy", training, seed=seed, device="cpu", **settings)
    curve: dict[str, list[float]] = {"env_steps": [], "hours": [], "acting": [], "greedy": []}
    begin = time.monotonic()

    def act(observation: Any) -> Any:
        shown = training.normalize_obs(observation) if normalize else observation
        return model.predict(shown, deterministic=True)[0]

    def measure(*_: Any) -> bool:
        curve["env_steps"].append(model.num_timesteps)
        curve["hours"].append(round((time.monotonic() - begin) / 3600, 5))
        curve["acting"].append(
            round(sum(each["r"] for each in model.ep_info_buffer) / len(model.ep_info_buffer), 3)
        )
        curve["greedy"].append(round(play(environment, act, EVALUATION_EPISODES), 3))
        return True

    model.learn(steps, EveryNTimesteps(period, ConvertCallback(measure)) if period else None)
    seconds = time.process_time()
    numbers = {
        "return": play(environment, act),
        "cpu_seconds": seconds,
        "steps": steps,
        "version": package.__version__,
    }
    return {**numbers, "curve": curve} if period else numbers


def cleanrl(row: str, seed: int) -> dict[str, Any]:
    """Runs the script of CleanRL as it is, then plays greedily with the networks that it leaves behind.

    The scripts of 0.4.8, the last release, are for gym before 0.22 (episodes end with one flag).
    """
    import cleanrl as package
    import torch

    script, environment, steps, network = CLEANRL[row]
    assert package.__file__ is not None
    file = pathlib.Path(package.__file__).parent / f"{script}.py"
    arguments = ["--gym-id", environment, "--total-timesteps", str(steps), "--cuda", "False"]
    torch.set_num_threads(1)
    sys.argv = [str(file), *arguments, "--seed", str(seed)]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # It writes to runs/.
        left: Any = runpy.run_path(str(file), run_name="__main__")
    seconds = time.process_time()
    name, _, part = network.partition(".")
    net = getattr(left[name], part) if part else left[name]
    extra = (torch.device("cpu"),) if script == "dqn" else ()

    def act(observation: Any) -> int:
        with torch.no_grad():
            return int(net(torch.as_tensor(observation, dtype=torch.float32)[None], *extra).argmax())

    version = importlib.metadata.version("cleanrl")
    mean = play(environment, act)
    return {"return": mean, "cpu_seconds": seconds, "steps": steps, "version": version}


def tianshou(row: str, seed: int) -> dict[str, Any]:
    """Trains as the files `test/discrete/test_*.py` of Tianshou 2 do, for 50,000 steps and to their end."""
    import gymnasium
    import numpy as np
    import tianshou as package
    import torch
    from tianshou import algorithm as algorithms
    from tianshou.algorithm.modelfree.c51 import C51Policy
    from tianshou.algorithm.modelfree.iqn import IQNPolicy
    from tianshou.algorithm.modelfree.qrdqn import QRDQNPolicy
    from tianshou.algorithm.optim import AdamOptimizerFactory
    from tianshou.data import Collector, PrioritizedVectorReplayBuffer, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv
    from tianshou.trainer import OffPolicyTrainerParams
    from tianshou.utils.net.common import Net
    from tianshou.utils.net.discrete import ImplicitQuantileNetwork, NoisyLinear
    from tianshou.utils.torch_utils import policy_within_training_step

    kind, envs, changes = TIANSHOU[row]
    settings = {"lr": 1e-3, "gamma": 0.9, "prioritized": False, **changes}
    steps, batch_size, space = 50_000, 64, gymnasium.make("CartPole-v1").action_space
    torch.set_num_threads(1)
    np.random.seed(seed)
    torch.manual_seed(seed)
    training = DummyVectorEnv([lambda: gymnasium.make("CartPole-v1") for _ in range(envs)])
    training.seed(seed)
    given: dict[str, Any] = {"action_space": space, "eps_training": 0.1, "eps_inference": 0.0}
    sizes, extra = [128] * 4, {}
    if kind == "IQN":
        body = Net(state_shape=4, action_shape=64, hidden_sizes=[64, 64])
        policy = IQNPolicy(model=ImplicitQuantileNetwork(preprocess_net=body, action_shape=2), **given)
    elif kind == "QRDQN":
        net = Net(state_shape=4, action_shape=2, hidden_sizes=sizes, num_atoms=200)
        policy = QRDQNPolicy(model=net, **given)
        extra = {"num_quantiles": 200}
    else:
        noisy = {"linear_layer": lambda x, y: NoisyLinear(x, y, 0.1)}
        duel = {"dueling_param": (noisy, noisy)} if kind == "RainbowDQN" else {}
        net = Net(state_shape=4, action_shape=2, hidden_sizes=sizes, softmax=True, num_atoms=51, **duel)
        policy = C51Policy(model=net, num_atoms=51, v_min=-10.0, v_max=10.0, **given)
    algorithm = getattr(algorithms, kind)(
        policy=policy,
        optim=AdamOptimizerFactory(lr=settings["lr"]),
        gamma=settings["gamma"],
        n_step_return_horizon=3,
        target_update_freq=320,
        **extra,
    )
    if settings["prioritized"]:
        buffer = PrioritizedVectorReplayBuffer(20_000, buffer_num=envs, alpha=0.6, beta=0.4, weight_norm=True)
    else:
        buffer = VectorReplayBuffer(20_000, buffer_num=envs)
    collector = Collector(algorithm, training, buffer, exploration_noise=True)
    with policy_within_training_step(policy):
        collector.reset()
        collector.collect(n_step=batch_size * envs)

    def before_epoch(epoch: int, env_step: int) -> None:
        late = min(max(env_step - 10_000, 0) / 40_000, 1.0)
        policy.set_eps_training(0.1 * (1 - 0.9 * late))
        if settings["prioritized"]:
            buffer.set_beta(0.4 + 0.6 * late)

    algorithm.run_training(
        OffPolicyTrainerParams(
            training_collector=collector,
            max_epochs=1,
            epoch_num_steps=steps - batch_size * envs,
            collection_step_num_env_steps=envs,
            batch_size=batch_size,
            update_step_num_gradient_steps_per_sample=1 / envs,
            training_fn=before_epoch,
            show_progress=False,
        )
    )
    seconds = time.process_time()
    algorithm.eval()
    mean = play("CartPole-v1", policy.compute_action)
    return {"return": mean, "cpu_seconds": seconds, "steps": steps, "version": package.__version__}


# What --peers calls them: what the table calls them, the rows they have, how one is run.
PEERS = {
    "sb3": ("SB3", STABLE_BASELINES3, stable_baselines3),
    "cleanrl": ("CleanRL", CLEANRL, cleanrl),
    "tianshou": ("Tianshou", TIANSHOU, tianshou),
}


def versions(*packages: str) -> dict[str, str]:
    """Those of Python and of the packages that this interpreter has."""
    found = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("peer", choices=list(PEERS))
    parser.add_argument("row")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    _, rows, train = PEERS[options.peer]
    date = str(datetime.date.today())
    if options.row not in rows:
        parser.error(f"{options.peer} has no row {options.row!r}; it has {list(rows)}")
    with open(os.devnull, "w", encoding="utf-8") as nothing, contextlib.redirect_stdout(nothing):
        numbers = train(options.row, options.seed)
    numbers["cpu_seconds"] = round(numbers["cpu_seconds"], 1)
    evaluated = {"evaluation_seeds": [EVALUATION_SEED, EVALUATION_SEED + EPISODES - 1]}
    made = {"date": date, "versions": versions("torch", "gymnasium", "mujoco")}
    print(json.dumps({"seed": options.seed, **numbers, **evaluated, **made}))


if __name__ == "__main__":
    main()
