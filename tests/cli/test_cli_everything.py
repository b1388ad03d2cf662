"""Every option, wrapper, observer and logger is reachable from the command line, and does what it says.

A new one fails here until it is driven.
"""

import contextlib
import dataclasses
import functools
import io
import os
import pathlib
import re
import shlex
from collections.abc import Collection
from unittest import mock

import pytest
import torch

from framework import environments, specs
from framework.commands import building, cli, train
from framework.commands.options import TrainOptions
from framework.environments.stepping import InlineEnvironment
from framework.loggers import read_jsonl
from framework.programs import RunConfig, load_policy, make
from framework.runs import parts
from framework.runs.run_folder import RunFolder

DQN = "dqn --batch-size 16 --min-replay-size 40 --hidden-sizes 8 --samples-per-insert 8 --insert-burst 32"
OURS = "framework.environments"
# By name: the agent and the flags of a run, or of a program that is only built.
RUNS = {
    "learns": f"""
        {DQN} --engine serial --environment gymnasium:CartPole-v1 --seed 7
        --num-actors 2 --envs-per-actor 2 --max-env-steps 240
        --environment-options sutton_barto_reward=true --evaluation-options sutton-barto-reward=false
        --wrappers 'StepLimit(limit=9)' {OURS}:SinglePrecision --allow {OURS}
        --observers ActionObserver ObservationObserver --loggers csv jsonl tensorboard terminal
        --evaluate-period 80 --num-evaluation-episodes 3 --max-evaluation-steps 7 --evaluation-envs 2
        --reset-options low=0.04 high=0.05
        --publish-period 4 --update-period 1000
        --log-period 50 --learner-log-period 10
        --checkpoint-period 60 --checkpoint-minutes None --keep-checkpoints 2""",
    "served": """
        random_actions --engine threads --restarts 1 --num-actors 1 --envs-per-actor 4 --max-env-steps 120
        --inference server --inference-device cpu --inference-max-batch 4
        --inference-timeout 0.5 --stepping inline
        --environment gymnasium:FrozenLake-v1 --info-metrics prob
        --evaluate-period 60 --num-evaluation-episodes 2""",
    "target": f"""
        {DQN} --engine serial --num-actors 1 --target-return 1 --preset gymnasium:LunarLander-v3
        --evaluate-period 60 --num-evaluation-episodes 2""",
    "steps": f"""
        {DQN} --engine serial --num-actors 1 --max-learner-steps 5 --publish-period 1 --learner-threads 2
        --evaluate-period None --target-return None --checkpoint-minutes 1e-9""",
    "data": """bc --environment gymnasium:MountainCar-v0 --dataset 'agents.dqfd:mountain_car(count=2)'
        --max-learner-steps 3 --evaluate-period None --engine serial""",
    "built": f"""
        {DQN} --num-actors 2 --min-actors 1 --min-actors-timeout 77 --num-learners 2 --replay-shards 2
        --variable-sources 1
        --inference server --inference-nodes 2
        --resources learner.num_gpus=1 actor.env.A-B=3""",
    "reverb": f"{DQN} --replay-backend reverb",
}


@dataclasses.dataclass
class Run:
    """What is left of a run: its folder, what it printed, and the numbers of torch threads that it set."""

    path: pathlib.Path
    flags: list[str]
    out: str = ""
    threads: Collection[int] = ()

    def rows(self, label):
        return [row for row in read_jsonl(self.path / "metrics.jsonl") if row["label"].startswith(label)]

    @functools.cached_property
    def program(self):
        entry, options, config, agent_config = train.parse_new(self.flags[0], self.flags[1:])
        agent = entry.make(agent_config)
        return building.build_program(agent, options.environment, config, options.engine)

    @property
    def folder(self):
        return RunFolder.open(self.path)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Makes the runs, each when a test first asks for it."""

    @functools.cache
    def make_run(name):
        path, flags = tmp_path_factory.mktemp("runs") / name, shlex.split(RUNS[name])
        file = path.parent / f"{name}.yaml"
        file.write_text("discount: 0.5\n" if flags[0] == "dqn" else "{}\n")
        if name == "learns":
            file.write_text(f"discount: 0.5\nwrappers: ['{OURS}:SinglePrecision']\n")
        if name == "steps":
            flags += ["--init", f"{make_run('learns').path}:best"]
        flags += ["--directory", str(path), "--config", str(file)]
        run = Run(path, flags)
        if name not in ("built", "reverb"):
            threads = mock.patch.object(torch, "set_num_threads", wraps=torch.set_num_threads)
            with contextlib.redirect_stdout(io.StringIO()) as out, threads as set_threads:
                assert cli.main(["train", *flags]) == 0
            run.out, run.threads = out.getvalue(), {call.args[0] for call in set_threads.call_args_list}
        return run

    return make_run


def checkpoints(run):
    """Numbers and steps of the checkpoints that are left."""
    return [tuple(map(int, path.name.split("-")[1::2])) for path in run.folder.checkpointer.checkpoints()]


def stepped(run):
    """The innermost environment of an actor."""
    folder = run.folder
    environment = make.make_environment(folder.make_agent(), folder.environment, folder.config, 2, 0)
    while isinstance(environment, environments.EnvironmentWrapper):
        environment = environment.wrapped
    return environment


def first_observation(run):
    folder = run.folder
    with make.make_environment(folder.make_agent((OURS,)), folder.environment, folder.config, 2, 0) as of:
        return of.reset().observation


def groups(run):
    return {label: len(nodes) for label, nodes in run.program.groups.items()}


def returns(run, label):
    return [row["episode_return"] for row in run.rows(label)]


def result(run):
    return (run.path / "result.json").read_text()


def begins_with_the_best(run):
    """Whether its five learner steps have moved the parameters only a little."""
    best = dict(load_policy(*run.folder.config.init.split(":"), allow=(OURS,)).networks.named_parameters())
    own = dict(load_policy(run.path).networks.named_parameters())
    return all(torch.allclose(best[name], own[name], atol=0.02) for name in best)


# By option: the run that has it, and what it has to have done there.
OPTIONS = {
    "config": ("learns", lambda run: run.folder.make_agent((OURS,)).config.discount == 0.5),
    "environment": ("learns", lambda run: run.folder.environment == "gymnasium:CartPole-v1"),
    "preset": ("target", lambda run: run.folder.make_agent().config.epsilon_decay == 50_000),
    "engine": ("served", lambda run: run.folder.engine == "threads"),
    # Without it, the file would be refused.
    "allow": ("learns", lambda run: f"{OURS}:SinglePrecision" in run.folder.config.wrappers),
    "restarts": ("served", lambda run: run.folder.restarts == 1),
    "dataset": ("data", lambda run: run.rows("learner")[-1]["steps"] == 3 and not run.rows("actor")),
    "directory": ("learns", lambda run: (run.path / "config.yaml").exists()),
    "seed": ("learns", lambda run: run.folder.config.seed == 7),
    "init": ("steps", begins_with_the_best),
    "num_actors": ("learns", lambda run: bool(run.rows("actor-0") and run.rows("actor-1"))),
    "min_actors": ("built", lambda run: run.program.min_nodes["actor"] == 1),
    "min_actors_timeout": ("built", lambda run: run.program.min_nodes_timeout == 77),
    "envs_per_actor": ("learns", lambda run: run.folder.config.num_envs == 4),
    "num_learners": ("built", lambda run: groups(run)["learner"] == 2),
    "replay_shards": ("built", lambda run: groups(run)["replay"] == 2),
    "variable_sources": ("built", lambda run: groups(run)["variable_source"] == 1),
    "stepping": ("served", lambda run: isinstance(stepped(run), InlineEnvironment)),
    # This option of CartPole gives 0 a step and -1 when the pole falls, instead of 1 a step.
    "environment_options": ("learns", lambda run: max(returns(run, "actor")) <= 0),
    "evaluation_options": ("learns", lambda run: min(returns(run, "eval")) > 5),
    # CartPole's bounds of the state in which an episode begins.
    "reset_options": ("learns", lambda run: first_observation(run).min() >= 0.04),
    # On slippery ice, the probability of each move is a third.
    "info_metrics": ("served", lambda run: {round(row["prob"], 3) for row in run.rows("eval")} == {0.333}),
    "wrappers": ("learns", lambda run: max(row["episode_length"] for row in run.rows("actor")) <= 9),
    "observers": ("learns", lambda run: all("action_mean" in row for row in run.rows("eval"))),
    "loggers": ("learns", lambda run: (run.path / "metrics.csv").exists()),
    "resources": (
        "built",
        lambda run: run.program.resources == {"learner": {"num_gpus": 1}, "actor": {"env": {"A_B": 3}}},
    ),
    "learner_threads": ("steps", lambda run: 2 in run.threads),
    "inference": ("served", lambda run: bool(run.rows("inference"))),
    "inference_nodes": ("built", lambda run: groups(run)["inference"] == 2),
    "inference_device": ("served", lambda run: run.folder.config.inference_device == "cpu"),
    "inference_max_batch": ("served", lambda run: run.rows("inference")[-1]["rows_per_batch"] == 4),
    "inference_timeout": ("served", lambda run: run.folder.config.inference_timeout == 0.5),
    "max_env_steps": ("learns", lambda run: '"env_steps": 240' in result(run)),
    "max_learner_steps": ("steps", lambda run: "max_learner_steps" in result(run)),
    "target_return": ("target", lambda run: "target_return" in result(run)),
    "evaluate_period": ("learns", lambda run: len(run.rows("evaluator")) == 3),
    "evaluation_envs": ("learns", lambda run: run.folder.config.num_evaluation_envs == 2),
    "num_evaluation_episodes": ("learns", lambda run: run.rows("evaluator")[0]["episodes"] == 3),
    "max_evaluation_steps": (
        "learns",
        lambda run: all(row["episode_length"] == 7 and row["cut_episodes"] == 3 for row in run.rows("eval")),
    ),
    "publish_period": ("learns", lambda run: all(row["version"] % 4 == 0 for row in run.rows("learner"))),
    "update_period": ("learns", lambda run: all(row["variables_version"] == 0 for row in run.rows("actor"))),
    "log_period": ("learns", lambda run: len(run.rows("actor-0")) >= 2),
    "learner_log_period": ("learns", lambda run: run.rows("learner")[0]["steps"] == 10),
    "checkpoint_period": ("learns", lambda run: checkpoints(run)[-1][0] >= 3),
    "checkpoint_minutes": ("steps", lambda run: checkpoints(run)[-1][0] >= 2),
    "keep_checkpoints": ("learns", lambda run: len(checkpoints(run)) == 2),
    "replay_backend": ("reverb", lambda run: parts.missing("reverb") or groups(run)["replay"] == 1),
}


@pytest.mark.parametrize(
    "option", [field.name for kind in (TrainOptions, RunConfig) for field in dataclasses.fields(kind)]
)
def test_every_option(run_of, option):
    assert option in OPTIONS, "a new option: drive it in a run, and say what it does there"
    name, does_what_it_says = OPTIONS[option]
    flag = "--" + option.replace("_", "-")
    assert flag in run_of(name).flags
    assert does_what_it_says(run_of(name))


def in_range(environment, low, high):
    spec = environment.action_spec()
    return (spec.minimum == low).all() and (spec.maximum == high).all()


PENDULUM, CARTPOLE = "gymnasium:Pendulum-v1", "gymnasium:CartPole-v1"
# By wrapper: its arguments, an environment, and what the wrapper makes of it.
WRAPPERS = {
    "ActionRepeat": ("(num_repeats=2)", CARTPOLE, lambda of, steps: steps[1].reward[0] == 2.0),
    "ClipAction": ("", PENDULUM, lambda of, steps: in_range(of, -2, 2)),
    "CombineActions": (
        "",
        CARTPOLE,
        lambda of, steps: of.action_spec().num_values == 2 and steps[1].reward[0] == 1.0,
    ),
    "Flatten": ("", "gymnasium:Blackjack-v1", lambda of, steps: steps[0].observation.shape == (2, 45)),
    "FrameStack": ("(num_frames=3)", CARTPOLE, lambda of, steps: steps[0].observation.shape == (2, 3, 4)),
    "ObservationActionReward": ("()", CARTPOLE, lambda of, steps: "reward" in steps[1].observation),
    "OneHotPlanes": ("", "minigrid:DoorKey-5x5", lambda of, steps: steps[1].observation["image"].max() == 1),
    "RescaleAction": ("(clip=True)", PENDULUM, lambda of, steps: in_range(of, -1, 1)),
    "ScaleObservation": ("(scale=10)", CARTPOLE, lambda of, steps: of.observation_spec().maximum[0] > 40),
    "SeededEpisodes": ("(first=5)", CARTPOLE, lambda of, steps: of.first == 5 and of.is_seeded),
    "SinglePrecision": ("", PENDULUM, lambda of, steps: of.observation_spec().dtype == "float32"),
    "StepLimit": ("(limit=1)", CARTPOLE, lambda of, steps: steps[1].last().all()),
}


@pytest.mark.parametrize("name", parts.WRAPPERS)
def test_every_wrapper(name):
    arguments, environment_name, holds = WRAPPERS[name]
    if environment_name.startswith("minigrid"):
        pytest.importorskip("minigrid")
    flags = ["--environment", environment_name, "--wrappers", name + arguments]
    entry, options, config, agent_config = train.parse_new("random_actions", flags)
    agent = entry.make(agent_config)
    with make.make_environment(agent, options.environment, config, 2, 0) as environment:
        assert type(environment) is getattr(environments, name)
        action = specs.zeros(environment.action_spec(), (2,))
        assert holds(environment, [environment.reset(), environment.step(action)])


@pytest.mark.parametrize("name", parts.OBSERVERS)
def test_every_observer(run_of, name):
    prefix = name.removesuffix("Observer").lower()
    for label in ("actor", "evaluator"):
        assert all(f"{prefix}_max" in row for row in run_of("learns").rows(label))


LOGGERS = {
    "csv": lambda run: "episode_return" in (run.path / "metrics.csv").read_text().partition("\n")[0],
    "jsonl": lambda run: bool(run.rows("learner")),
    "tensorboard": lambda run: any((run.path / "tensorboard").iterdir()),
    "terminal": lambda run: "label = evaluator | env_steps = " in run.out,
}


@pytest.mark.parametrize("name", sorted(set(parts.LOGGERS) - {"wandb"}))  # See test_loggers_wandb.py.
def test_every_logger(run_of, name):
    assert LOGGERS[name](run_of("learns"))


@pytest.mark.parametrize(
    "flags, error",
    [
        (["--wrappers", "StepLimt"], "wrappers: got 'StepLimt', expected one of .* Did you mean 'StepLimit'"),
        (["--wrappers", "StepLimit(3)"], "it has values without a name"),
        (["--wrappers", "StepLimit(limit=n)"], "with literal values"),
        (["--wrappers", "StepLimit(limit=0)"], "limit: got 0, expected a whole number of at least 1"),
        (["--wrappers", "nowhere:Wrapper"], "cannot be imported: No module named 'nowhere'"),
        (["--observers", "Observer"], "observers: got 'Observer', expected one of ActionObserver"),
        (["--loggers", "cvs"], "Did you mean 'csv'"),
        (["--environment-options", "length=[3"], r"got 'length=\[3', expected a value"),
        (["--environment-options", "length=3", "length=4"], "got 'length=4' after another value"),
        (["--resources", "learner.threads=1", "learner=2"], "got 'learner=2' after another value"),
        (["--environment-options", "lenght=3"], "unexpected keyword argument 'lenght'"),
        (["--resources", "lerner.threads=2"], "no field 'lerner'.*Did you mean 'learner'"),
    ],
)
def test_wrong_names(repertory, tmp_path, flags, error):
    code, _, err = repertory("train", "random_actions", *flags, "--directory", tmp_path / "run")
    assert code == 2 and re.search(error, err), err
    assert not (tmp_path / "run").exists()


def test_loggers_need_a_directory():
    with pytest.raises(ValueError, match="without a directory"):
        parts.check_parts(RunConfig(loggers=("csv",)))


def test_idle_threads_of_a_command_do_not_take_the_cores_of_others():
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
