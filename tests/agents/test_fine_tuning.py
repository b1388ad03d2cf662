"""Agents that learned from data go on with actors and that data: whole runs of IQL and Cal-QL."""

import pytest
import torch

import launch
from agents.cql import CQL, CQLConfig
from agents.iql import IQL, IQLConfig
from framework.datasets import table_numbers
from framework.programs import RunConfig, make_program
from framework.runs.run_folder import RunFolder

PENDULUM, DATA = "gymnasium:Pendulum-v1", "agents.rlpd:pendulum(count=2)"
SIZES = {"hidden_sizes": (8,), "batch_size": 8, "min_replay_size": 8, "samples_per_insert": 2.0}
AGENTS = {
    "iql": (IQL, IQLConfig(**SIZES)),
    "cal_ql": (CQL, CQLConfig(**SIZES, calibrated=True, num_samples=2)),
}


@pytest.mark.parametrize("engine", ["serial", pytest.param("processes", marks=pytest.mark.release)])
@pytest.mark.parametrize("name", AGENTS)
def test_a_run_goes_on_from_one_that_learned_from_data(name, engine, tmp_path, monkeypatch):
    kind, config = AGENTS[name]
    folder = tmp_path / "offline"
    first = RunConfig(dataset=DATA, max_learner_steps=9, directory=folder, evaluate_period=None)
    launch.launch(make_program(kind(config), PENDULUM, first), engine="serial")
    seen, original = [], kind.loss

    def loss(self, networks, batch, context):
        parameters = {key: value.clone() for key, value in networks.state_dict().items()}
        seen.append((parameters, int((table_numbers(batch.info.key) == 0).sum()), batch.data.extras))
        return original(self, networks, batch, context)

    monkeypatch.setattr(kind, "loss", loss)
    second = RunConfig(
        num_actors=1,
        envs_per_actor=2,
        max_env_steps=800,
        evaluate_period=None,
        init=str(folder),
    )
    agent = kind(type(config)(**vars(config) | {"demonstrations": DATA, "demonstration_fraction": 0.25}))
    result = launch.launch(make_program(agent, PENDULUM, second), engine=engine)
    # Two of a batch of eight are data, and each of the 800 items is drawn twice.
    assert result["env_steps"] == 800 and result["learner_steps"] == pytest.approx(800 * 2 / 6, rel=0.3)
    if engine == "serial":  # In another process, nothing is seen here.
        saved = RunFolder.open(folder).restore("latest").state("learner", "learner")["networks"]
        torch.testing.assert_close(seen[0][0], {key: torch.as_tensor(each) for key, each in saved.items()})
        assert {count for _, count, _ in seen} == {2}
        assert all(("return_to_go" in extras) == (name == "cal_ql") for *_, extras in seen)


def test_data_alone_and_a_share_of_data_are_two_things():
    agent = IQL(IQLConfig(demonstrations=DATA))
    with pytest.raises(ValueError, match=r"^dataset: got '/.*data' with .*, expected one of them"):
        make_program(agent, PENDULUM, RunConfig(dataset="data", max_learner_steps=1))
