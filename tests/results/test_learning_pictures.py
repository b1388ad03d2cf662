"""Learning curves of the rows of results."""

import json

from framework.commands import building
from framework.programs import RunConfig, make_agent
from framework.runs.run_folder import RunFolder
from results import pictures


def test_the_curve_of_a_run_has_all_values_at_its_evaluations(tmp_path):
    agent = make_agent("random_actions")
    config = RunConfig(max_env_steps=1000, directory=str(tmp_path / "run"))
    spec = building.environment_spec(agent, "gymnasium:CartPole-v1", config)
    folder = RunFolder.describe(agent, "gymnasium:CartPole-v1", config, spec)
    folder.save()
    rows = [
        {"label": "actor-0", "env_steps": 100, "episode_return": 10.0, "time/wall_s": 36},
        {"label": "evaluator", "env_steps": 150, "episode_return": 40.0, "time/wall_s": 54},
        {"label": "actor-0", "env_steps": 300, "episode_return": 30.0, "time/wall_s": 108},
        {"label": "evaluator", "env_steps": 300, "episode_return": 50.0, "time/wall_s": 108},
    ]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert pictures.curve_of(folder.path) == {
        "env_steps": [150.0, 300.0],
        "hours": [0.015, 0.03],
        "acting": [15.0, 30.0],
        "greedy": [40.0, 50.0],
    }
    # Resumed after 200 steps, 1/100 h of work is lost.
    rows += [
        {"label": "evaluator", "env_steps": 310, "episode_return": 60.0, "time/wall_s": 36, "resumed_at": 200}
    ]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = pictures.curve_of(folder.path)
    assert (curve["env_steps"], curve["hours"]) == ([150.0, 310.0], [0.015, 0.04])
    assert curve["greedy"] == [40.0, 60.0]
