"""Run folders for the tests of the command line, without training."""

import contextlib
import dataclasses
import resource

import pytest
import warm_python
from helpers import fresh_runs

from framework.commands import cli
from framework.programs import make_agent


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
        settings = {"max_env_steps": 1000, **settings}
        made = fresh_runs.make(tmp_path / name, make_agent(agent), None, steps, returns, **settings)
        return dataclasses.replace(made)

    return make
