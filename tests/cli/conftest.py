"""Run folders for the tests of the command line, without training."""

import contextlib
import dataclasses
import resource

import pytest
import warm_python

from framework.checkpoints import torch_part
from framework.commands import building, cli
from framework.loggers import JSONLLogger
from framework.programs import RunConfig, make_agent
from framework.runs.run_folder import RunFolder


@pytest.fixture
def repertory(capsys):
    """Runs a command; returns ``(exit code, what it printed, what it complained about)``."""

    def run(*arguments):
        capsys.readouterr()
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as error:  # tyro's way out of a wrong command line, and of --help
            code = error.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def start(request):
    """Starts a command in a process of its own."""

    def popen(*arguments, **options):
        process = warm_python.Popen(["-m", "framework.commands", *arguments], text=True, **options)
        request.addfinalizer(process.kill)
        return process

    return popen


@pytest.fixture
def small_files():
    """A context in which no file can grow beyond a number of bytes."""

    @contextlib.contextmanager
    def limited(size):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    return limited


@pytest.fixture
def make_run(tmp_path):
    """Makes the folder of a run, with returns of evaluations and a checkpoint for each of ``steps``."""

    def make(name="run", steps=(), returns=(), agent="random_actions", **settings):
        environment = settings.pop("environment", "gymnasium:CartPole-v1")
        config = RunConfig(**{"max_env_steps": 1000, "directory": str(tmp_path / name), **settings})
        config = config.decided({})
        made = make_agent(agent)
        spec = building.environment_spec(made, environment, config)
        folder = RunFolder.describe(made, environment, config, spec)
        folder.save()
        parts = {}
        if steps and agent != "random_actions":
            learner = made.make_learner(made.make_networks(spec), spec)
            parts["learner"] = torch_part({"learner": learner.save(), "steps": 0})
        for step in steps:
            parts["counter"] = torch_part({"counts": {"env_steps": step}})
            folder.checkpointer.save(step, parts)
        if returns:
            with JSONLLogger(folder.metrics) as log:
                for number, value in enumerate(returns, 1):
                    log.write({"label": "evaluator", "env_steps": 100 * number, "episode_return": value})
        return dataclasses.replace(folder)

    return make
