"""Programs whose actors follow the learner in step end in good order, with exactly the steps asked for."""

import functools

import pytest

import launch
from agents.ppo import PPO, PPOConfig
from framework.environments.testing import FakeEnvironment
from framework.programs import make_program

CONFIG = {"unroll_length": 8, "epochs": 1, "hidden_sizes": (8,)}


def program(overlap, steps, **changes):
    settings = {"evaluate_every": 200, "num_evaluation_episodes": 2, **changes}
    return make_program(
        PPO(PPOConfig(overlap=overlap, **CONFIG)),
        functools.partial(FakeEnvironment, episode_length=7),
        num_actors=2,
        lanes_per_actor=3,
        max_actor_steps=steps,
        **settings,
    )


# 127 steps end in the third unroll; others leave one actor with some steps when the other has none left.
CASES = [(overlap, steps) for overlap in (False, True) for steps in (127, 500, 611)]


@pytest.mark.parametrize(("overlap", "steps"), CASES)
@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_the_end_of_the_budget_leaves_nobody_waiting(engine, overlap, steps):
    result = launch.launch(program(overlap, steps), engine=engine)
    assert (result["reason"], result["actor_steps"]) == ("max_actor_steps", steps)


def test_ends_in_processes():
    assert launch.launch(program(False, 400), engine="processes")["actor_steps"] == 400


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_a_stop_ends_the_wait_for_a_version(engine):
    # The learner stops after its third step, when the actors wait for the next version or soon will.
    result = launch.launch(program(False, None, max_learner_steps=3, evaluate_every=None), engine=engine)
    assert result["learner_steps"] == 3


def test_a_resumed_run_goes_on_in_step(tmp_path):
    launch.launch(program(False, 300, directory=tmp_path), engine="serial")
    result = launch.launch(program(False, 600, directory=tmp_path), engine="serial")
    assert result["actor_steps"] == 600
    assert (
        result["learner_steps"] > 9
    )  # 600 steps are at least 12 batches of 48, the last of each life left out
