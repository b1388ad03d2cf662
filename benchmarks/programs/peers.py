"""Whole training programs of peers, for ``throughput.py``, each run by an interpreter that has the peer.

    PYTHON -m benchmarks.programs.peers ROW --seconds 15

prints one line of JSON: steps, seconds and CPU seconds (of all processes) of a window that begins when the
program has been started up. ROW is one of those below; settings are those of ``throughput.py``'s own rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import Window
from benchmarks.programs import control

ENVIRONMENT = "CartPole-v1"
NUM_ENVS, UNROLL, EPOCHS, MINIBATCH, HIDDEN = 8, 500, 6, 128, 32
PONG_UNROLL, PONG_BATCH_UNROLLS = 40, 8
PONG_PPO_ENVS, PONG_PPO_UNROLL, PONG_PPO_EPOCHS, PONG_PPO_MINIBATCH = 16, 128, 4, 256
RUNNERS, BATCH_UNROLLS, IMPALA_UNROLL, IMPALA_HIDDEN = 2, 10, 50, 64


def hand_written_ppo(window: Window) -> None:
    """PPO as one loop: gymnasium, torch, nothing between them; the ceiling of what a framework can reach."""
    import gymnasium
    import numpy as np
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    environments = [gymnasium.make(ENVIRONMENT) for _ in range(NUM_ENVS)]
    now = np.stack([each.reset(seed=i)[0] for i, each in enumerate(environments)])
    body, policy, value = torch.nn.Linear(4, HIDDEN), torch.nn.Linear(HIDDEN, 2), torch.nn.Linear(HIDDEN, 1)
    parameters = [p for layer in (body, policy, value) for p in layer.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3, eps=1e-5, fused=True)
    observations = np.zeros((UNROLL + 1, NUM_ENVS, 4), np.float32)
    actions = np.zeros((UNROLL, NUM_ENVS), np.int64)
    rewards, going_on, cut = (np.zeros((UNROLL, NUM_ENVS), np.float32) for _ in range(3))
    logits_of = np.zeros((UNROLL, NUM_ENVS, 2), np.float32)
    after_cut = np.zeros((UNROLL, NUM_ENVS, 4), np.float32)
    steps = 0
    while window.at(steps):
        for t in range(UNROLL):
            observations[t] = now
            with torch.inference_mode():
                logits = policy(torch.tanh(body(torch.from_numpy(now))))
                noise = torch.empty_like(logits).exponential_()
                action = (logits.softmax(-1) / noise).argmax(-1).numpy()
            logits_of[t], actions[t] = logits.numpy(), action
            now = np.empty_like(now)
            for env, environment in enumerate(environments):
                seen, rewards[t, env], over, cut_off, _ = environment.step(action[env])
                going_on[t, env], cut[t, env] = not (over or cut_off), cut_off and not over
                if over or cut_off:
                    after_cut[t, env] = seen
                    seen, _ = environment.reset()
                now[env] = seen
        observations[UNROLL] = now
        with torch.no_grad():
            every = torch.from_numpy(observations)
            values = value(torch.tanh(body(every))).squeeze(-1).numpy()
            ends = value(torch.tanh(body(torch.from_numpy(after_cut)))).squeeze(-1).numpy()
        advantages, last = np.zeros_like(rewards), np.zeros(NUM_ENVS, np.float32)
        for t in reversed(range(UNROLL)):
            ahead = going_on[t] * values[t + 1] + cut[t] * ends[t]
            error = rewards[t] + 0.99 * ahead - values[t]
            advantages[t] = last = error + 0.99 * 0.95 * going_on[t] * last
        data = [
            torch.from_numpy(array.reshape(UNROLL * NUM_ENVS, *array.shape[2:]).copy())
            for array in (observations[:-1], actions, advantages, advantages + values[:-1], logits_of)
        ]
        data[2] = (data[2] - data[2].mean()) / (data[2].std() + 1e-8)
        data[4] = data[4].log_softmax(-1).gather(1, data[1][:, None]).squeeze(1)
        for _ in range(EPOCHS):
            order = torch.randperm(UNROLL * NUM_ENVS)
            for part in zip(*(leaf[order].split(MINIBATCH) for leaf in data), strict=True):
                observation, taken, advantage, target, old = part
                features = torch.tanh(body(observation))
                log_probs = functional.log_softmax(policy(features), -1).gather(1, taken[:, None]).squeeze(1)
                ratio = (log_probs - old).exp()
                gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                error = value(features).squeeze(-1) - target
                loss = 0.25 * (error**2).mean() - gain.mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
        steps += UNROLL * NUM_ENVS


def stable_baselines3_ppo(window: Window) -> None:
    """Stable-Baselines3 with one shared hidden layer, envs stepped in turn (its DummyVecEnv)."""
    import stable_baselines3 as sb3
    import torch
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    class Hidden(BaseFeaturesExtractor):
        def __init__(self, space: Any) -> None:
            super().__init__(space, HIDDEN)
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, HIDDEN), torch.nn.Tanh())

        def forward(self, observation: Any) -> Any:
            return self.layers(observation)

    model = sb3.PPO(
        "MlpPolicy",
        make_vec_env(ENVIRONMENT, NUM_ENVS),
        n_steps=UNROLL,
        batch_size=MINIBATCH,
        n_epochs=EPOCHS,
        learning_rate=1e-3,
        device="cpu",
        policy_kwargs={"features_extractor_class": Hidden, "net_arch": []},
    )
    _stable_baselines3(model, window)


def stable_baselines3_pong(window: Window, processes: bool = False) -> None:
    """Stable-Baselines3 on Pong: its own Atari wrappers, the Zoo's settings, envs in turn or a process each.

    Lives and rewards are as in ours, and so are sticky actions, which are ALE's own.
    """
    import stable_baselines3 as sb3
    import torch
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack

    def make() -> Any:
        import ale_py
        import gymnasium

        gymnasium.register_envs(ale_py)
        return gymnasium.make(
            "ALE/Pong-v5", frameskip=1, repeat_action_probability=0.25, disable_env_checker=True
        )

    torch.set_num_threads(2)
    environments = make_atari_env(
        make,
        PONG_PPO_ENVS,
        wrapper_kwargs={"terminal_on_life_loss": False, "clip_reward": False},
        vec_env_cls=SubprocVecEnv if processes else DummyVecEnv,
        vec_env_kwargs={"start_method": "fork"} if processes else {},  # starts sooner
    )
    model = sb3.PPO(
        "CnnPolicy",
        VecFrameStack(environments, 4),
        n_steps=PONG_PPO_UNROLL,
        batch_size=PONG_PPO_MINIBATCH,
        n_epochs=PONG_PPO_EPOCHS,
        learning_rate=2.5e-4,
        clip_range=0.1,
        ent_coef=0.01,
        device="cpu",
    )
    _stable_baselines3(model, window)
    environments.close()


def _stable_baselines3(model: Any, window: Window) -> None:
    from stable_baselines3.common.callbacks import BaseCallback

    class Stop(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            if not window.at(self.num_timesteps):
                raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        model.learn(10**9, callback=Stop())


def _rllib(config: Any, window: Window) -> None:
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    algorithm = config.build_algo()
    try:
        steps = 0
        while window.at(steps):
            result = algorithm.train()
            # Absent until the first samples are in.
            steps = int(result.get("env_runners", {}).get("num_env_steps_sampled_lifetime", steps))
    finally:
        algorithm.stop()
        ray.shutdown()


def _model(hidden: int, layers: int) -> Any:
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    return DefaultModelConfig(fcnet_hiddens=[hidden] * layers, fcnet_activation="tanh", vf_share_layers=True)


def rllib_ppo(window: Window, runners: int = 1) -> None:
    """RLlib's PPO with the same batch; 1 runner with all envs, or 2 that share them."""
    from ray.rllib.algorithms.ppo import PPOConfig

    config = (
        PPOConfig()
        .environment(ENVIRONMENT)
        .env_runners(num_env_runners=runners, num_envs_per_env_runner=NUM_ENVS // runners)
        .training(
            train_batch_size_per_learner=UNROLL * NUM_ENVS,
            minibatch_size=MINIBATCH,
            num_epochs=EPOCHS,
            lr=1e-3,
        )
        .rl_module(model_config=_model(HIDDEN, 1))
        .learners(num_learners=0)
    )
    _rllib(config, window)


def rllib_impala(window: Window, unrolls: int = BATCH_UNROLLS) -> None:
    """RLlib's IMPALA, two runners, batches of `unrolls` unrolls."""
    from ray.rllib.algorithms.impala import IMPALAConfig

    config = (
        IMPALAConfig()
        .environment(ENVIRONMENT)
        .env_runners(
            num_env_runners=RUNNERS, num_envs_per_env_runner=NUM_ENVS, rollout_fragment_length=IMPALA_UNROLL
        )
        .training(train_batch_size_per_learner=unrolls * IMPALA_UNROLL, lr=1e-3)
        .rl_module(model_config=_model(IMPALA_HIDDEN, 2))
        .learners(num_learners=0)
        .reporting(min_time_s_per_iteration=1)
    )
    _rllib(config, window)


def rllib_pong(window: Window) -> None:
    """RLlib's IMPALA on Pong in its own Atari wrappers, two runners and the network of DQN."""
    import ale_py
    import gymnasium
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.env.wrappers.atari_wrappers import wrap_atari_for_new_api_stack
    from ray.tune.registry import register_env

    def make(_: Any) -> Any:
        gymnasium.register_envs(ale_py)
        game = gymnasium.make("ale_py:ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
        return wrap_atari_for_new_api_stack(game, dim=84, framestack=4)

    register_env("pong", make)
    model = DefaultModelConfig(
        conv_filters=[[32, 8, 4], [64, 4, 2], [64, 3, 1]],
        conv_activation="relu",
        head_fcnet_hiddens=[512],
        head_fcnet_activation="relu",
        vf_share_layers=True,
    )
    config = (
        IMPALAConfig()
        .environment("pong")
        .env_runners(
            num_env_runners=RUNNERS, num_envs_per_env_runner=NUM_ENVS, rollout_fragment_length=PONG_UNROLL
        )
        .training(train_batch_size_per_learner=PONG_BATCH_UNROLLS * PONG_UNROLL, lr=4.8e-4)
        .rl_module(model_config=model)
        .learners(num_learners=0)
        .reporting(min_time_s_per_iteration=1)
    )
    _rllib(config, window)


def _sample_factory(arguments: list[str], window: Window) -> None:
    from sample_factory.algo.runners.runner import AlgoObserver
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.train import make_runner

    class Watch(AlgoObserver):
        def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:
            if not window.at(sum(runner.env_steps.values())):
                runner._should_end_training = lambda: True  # its own way out: the loop asks after each report

    with tempfile.TemporaryDirectory() as folder:
        arguments = [*arguments, "--device=cpu", f"--train_dir={folder}", "--experiment=throughput"]
        arguments += ["--summaries_use_frameskip=False", "--save_every_sec=100000"]
        arguments += ["--train_for_seconds=100000", "--train_for_env_steps=1000000000000"]
        parser, partial = parse_sf_args(argv=arguments)
        if "atari" in partial.env:
            from sf_examples.atari.atari_params import atari_override_defaults

            atari_override_defaults(partial.env, parser)
            parser.set_defaults(summaries_use_frameskip=False)
        _, runner = make_runner(parse_full_cfg(parser, arguments))
        runner.register_observer(Watch())
        runner.init()
        runner.run()


_ASYNCHRONOUS = [
    "--algo=APPO",
    f"--num_workers={RUNNERS}",
    f"--num_envs_per_worker={NUM_ENVS}",
    "--num_epochs=1",
    "--num_batches_per_epoch=1",
    "--with_vtrace=False",
    "--normalize_input=False",
    "--worker_num_splits=2",
]


def make_cartpole(name: str, cfg: Any = None, env_config: Any = None, render_mode: Any = None) -> Any:
    """For Sample Factory, whose workers import this module: so not inside a function."""
    import gymnasium

    return gymnasium.make(name, render_mode=render_mode)


def make_pong(name: str, cfg: Any = None, env_config: Any = None, render_mode: Any = None) -> Any:
    """Its own wrappers around ALE's Pong, which its gymnasium does not find by itself."""
    import gymnasium
    from sf_examples.atari.atari_utils import make_atari_env

    if "PongNoFrameskip-v4" not in gymnasium.registry:
        gymnasium.register(
            "PongNoFrameskip-v4",
            entry_point="ale_py.env:AtariEnv",
            kwargs={"game": "pong", "repeat_action_probability": 0.0, "frameskip": 1},
            max_episode_steps=108_000,
        )
    return make_atari_env(name, cfg, env_config, render_mode)


def sample_factory_cartpole(window: Window) -> None:
    """Sample Factory's asynchronous PPO, two rollout workers."""
    from sample_factory.envs.env_utils import register_env

    register_env(ENVIRONMENT, make_cartpole)
    arguments = [*_ASYNCHRONOUS, f"--env={ENVIRONMENT}", "--use_rnn=False", "--nonlinearity=tanh"]
    arguments += [f"--rollout={IMPALA_UNROLL}", f"--batch_size={BATCH_UNROLLS * IMPALA_UNROLL}"]
    arguments += ["--encoder_mlp_layers", str(IMPALA_HIDDEN), str(IMPALA_HIDDEN)]
    _sample_factory(arguments, window)


def sample_factory_pong(window: Window, lstm: bool = False) -> None:
    """The same on Pong with the network of DQN (1.7 million parameters)."""
    from sample_factory.envs.env_utils import register_env

    register_env("atari_pong", make_pong)
    arguments = [*_ASYNCHRONOUS, "--env=atari_pong", "--rollout=40", "--batch_size=640"]
    arguments += ["--encoder_conv_architecture=convnet_atari", "--encoder_conv_mlp_layers", "512"]
    arguments += [f"--use_rnn={lstm}"]
    if lstm:
        arguments += ["--rnn_type=lstm", "--rnn_size=256", "--recurrence=40"]
    _sample_factory(arguments, window)


ROWS: dict[str, Callable[[Window], None]] = {
    "hand-written-ppo": hand_written_ppo,
    "stable-baselines3-ppo": stable_baselines3_ppo,
    "stable-baselines3-pong": stable_baselines3_pong,
    "stable-baselines3-pong-processes": lambda window: stable_baselines3_pong(window, processes=True),
    "rllib-ppo": rllib_ppo,
    "rllib-ppo-2-runners": lambda window: rllib_ppo(window, 2),
    "rllib-impala": rllib_impala,
    "rllib-impala-16": lambda window: rllib_impala(window, 16),
    "rllib-pong": rllib_pong,
    "stable-baselines3-sac": lambda window: control.stable_baselines3(window, "SAC"),
    "stable-baselines3-td3": lambda window: control.stable_baselines3(window, "TD3"),
    "cleanrl-sac": lambda window: control.cleanrl(window, sac=True),
    "cleanrl-td3": lambda window: control.cleanrl(window, sac=False),
    "sample-factory-cartpole": sample_factory_cartpole,
    "sample-factory-pong": sample_factory_pong,
    "sample-factory-pong-lstm": lambda window: sample_factory_pong(window, lstm=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("row", choices=sorted(ROWS))
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds after the first steps")
    options = parser.parse_args()
    # What the peers print goes to stderr: the last line of stdout is the result.
    result_to = os.dup(1)
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    window = Window(options.seconds, options.warm_up)
    started = time.perf_counter()
    ROWS[options.row](window)
    print(f"{options.row}: {time.perf_counter() - started:.0f} s in all", file=sys.stderr)
    with os.fdopen(result_to, "w") as stdout:
        stdout.write(json.dumps(window.result()) + "\n")


if __name__ == "__main__":
    main()
