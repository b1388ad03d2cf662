"""Env steps per second of whole training programs, ours and peers', beside each other.

    python benchmarks/throughput.py [GROUP …] [--seconds 15]
        [--peers sb3=PYTHON rllib=PYTHON sample-factory=PYTHON]

A row is one program in a process of its own, evaluation off and torch on one thread, unless its label says
otherwise: acting, replay and learning together. What counts are the steps and CPU seconds (of all its
processes) of a window that opens ``--warm-up`` seconds after the first steps, so that start-up is not in it.
Groups are

    ppo          CartPole-v1: batches of 4,000 steps, 6 epochs of minibatches of 128, one hidden layer of 32
                 shared by policy and value, 8 envs stepped one after the other
    dqn          CartPole-v1: the defaults, one env
    impala       CartPole-v1: unrolls of 50, batches of 10, two hidden layers of 64, 2 actors x 8 envs
    flow         the plans of PPO and of IMPALA: as ppo, and as impala with batches of 16, 2 workers
    pong         ALE Pong, 84 x 84 x 4: unrolls of 40, batches of 8, the network of DQN (1.7M parameters),
                 2 actors x 8 envs, x 16 and x 32
    pong-lstm    the same with an LSTM of 256
    ppo-pong     ALE Pong, the same pictures and network (shared by policy and value): 16 envs x 128 steps,
                 4 epochs of minibatches of 256, as the Zoo of Stable-Baselines3 has it but for the 16 envs
    control      SAC and TD3 on HalfCheetah-v5: one env, a learner step of 128 items per env step, two hidden
                 layers of 256; so steps are env steps and learner steps

``ppo`` has a loop written by hand with the same settings beside it: what a framework costs. Peers are run by
the interpreters given, since their dependencies do not go together with each other's; rows whose peer is not
given are left out, and said to be. Figures of one run can be compared with each other; across runs the
machine's load changes them.

PPO acts and learns in turns, so its windows go from the end of one learner step to that of another. A turn of
``ppo-pong`` takes seconds: give it ``--seconds 40`` or more. Rows with `step_mode` compile at the first
learner step: give them ``--warm-up 90``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # This file runs by its path.

from benchmarks.common import Window  # noqa: E402

CARTPOLE, PONG = "gymnasium:CartPole-v1", "atari:Pong"


@dataclass(frozen=True)
class Ours:
    """One of our programs: agent, fields of its config, arguments of ``make_program``, engine."""

    agent: str
    engine: str
    config: dict[str, Any]
    program: dict[str, Any] = field(default_factory=dict)
    environment: str = CARTPOLE


@dataclass(frozen=True)
class Peer:
    """A row of ``programs/peers.py``, and the name of the interpreter in ``--peers``."""

    row: str
    interpreter: str


def ppo(
    engine: str, actors: int = 1, envs: int = 8, stepping: str = "inline", lag: int = 0, **fields: Any
) -> Ours:
    config = {
        "unroll_length": 4000 // (actors * envs), "epochs": 6, "minibatch_size": 128, "hidden_sizes": (32,),
        "shared": True, "learning_rate": 1e-3, "max_policy_lag": lag, **fields,
    }  # fmt: skip
    return Ours("ppo", engine, config, _actors(actors, envs, stepping))


def dqn(engine: str) -> Ours:
    return Ours("dqn", engine, {"min_replay_size": 500}, _actors(1, 1, "inline"))


def impala(engine: str, actors: int = 2, envs: int = 8, stepping: str = "inline", **config: Any) -> Ours:
    # The queue holds an actor's unrolls beside a batch; see IMPALAConfig.
    settings = {
        "unroll_length": 50, "batch_size": 10, "queue_batches": 3, "hidden_sizes": (64, 64),
        "optimizer": "adam", "learning_rate": 1e-3,
    }  # fmt: skip
    run = {**_actors(actors, envs, stepping), "publish_period": 1}
    return Ours("impala", engine, {**settings, **config}, run)


def pong(engine: str = "processes", envs: int = 8, **config: Any) -> Ours:
    settings = {
        "unroll_length": 40, "batch_size": 8, "queue_batches": 1 + envs // 8, "torso": "nature",
        "previous_action_and_reward": True, "learning_rate": 4.8e-4, "reward_clip": 1.0,
        "adam_epsilon": 3e-5, "max_gradient_norm": 0.125,
    }  # fmt: skip
    run = {**_actors(2, envs, "inline"), "publish_period": 1}
    # By its class: `gpu.py` runs it where the package is not installed.
    return Ours("agents.impala:IMPALA", engine, {**settings, **config}, run, PONG)


def pong_12_actors(**config: Any) -> Ours:
    """Batches of 32 unrolls from 12 actors, for a machine with as many cores."""
    row = pong(envs=16, batch_size=32, queue_batches=2, **config)
    return dataclasses.replace(row, program={**row.program, "num_actors": 12})


def ppo_pong() -> Ours:
    # No hidden layers: policy and value are heads of the convolutions' 512 features.
    config = {
        "unroll_length": 128, "epochs": 4, "minibatch_size": 256, "hidden_sizes": (), "shared": True,
        "learning_rate": 2.5e-4, "clip": 0.1, "entropy_coefficient": 0.01,
    }  # fmt: skip
    return Ours("ppo", "serial", config, {**_actors(1, 16, "inline"), "learner_threads": 2}, PONG)


def control(agent: str, engine: str, **config: Any) -> Ours:
    settings = {"min_replay_size": 500, "batch_size": 128, "samples_per_insert": 128.0}
    return Ours(agent, engine, {**settings, **config}, _actors(1, 1, "inline"), "gymnasium:HalfCheetah-v5")


def _actors(actors: int, envs: int, stepping: str) -> dict[str, Any]:
    return {"num_actors": actors, "envs_per_actor": envs, "stepping": stepping}


BF16 = {"autocast": True, "actor_autocast": True}
GROUPS: dict[str, dict[str, Ours | Peer]] = {
    "ppo": {
        "repertory PPO, serial": ppo("serial"),
        "repertory PPO, compiled": ppo("serial", step_mode="compile"),
        "a loop written by hand": Peer("hand-written-ppo", "hand"),
        "repertory PPO, processes, 2 actors x 4 envs": ppo("processes", 2, 4),
        "the same, acting while learning": ppo("processes", 2, 4, lag=1),
        "repertory PPO, serial, 32 envs computed together": ppo("serial", 1, 32, "vector"),
        "Stable-Baselines3 PPO": Peer("stable-baselines3-ppo", "sb3"),
        "RLlib PPO, 1 runner x 8": Peer("rllib-ppo", "rllib"),
    },
    "dqn": {
        "repertory DQN, serial": dqn("serial"),
        "repertory DQN, processes": dqn("processes"),
    },
    "impala": {
        "repertory IMPALA, serial": impala("serial"),
        "repertory IMPALA, processes": impala("processes"),
        "RLlib IMPALA": Peer("rllib-impala", "rllib"),
        "Sample Factory APPO": Peer("sample-factory-cartpole", "sample-factory"),
        "repertory IMPALA, processes, envs computed together": impala("processes", 2, 8, "vector"),
    },
    "flow": {
        "repertory PPO as a plan, 2 workers x 4 envs": dataclasses.replace(
            ppo("processes", 2, 4), agent="examples.flows:PPOPlan"
        ),
        "repertory PPO, 2 actors x 4 envs": ppo("processes", 2, 4),
        "RLlib PPO, 2 runners x 4": Peer("rllib-ppo-2-runners", "rllib"),
        "repertory IMPALA as a plan": dataclasses.replace(
            impala("processes", batch_size=16), agent="examples.flows:IMPALAPlan"
        ),
        "repertory IMPALA": impala("processes", batch_size=16),
        "RLlib IMPALA": Peer("rllib-impala-16", "rllib"),
    },
    "pong": {
        "repertory IMPALA, float32": pong(),
        "repertory IMPALA, bfloat16": pong(**BF16),
        "repertory IMPALA, float32, 32 envs": pong(envs=32),
        "repertory IMPALA, bfloat16, 32 envs": pong(envs=32, **BF16),
        "RLlib IMPALA": Peer("rllib-pong", "rllib"),
        "Sample Factory APPO": Peer("sample-factory-pong", "sample-factory"),
    },
    "pong-gpu": {
        "12 actors, a learner on the CPU": pong_12_actors(),
        "12 actors, a learner on a GPU": pong_12_actors(device="cuda"),
        "the same in bfloat16": pong_12_actors(device="cuda", autocast=True),
    },
    "pong-lstm": {
        "repertory IMPALA, float32": pong(lstm_size=256),
        "repertory IMPALA, bfloat16": pong(lstm_size=256, **BF16),
        "Sample Factory APPO": Peer("sample-factory-pong-lstm", "sample-factory"),
    },
    "control": {
        "repertory SAC, serial": control("sac", "serial"),
        "repertory SAC, compiled": control("sac", "serial", step_mode="compile"),
        "repertory SAC, processes": control("sac", "processes"),
        "Stable-Baselines3 SAC": Peer("stable-baselines3-sac", "sb3"),
        "CleanRL's SAC": Peer("cleanrl-sac", "sb3"),
        "repertory TD3, serial": control("td3", "serial"),
        "repertory TD3, compiled": control("td3", "serial", step_mode="compile"),
        "repertory TD3, processes": control("td3", "processes"),
        "Stable-Baselines3 TD3": Peer("stable-baselines3-td3", "sb3"),
        "CleanRL's TD3": Peer("cleanrl-td3", "sb3"),
    },
    "ppo-pong": {
        "repertory PPO, serial, 2 torch threads": ppo_pong(),
        "Stable-Baselines3 PPO, 2 torch threads": Peer("stable-baselines3-pong", "sb3"),
        "Stable-Baselines3 PPO, 2 torch threads, a process per env": Peer(
            "stable-baselines3-pong-processes", "sb3"
        ),
    },
}


def measure_ours(row: Ours, window: Window) -> None:
    """Runs the program in this process (or from it) until the window has closed."""
    import torch

    import launch
    from framework.programs import RunConfig, make_agent, make_program

    torch.set_num_threads(1)
    agent = make_agent(row.agent, **row.config)
    program = make_program(
        agent, row.environment, RunConfig(evaluate_period=None, log_period=10**9, **row.program)
    )
    in_turns = agent.max_policy_lag is not None
    turns = 0
    with launch.start(program, row.engine) as job:
        going_on = True
        while going_on:
            if row.engine == "serial":
                with contextlib.suppress(TimeoutError):
                    job.wait(timeout=0.2)  # the program runs in here
            elif in_turns:
                job.client("counter").wait_for("learner_steps", turns + 1, timeout=0.2)
            else:
                # A count that is not reached: the wait ends with its time, or with the program.
                job.client("counter").wait_for("env_steps", 10**15, timeout=0.2)
            counts = job.client("counter").get_counts()
            if in_turns and counts.get("learner_steps", 0) == turns:
                continue  # a window that ended here would hold more acting than learning, or less
            turns = int(counts.get("learner_steps", 0))
            going_on = window.at(int(counts.get("env_steps", 0)))
        job.stop()


def measure(label: str, group: str, interpreters: dict[str, str], options: argparse.Namespace) -> Any:
    """The result of one row from a process of its own; a string that says why there is none."""
    row = GROUPS[group][label]
    window = ["--seconds", str(options.seconds), "--warm-up", str(options.warm_up)]
    if isinstance(row, Ours):
        command = [sys.executable, __file__, "--one", group, label, *window]
    elif row.interpreter in interpreters:
        python = interpreters[row.interpreter]
        command = [python, "-m", "benchmarks.programs.peers", row.row, *window]
    else:
        return f"left out: no --peers {row.interpreter}=PYTHON"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    limit = 4 * (options.seconds + options.warm_up) + 120
    done = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output, errors = done.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(done.pid, signal.SIGKILL)  # its workers too, which hold the pipes
        done.communicate()
        return f"no result within {limit:.0f} s"
    if done.returncode:
        print(errors[-2000:], file=sys.stderr)
        return f"failed with {done.returncode}"
    return json.loads(output.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "groups", nargs="*", metavar="GROUP", help=f"{', '.join(GROUPS)}; all but pong-gpu by default"
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="of the window of each row")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds from the first steps to it")
    parser.add_argument("--rows", nargs="+", help="only rows with one of these texts in their label")
    parser.add_argument("--peers", nargs="+", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--json", type=pathlib.Path, help="file to write the results to")
    parser.add_argument("--one", nargs=2, metavar=("GROUP", "ROW"), help="one of our rows in this process")
    options = parser.parse_args()
    if options.one:
        window = Window(options.seconds, options.warm_up)
        row = GROUPS[options.one[0]][options.one[1]]
        assert isinstance(row, Ours)
        measure_ours(row, window)
        print(json.dumps(window.result()))
        return
    unknown = sorted(set(options.groups) - set(GROUPS))
    if unknown:
        parser.error(f"no group {unknown}; the groups are {list(GROUPS)}")
    interpreters = {"hand": sys.executable}
    for entry in options.peers:
        name, separator, python = entry.partition("=")
        if not separator or name not in ("hand", "sb3", "rllib", "sample-factory"):
            parser.error(f"--peers {entry}: expected sb3=, rllib=, sample-factory= or hand= and a Python")
        interpreters[name] = python
    results: dict[str, dict[str, Any]] = {}
    for group in options.groups or [name for name in GROUPS if name != "pong-gpu"]:
        print(f"\n| {group} | steps/s | steps per CPU-second |\n|---|---|---|", flush=True)
        for label in GROUPS[group]:
            if options.rows and not any(text in label for text in options.rows):
                continue
            result = measure(label, group, interpreters, options)
            results.setdefault(group, {})[label] = result
            if isinstance(result, str):
                print(f"| {label} | {result} | |", flush=True)
                continue
            steps = result["steps"]
            rates = f"{steps / result['seconds']:,.0f} | {steps / result['cpu']:,.0f}"
            print(f"| {label} | {rates} |", flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
