"""How Ape-X scales with its actors, and how fast one of its workers is.

    python benchmarks/apex.py scaling [--actors 1 2 4 8 16] [--step-time 0.005] [--seconds 10]
    python benchmarks/apex.py pong [--actors 1 2]
    python benchmarks/apex.py grid [--fragments 50 100 200] [--envs 1 4 16] [--environment atari:Pong]
    PYTHON benchmarks/apex.py rllib-grid     # the same grid, by an interpreter that has ray[rllib] and ale-py

``scaling`` and ``pong`` run whole programs on ``processes``. The rate limiter is out of the way: actors and
learner run as fast as they can, as in the paper. A row counts the env steps, learner steps and CPU seconds of
all processes in a window of ``--seconds``, which opens ``--warm-up`` seconds after the learner has begun and
every actor has written its first row. In ``scaling`` a step of the environment sleeps for ``--step-time``
seconds, so that there are more actors than cores. *Of linear* is the rate divided by the number of actors
and by that of an actor in the first row; it means something while *cores used* is below the number of cores.

``grid`` is figure 7a of RLgraph's paper (Schaarschmidt et al., 2019): one worker, which acts, steps its envs
and prepares its samples, by length of fragment and number of envs. Ours also computes priorities and writes
to an embedded replay. A figure is env steps per second, and in parentheses per CPU-second, which a busy
machine changes less. ``rllib-grid`` calls ``SingleAgentEnvRunner.sample``, in this process too.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

from throughput_window import tree_cpu_seconds

PONG = "atari:Pong"
_START_S = 300.0  # Limit of the wait for all actors.
# Neither side waits for the other one.
FREE: dict[str, Any] = {"insert_burst": 1_000_000, "samples_per_insert": 8.0}


def program_rates(
    environment: str, actors: int, options: argparse.Namespace, agent: dict[str, Any], run: dict[str, Any]
) -> tuple[float, float, float]:
    """Env steps and learner steps per second, and cores used, of one program."""
    import launch
    from framework.programs import RunConfig, make_agent, make_program

    settings = RunConfig(num_actors=actors, evaluate_period=None, learner_log_period=10**9, **run)
    program = make_program(make_agent("apex", **FREE, **agent), environment, settings)
    expected = {f"actor-{index}" for index in range(actors)}
    with launch.start(program, "processes") as job:
        counter, monitor = job.client("counter"), job.client("monitor")
        deadline = time.monotonic() + _START_S
        learns = counter.wait_for("learner_steps", 1, timeout=_START_S)
        while not (learns and expected <= {*monitor.snapshot()["labels"]}):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"not all of {actors} actors and the learner began within {_START_S:.0f} s"
                )
            counter.wait_for("env_steps", 10**15, timeout=0.2)  # A count that is not reached.
        counter.wait_for("env_steps", 10**15, timeout=options.warm_up)
        marks = []
        for _ in range(2):
            counts = counter.get_counts()
            steps = [counts.get(name, 0) for name in ("env_steps", "learner_steps")]
            marks.append((*steps, tree_cpu_seconds(), time.perf_counter()))
            if len(marks) == 1:
                counter.wait_for("env_steps", 10**15, timeout=options.seconds)
        job.stop()
    *made, seconds = [end - begin for begin, end in zip(*marks, strict=True)]
    env_steps, learner_steps, cpu = [each / seconds for each in made]
    return env_steps, learner_steps, cpu


def scaling(
    environment: str, options: argparse.Namespace, agent: dict[str, Any], run: dict[str, Any]
) -> None:
    print(f"{os.cpu_count()} cores, load before: {os.getloadavg()[0]:.1f}\n")
    print("| actors | env steps/s | of linear | learner steps/s | cores used |\n|---|---|---|---|---|")
    one: float | None = None
    for actors in options.actors:
        env_steps, learner_steps, cpu = program_rates(environment, actors, options, agent, run)
        one = env_steps / actors if one is None else one
        share = env_steps / actors / one
        print(f"| {actors} | {env_steps:,.0f} | {share:.2f} | {learner_steps:,.0f} | {cpu:.2f} |", flush=True)


def grid(options: argparse.Namespace, make: Callable[[int], Callable[[int], int]]) -> None:
    """Env steps per second (and per CPU-second) of ``make(envs)``, which collects a fragment."""
    print("| fragment | " + " | ".join(f"{envs} envs" for envs in options.envs) + " |")
    print("|---" * (1 + len(options.envs)) + "|")
    for fragment in options.fragments:
        rates = []
        for envs in options.envs:
            collect = make(envs)
            collect(fragment)
            steps, started, cpu = 0, time.perf_counter(), time.process_time()
            while (elapsed := time.perf_counter() - started) < options.seconds:
                steps += collect(fragment)
            rates.append(f"{steps / elapsed:,.0f} ({steps / (time.process_time() - cpu):,.0f})")
        print(f"| {fragment} | {' | '.join(rates)} |", flush=True)


def our_worker(environment: str) -> Callable[[int], Callable[[int], int]]:
    import functools

    import torch

    from agents.flow_dqn import ApeX, ApeXConfig, PriorityWorker
    from framework.programs import RunConfig
    from framework.programs.make import environment_spec, make_environment
    from framework.programs.services import Counter, Monitor
    from framework.programs.worker import Setup
    from framework.replay import EmbeddedClient
    from framework.variables import VariableBlock

    torch.set_num_threads(1)

    def make(envs: int) -> Callable[[int], int]:
        config = RunConfig(envs_per_actor=envs, stepping="inline")
        agent = ApeX(ApeXConfig(**FREE, max_replay_size=20_000)).for_program(envs)
        spec = environment_spec(agent, environment, config)
        setup = Setup(agent, functools.partial(make_environment, agent, environment, config), spec, config)
        parameters = agent.make_learner(agent.make_networks(spec), spec).parameters()
        block = VariableBlock(parameters)
        block.publish(1, parameters)
        replay = EmbeddedClient(agent.make_tables(spec))
        worker = PriorityWorker(setup, replay=replay, learner=block, counter=Counter(), monitor=Monitor())
        return worker.collect

    return make


def rllib_runner(environment: str) -> Callable[[int], Callable[[int], int]]:
    import gymnasium
    import torch
    from ray.rllib.algorithms.dqn import DQNConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
    from ray.rllib.env.wrappers.atari_wrappers import wrap_atari_for_new_api_stack
    from ray.tune.registry import register_env

    torch.set_num_threads(1)

    def pong(_: Any) -> Any:
        import ale_py

        gymnasium.register_envs(ale_py)
        return wrap_atari_for_new_api_stack(
            gymnasium.make("ale_py:ALE/Pong-v5", frameskip=1, repeat_action_probability=0.25), framestack=4
        )

    def make(envs: int) -> Callable[[int], int]:
        name = environment.partition(":")[2]
        if environment == PONG:
            register_env("pong", pong)
            name = "pong"
        config = (
            DQNConfig()
            .environment(name)
            .env_runners(num_env_runners=0, num_envs_per_env_runner=envs)
            .training(double_q=True, dueling=False)
            .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[128, 128], head_fcnet_hiddens=[]))
        )
        if environment == PONG:  # The convolutions of DQN, as ours.
            filters = [[32, 8, 4], [64, 4, 2], [64, 3, 1]]
            model = DefaultModelConfig(conv_filters=filters, head_fcnet_hiddens=[512, 128])
            config = config.rl_module(model_config=model)
        runner = SingleAgentEnvRunner(config=config)

        def collect(fragment: int) -> int:
            episodes = runner.sample(num_timesteps=fragment * envs, random_actions=False)
            return sum(len(episode) for episode in episodes)

        return collect

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["scaling", "pong", "grid", "rllib-grid"])
    parser.add_argument("--actors", type=int, nargs="+", help="1 2 4 8 16; pong: 1 and the number of cores")
    parser.add_argument("--step-time", type=float, default=0.005, help="seconds of a step in scaling")
    parser.add_argument("--fragments", type=int, nargs="+", default=[50, 100, 200], help="steps of an env")
    parser.add_argument("--envs", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--environment", default=PONG, help="of the grids; or gymnasium:CartPole-v1")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the window of each figure")
    parser.add_argument("--warm-up", type=float, default=3.0)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.what == "scaling":
        options.actors = options.actors or [1, 2, 4, 8, 16]
        agent = {"rollout_length": 50, "hidden_sizes": (64, 64), "batch_size": 64, "min_replay_size": 200}
        run = {"log_period": 50, "environment_options": {"step_time": options.step_time}}
        scaling("testing:Sleep", options, agent, run)
    elif options.what == "pong":
        options.actors = options.actors or sorted({1, os.cpu_count() or 1})
        agent = {"rollout_length": 50, "hidden_sizes": (), "batch_size": 64, "max_replay_size": 50_000}
        scaling(PONG, options, agent, {"log_period": 50, "envs_per_actor": 4, "stepping": "inline"})
    else:
        make = our_worker if options.what == "grid" else rllib_runner
        grid(options, make(options.environment))


if __name__ == "__main__":
    main()
