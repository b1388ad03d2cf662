"""The ensemble of models and its learner: units, shares of the data, early stopping, and exact resumption."""

import io

import numpy as np
import torch
from torch.func import functional_call, vmap

from framework.learners.dynamics import DynamicsLearner
from framework.networks import DynamicsEnsemble
from framework.replay import ReplaySample

SETTINGS = {"batch_size": 16, "epochs": 30, "persistence": 0.9, "validation_fraction": 0.25}


def make_learner(**changes):
    torch.manual_seed(0)
    settings = {**SETTINGS, "device": torch.device("cpu"), **changes}
    return DynamicsLearner(DynamicsEnsemble(2, 1, (16,), 3), 1e-2, **settings)


def make_data(seed, count=100):
    """Observations far from 0 that move by a linear map, with ends where the first is large."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 3, generator=random) * torch.tensor([10.0, 0.1, 1.0]) + 50.0
    change = inputs @ torch.tensor([[0.1, 0.0], [1.0, 0.2], [0.5, 0.3]])
    others = torch.stack([inputs[:, 0] / 100.0, (inputs[:, 0] < 60.0).float()], -1)
    return ReplaySample((), [inputs, torch.cat([change, others], -1)])


def test_the_models_learn_predict_in_the_data_s_units_and_are_evaluated_one_by_one():
    learner = make_learner(epochs=100)
    models = learner.networks
    assert not models.is_fitted
    metrics = learner.step(make_data(0, 400)).metrics
    assert models.is_fitted and metrics["validation_error"] < 0.1
    inputs, targets = make_data(1).data
    observations, actions = inputs.expand(3, -1, -1).split([2, 1], -1)
    after, reward, discount = models.predict(observations, actions)
    spread = targets[:, :2].std(0)
    assert (((after - observations - targets[:, :2]) / spread) ** 2).mean() < 0.05
    assert ((reward - targets[:, 2]) / targets[:, 2].std()).pow(2).mean() < 0.05
    assert (discount == targets[:, 3]).float().mean() > 0.9 and {*discount.unique().tolist()} == {0.0, 1.0}
    assert (models.starts.unsqueeze(1) == make_data(0, 400).data[0][:, :2]).all(-1).any(1).all()

    class One(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.models = models

        def forward(self, *inputs):
            return self.models.predict(*inputs)

    single = vmap(lambda parameters, *inputs: functional_call(One(), parameters, inputs))
    parameters = {f"models.{name}": each for name, each in models.named_parameters()}
    for one, all_at_once in zip(
        single(parameters, observations, actions), (after, reward, discount), strict=True
    ):
        torch.testing.assert_close(one, all_at_once)


def test_ends_of_episodes_are_predicted_however_rare_they_are():
    models, ends = DynamicsEnsemble(2, 1, (16,), 3), torch.ones(1000, 1)
    ends[7] = 0.0
    data = [torch.randn(1000, 3), torch.cat([torch.randn(1000, 3), ends], -1)]
    models.observe(data, torch.Generator())
    targets, (mean, std) = models.scaled(data)[1], models.moments[:, -1]
    torch.testing.assert_close(targets[:, -1:] * std + mean, ends)


def test_each_model_leaves_out_transitions_of_its_own_for_good():
    learner = make_learner(epochs=1)
    for seed in range(2):
        learner.step(make_data(seed))
    assert learner._held.shape == (3, 50) and learner._fitted.shape == (3, 150)
    for fitted, held in zip(learner._fitted, learner._held, strict=True):
        assert sorted([*fitted.tolist(), *held.tolist()]) == list(range(200))
        assert (held < 100).sum() == 25
    assert len({tuple(sorted(held.tolist())) for held in learner._held}) == 3


def test_a_model_keeps_the_parameters_after_which_its_error_rose(monkeypatch):
    """Model 0 stops after the first pass, model 1 after the second, model 2 at the limit."""
    learner, seen = make_learner(epochs=4), []
    errors = iter([[1, 1, 1], [9, 0.1, 1], [0, 9, 0.5], [0, 0, 0.4], [0, 0, 0.3]])

    def validate(data):
        seen.append([each.detach().clone() for each in learner.networks.parameters()])
        return torch.tensor(next(errors), dtype=torch.float32)

    monkeypatch.setattr(learner, "_errors", validate)
    metrics = learner.step(make_data(0)).metrics
    assert metrics["epochs"] == 4 and metrics["transitions"] == 100
    np.testing.assert_allclose(metrics["validation_error"], (9 + 9 + 0.3) / 3, rtol=1e-6)
    for index, parameter in enumerate(learner.networks.parameters()):
        for model, after in enumerate((1, 2, 4)):
            assert torch.equal(parameter[model], seen[after][index][model])


def test_a_restored_learner_goes_on_bit_by_bit():
    straight, file = make_learner(epochs=2), io.BytesIO()
    straight.step(make_data(0))
    torch.save(straight.save(), file)
    file.seek(0)
    resumed = make_learner(epochs=2)
    resumed.step(make_data(9))
    resumed.restore(torch.load(file, weights_only=True))
    for learner in (straight, resumed):
        learner.step(make_data(3))
    states = (each.networks.state_dict().values() for each in (straight, resumed))
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))
