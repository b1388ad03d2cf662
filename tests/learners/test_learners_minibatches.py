"""The learner of epochs: which rows it sees, in which order, and how it goes on from a checkpoint."""

import collections

import numpy as np
import pytest
import torch
from torch import nn

from framework.learners import LossOutput, MinibatchLearner, Prepared

Info = collections.namedtuple("Info", "key")
Sample = collections.namedtuple("Sample", "info data")
ROWS = 23


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 1)


def batch(seed=0):
    x = np.random.default_rng(seed).normal(size=(ROWS, 2)).astype(np.float32)
    return Sample(
        Info(np.arange(ROWS, dtype=np.uint64)), {"x": torch.from_numpy(x), "index": torch.arange(ROWS)}
    )


def make_learner(seen=None, **changes):
    torch.manual_seed(0)

    def prepare(networks, sample, context):
        return Prepared(sample.data, ROWS, {"before": context.env_steps.float()})

    def loss(networks, data, context):
        if seen is not None:
            seen.append(data["index"].tolist())
        value = (networks.body(data["x"]) ** 2).mean()
        return LossOutput(value, {"value": value, "wanted": torch.tensor(float(context.wants_metrics))})

    settings = {"epochs": 3, "minibatch_size": 5, **changes}
    return MinibatchLearner(
        Net(), prepare, loss, lambda parameters: torch.optim.Adam(parameters, lr=0.01), **settings
    )


@pytest.mark.parametrize(
    ("size", "sizes"),
    [(5, [4, 4, 5, 5, 5]), (8, [7, 8, 8]), (100, [23]), (1, [1] * 23), (9, [7, 8, 8])],
)
def test_every_row_once_per_epoch_in_equal_parts(size, sizes):
    seen = []
    make_learner(seen, minibatch_size=size).step(batch())
    assert len(seen) == 3 * len(sizes)
    orders = []
    for epoch in range(3):
        parts = seen[epoch * len(sizes) : (epoch + 1) * len(sizes)]
        assert sorted(map(len, parts)) == sizes
        orders.append([index for part in parts for index in part])
        assert sorted(orders[-1]) == list(range(ROWS))
    assert orders[0] != orders[1] != orders[2]


def test_the_rate_follows_env_steps_and_a_step_is_a_batch():
    learner = make_learner(learning_rate_schedule=lambda steps: 1.0 / (1.0 + steps))
    rates, before = [], []
    for batches in range(3):
        learner.env_steps = batches * ROWS
        metrics = learner.step(batch()).metrics
        rates.append(float(metrics["learning_rate"]))
        before.append(float(metrics["before"]))
    assert before == [0, ROWS, 2 * ROWS]
    assert rates == pytest.approx([0.01 / (1 + steps) for steps in before])
    assert learner.steps == 3


def test_finish_has_the_last_word():
    def finish(networks, sample, prepared, context):
        assert not torch.is_grad_enabled()
        networks.body.bias.fill_(7.0)
        return {"after": torch.tensor(float(prepared.rows))}

    learner = make_learner(finish_fn=finish)
    assert learner.step(batch()).metrics["after"] == ROWS
    assert learner.parameters()["body"]["bias"] == 7.0


def test_metrics_are_means_over_the_last_epoch():
    assert make_learner().step(batch()).metrics["wanted"] == 1
    learner = make_learner(epochs=1)
    start = Net()
    start.load_state_dict(learner.networks.state_dict())
    learner.optimizer.param_groups[0]["lr"] = 0.0
    value = float(learner.step(batch()).metrics["value"])
    with torch.no_grad():
        each = start.body(torch.as_tensor(batch().data["x"])) ** 2
    # Parts of 4 and 5 rows count alike.
    assert value == pytest.approx(float(each.mean()), rel=0.1)


@pytest.mark.parametrize(("field", "value"), [("epochs", 0), ("minibatch_size", 0)])
def test_says_what_is_wrong(field, value):
    with pytest.raises(ValueError, match=f"{field}: got {value}"):
        make_learner(**{field: value})
