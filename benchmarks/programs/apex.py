"""How Ape-X scales with its actors, how fast one of its workers is, and what R2D2 makes of a core.

    python -m benchmarks.programs.apex scaling [--actors 1 2 4 8 16] [--step-time 0.005] [--seconds 10]
    python -m benchmarks.programs.apex grid [--fragments 50 100] [--envs 1 4 16] [--environment atari:Pong]
    PYTHON -m benchmarks.programs.apex rllib-grid     # the same, with ray[rllib] and ale-py
    python -m benchmarks.programs.apex r2d2 [--actors 1 2]

``scaling`` runs whole programs on ``processes``. The rate limiter is out of the way: actors and
learner run as fast as they can, as in the paper. A row counts the env steps, learner steps and CPU seconds of
all processes in a window of ``--seconds``, which opens ``--warm-up`` seconds after the learner has begun and
every actor has written its first row. In ``scaling`` a step of the environment sleeps for ``--step-time``
seconds, so that there are more actors than cores. *Of linear* is the rate divided by the number of actors
and by that of an actor in the first row; it means something while *cores used* is below the number of cores.

``grid`` is figure 7a of RLgraph's paper (Schaarschmidt et al., 2019): one worker, which acts, steps its envs
and prepares its samples, by length of fragment and number of envs. Ours also computes priorities and writes
to an embedded replay. A figure is env steps per second, and in parentheses per CPU-second, which a busy
machine changes less. ``rllib-grid`` calls ``SingleAgentEnvRunner.sample``, in this process too.

``r2d2`` is rlpyt's setting of R2D1 on Pong (Stooke and Abbeel, 2019): an LSTM of 512 units, sequences of 80
steps behind a burn-in of 40, and a replay ratio of 1, which the rate limiter holds: each env step is learned
from once on average. First the actors alone, then with the learner, both per core in use; then the CPU time
of an env step, by group of nodes.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.common import tree_cpu_seconds

if TYPE_CHECKING:
    from framework.core import Agent

PONG = "atari:Pong"
_START_S = 300.0  # Limit of the wait for all actors.
# Neither side waits for the other one.
FREE: dict[str, Any] = {"insert_burst": 1_000_000, "samples_per_insert": 8.0}


class Rates(NamedTuple):
    """What a program does per second: steps, and CPU seconds of all its processes and of each group."""

    env_steps: float
    learner_steps: float
    cores: float
    groups: dict[str, float]


def program_rates(
    environment: str,
    actors: int,
    options: argparse.Namespace,
    agent: Agent,
    run: dict[str, Any],
    learning: bool = True,
) -> Rates:
    """The rates of one program. Without ``learning``, the learner never has what it needs to begin."""
    import launch
    from framework.programs import RunConfig, make_program

    settings = RunConfig(num_actors=actors, evaluate_period=None, learner_log_period=10**9, **run)
    program = make_program(agent, environment, settings)
    expected = {f"actor-{index}" for index in range(actors)}
    with launch.start(program, "processes") as job:
        counter, monitor = job.client("counter"), job.client("monitor")
        deadline = time.monotonic() + _START_S
        learns = not learning or counter.wait_for("learner_steps", 1, timeout=_START_S)
        while not (learns and expected <= {*monitor.snapshot()["labels"]}):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"not all of {actors} actors and the learner began within {_START_S:.0f} s"
                )
            counter.wait_for("env_steps", 10**15, timeout=0.2)  # A count that is not reached.
        counter.wait_for("env_steps", 10**15, timeout=options.warm_up)
        marks, usages = [], []
        for _ in range(2):
            if learning:  # At the end of a learner step, which may be seconds of env steps.
                made_steps = counter.get_counts()["learner_steps"]
                counter.wait_for("learner_steps", made_steps + 1, timeout=_START_S)
            counts, nodes = counter.get_counts(), job.nodes()
            steps = [counts.get(name, 0) for name in ("env_steps", "learner_steps")]
            marks.append((*steps, tree_cpu_seconds(), time.perf_counter()))
            groups = dict.fromkeys((node["group"] for node in nodes), 0.0)
            for node in nodes:
                groups[node["group"]] += node["cpu_seconds"]
            usages.append(groups)
            if len(marks) == 1:
                counter.wait_for("env_steps", 10**15, timeout=options.seconds)
        job.stop()
    *made, seconds = [end - begin for begin, end in zip(*marks, strict=True)]
    env_steps, learner_steps, cpu = [each / seconds for each in made]
    used = {group: (usages[1][group] - before) / seconds for group, before in usages[0].items()}
    return Rates(env_steps, learner_steps, cpu, used)


def scaling(
    environment: str, options: argparse.Namespace, settings: dict[str, Any], run: dict[str, Any]
) -> None:
    from framework.programs import make_agent

    agent = make_agent("apex", **FREE, **settings)
    print(f"{os.cpu_count()} cores, load before: {os.getloadavg()[0]:.1f}\n")
    print("| actors | env steps/s | of linear | learner steps/s | cores used |\n|---|---|---|---|---|")
    one: float | None = None
    for actors in options.actors:
        env_steps, learner_steps, cpu, _ = program_rates(environment, actors, options, agent, run)
        one = env_steps / actors if one is None else one
        share = env_steps / actors / one
        print(f"| {actors} | {env_steps:,.0f} | {share:.2f} | {learner_steps:,.0f} | {cpu:.2f} |", flush=True)


def r2d2(options: argparse.Namespace, settings: dict[str, Any], run: dict[str, Any]) -> None:
    from framework.programs import make_agent

    print(f"{os.cpu_count()} cores, load before: {os.getloadavg()[0]:.1f}\n")
    print(
        "| actors | learns | env steps/s | cores used | env steps/s per core | learned steps per env step |"
    )
    print("|---" * 6 + "|")
    spent: dict[tuple[int, bool], Rates] = {}
    for actors in options.actors:
        for learning in (False, True):
            needs = {} if learning else {"min_replay_size": settings["max_replay_size"]}
            agent = make_agent("r2d2", **settings, **needs)
            rates = program_rates(PONG, actors, options, agent, run, learning)
            spent[actors, learning] = rates
            per_core = rates.env_steps / rates.cores
            learned = rates.learner_steps * settings["batch_size"] * settings["unroll_length"]
            print(
                f"| {actors} | {'yes' if learning else 'no'} | {rates.env_steps:,.0f} | {rates.cores:.2f} | "
                f"{per_core:,.0f} | {learned / rates.env_steps:.2f} |",
                flush=True,
            )
    print("\n| actors | learns | CPU µs per env step, by group |\n|---|---|---|")
    for (actors, learning), rates in spent.items():
        parts = sorted(rates.groups.items(), key=lambda part: -part[1])
        text = ", ".join(f"{group} {1e6 * cpu / rates.env_steps:,.0f}" for group, cpu in parts if cpu)
        print(f"| {actors} | {'yes' if learning else 'no'} | {text} |")


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
    import atexit
    import functools

    import torch

    from agents.apex import ApeX, ApeXConfig, PriorityWorker
    from framework.programs import RunConfig
    from framework.programs.make import environment_spec, make_environment
    from framework.replay import EmbeddedClient
    from framework.runs.services import Counter, Monitor
    from framework.variables import VariableBlock
    from framework.workers.worker import Setup

    torch.set_num_threads(1)

    def make(envs: int) -> Callable[[int], int]:
        # Services are plain objects here: no rows, which are sent by calls.
        config = RunConfig(envs_per_actor=envs, stepping="inline", log_period=10**9)
        agent = ApeX(ApeXConfig(**FREE, max_replay_size=20_000)).for_program(envs)
        spec = environment_spec(agent, environment, config)
        setup = Setup(agent, functools.partial(make_environment, agent, environment, config), spec, config)
        parameters = agent.make_learner(agent.make_networks(spec), spec).parameters()
        block = VariableBlock(parameters)
        block.publish(1, parameters)
        replay = EmbeddedClient(agent.make_tables(spec))
        worker = PriorityWorker(setup, replay=replay, learner=block, counter=Counter(), monitor=Monitor())
        # An adder's thread that is in torch when the interpreter ends would abort the process.
        atexit.register(worker.collector.close_adder, 0.0)
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
    parser.add_argument("what", choices=["scaling", "grid", "rllib-grid", "r2d2"])
    parser.add_argument("--actors", type=int, nargs="+", help="1 2 4 8 16; r2d2: 1 and the number of cores")
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
    elif options.what == "r2d2":
        options.actors = options.actors or sorted({1, os.cpu_count() or 1})
        sequences = {"burn_in": 40, "unroll_length": 80, "period": 40, "samples_per_insert": 0.5}
        agent = {
            **sequences,
            "lstm_size": 512,
            "head_sizes": (512,),
            "batch_size": 32,
            "max_replay_size": 5_000,
        }
        run = {"log_period": 50, "publish_period": 1, "envs_per_actor": 8, "stepping": "inline"}
        r2d2(options, agent, run)
    else:
        make = our_worker if options.what == "grid" else rllib_runner
        grid(options, make(options.environment))


if __name__ == "__main__":
    main()
