"""Policies of runs, from Python: what an observation must look like."""

import numpy as np
import pytest

from framework.programs import load_policy


@pytest.mark.parametrize("name, environment", [("dqn", "CartPole-v1"), ("ppo", "FrozenLake-v1")])
def test_an_observation_without_envs_is_refused(make_run, name, environment):
    folder = make_run(steps=[10], agent=name, environment=f"gymnasium:{environment}")
    policy = load_policy(folder.path)
    spec = policy.spec.observations
    one = np.zeros(spec.shape, spec.dtype)
    assert len(policy(one[None])) == 1 and len(policy(np.stack([one, one, one]))) == 3
    assert len(policy([one.tolist()])) == 1
    shape = ", 4" if spec.shape else ","
    wrong = [
        (one, rf"expected \(1{shape}\), .* Add a batch dimension .* \[observation\]"),
        (one.tolist(), "Add a batch"),
        (one[None, None], rf"expected \(1{shape}\), one row for each env\.$"),  # No advice on B.
        (np.zeros((2, 7)), rf"got shape \(2, 7\), expected \(2{shape}\), one row for each env\.$"),
        (np.full((2, *one.shape), np.nan), "got nan, expected finite" if spec.shape else "got dtype float64"),
        (np.zeros((2, *spec.shape), complex), "got dtype complex128, expected"),
    ]
    for value, text in wrong:
        with pytest.raises(ValueError, match=text):
            policy(value)
