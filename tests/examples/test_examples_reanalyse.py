"""The reanalysing node sets today's priorities, and its draws do not count."""

import pathlib
import runpy

import numpy as np
import pytest
import torch

from agents.dqn import DQNConfig
from framework import environments, specs
from framework.programs import Callback
from framework.replay import EmbeddedClient
from framework.runs.services import Monitor
from framework.variables import VariableBlock

REANALYSE = runpy.run_path(str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "reanalyse.py"))


class Learner(VariableBlock):
    """What the node uses of a learner."""

    def wait_for_version(self, version, timeout):
        return self.version >= version


def test_it_sets_the_errors_of_the_newest_parameters():
    config = DQNConfig(prioritized=True, priority_exponent=1.0, min_replay_size=16, batch_size=16, n_step=1)
    agent = REANALYSE["ReanalysedDQN"](config)
    environment = environments.make("gymnasium:CartPole-v1", num_envs=4, seed=0)
    spec = specs.make_environment_spec(environment)
    client = EmbeddedClient(agent.make_tables(spec), concurrent=False)
    (table,) = client.tables.values()
    table.set_seed(0)
    adder = agent.make_adder(client, spec)
    adder.add_first(environment.reset())
    for _ in range(30):
        adder.add(np.ones(4, np.int64), environment.step(np.ones(4, np.int64)))
    torch.manual_seed(1)
    networks = agent.make_networks(spec)
    parameters = {"q_network": networks.q_network.state_dict()}
    learner = Learner(parameters)
    node = REANALYSE["Reanalyser"](agent, spec, replay=client, learner=learner, monitor=Monitor())
    assert not node.ready()  # No version yet.
    learner.publish(1, parameters, 0)
    assert node.ready()
    samples = table.info.rate_limiter_info.sample_stats.completed
    for version in range(2, 21):  # Until every item was drawn.
        learner.publish(version, parameters, 0)
        node.step()
    assert not node.ready() and table.info.rate_limiter_info.sample_stats.completed == samples
    sample = client.sample_batch("replay", 64)
    data = sample.data
    with torch.no_grad():
        following = networks.values(torch.as_tensor(data.next_observation)).amax(1)
        target = torch.as_tensor(data.reward) + 0.99 * torch.as_tensor(data.discount) * following
        taken = networks.values(torch.as_tensor(data.observation))[range(64), data.action]
    np.testing.assert_allclose(sample.info.priority, (target - taken).abs() + 1e-6, rtol=1e-4, atol=1e-5)
    assert len(set(sample.info.priority)) > 10


class Rows(Callback):
    def __init__(self):
        self.rows = {}

    def on_row(self, label, row, snapshot):
        self.rows.setdefault(label, []).append(row)


@pytest.mark.timeout(300)
def test_its_draws_do_not_count_for_the_ratio():
    rows = Rows()
    REANALYSE["main"](1_600, "serial", callbacks=[rows])
    last = rows.rows["learner"][-1]
    assert last["replay/sampled"] == last["steps"] * 128 > 100 * 128
    first = rows.rows["reanalyser"][0]
    assert first["steps"] == 10 and first["items"] == 256 and first["change"] > 0
