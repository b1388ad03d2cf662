"""The learner of an ensemble of models: it keeps all data, and fits each model to its own part of it."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from framework import losses
from framework.learners.context import LossContext, LossOutput
from framework.learners.optimizers import Adam
from framework.learners.sgd import SGDLearner
from framework.networks.dynamics import DynamicsEnsemble
from framework.own_settings import in_own_settings
from framework.replay.types import ReplaySample
from framework.types import StepResult


class DynamicsLearner(SGDLearner):
    """Each step adds transitions, and fits the models to all of them so far.

    Each model leaves out a random share of its own of each step's transitions, its validation data. It is
    fitted until its validation error rises on average; see `losses.rolling_validation`.

    Args:
      networks: the models.
      learning_rate: Adam's.
      batch_size: number of transitions of each model in an optimizer step.
      epochs: largest number of passes over all transitions in a step.
      persistence: weight of the past in the average of validation errors.
      validation_fraction: share of the transitions that a model leaves out.
      device: as in `SGDLearner`.
    """

    networks: DynamicsEnsemble

    def __init__(
        self,
        networks: DynamicsEnsemble,
        learning_rate: float,
        *,
        batch_size: int,
        epochs: int,
        persistence: float,
        validation_fraction: float,
        device: torch.device,
    ):
        self._batch_size, self._epochs, self._persistence = batch_size, epochs, persistence
        self._validation_fraction = validation_fraction
        seed = int(torch.randint(2**31, (), device="cpu"))
        super().__init__(networks, _loss, lambda p: Adam(p, lr=learning_rate), device=device, seed=seed)
        self._data: list[torch.Tensor] = [torch.zeros(0, size, device=self.device) for size in networks.sizes]
        # These are the transitions that each model fits, and those that it leaves out, `[K, ...]`.
        none = torch.zeros(len(networks.weights[0]), 0, dtype=torch.int64, device=self.device)
        self._fitted, self._held = none, none

    @in_own_settings
    def step(self, batch: ReplaySample) -> StepResult:
        """Adds transitions, the models' inputs `[N, D + A]` and targets `[N, D + 2]`, and fits."""
        self._add(batch.data)
        parameters = list(self.networks.parameters())
        self.networks.observe(self._data, self._generator)
        data = self.networks.scaled(self._data)
        errors = self._errors(data)
        averages, improves = 1.5 * errors, torch.ones_like(errors) > 0
        kept = [each.detach().clone() for each in parameters]
        for epoch in itertools.count(1):
            order = self._random(*self._fitted.shape).argsort(1)
            for rows in self._fitted.gather(1, order).split(self._batch_size, 1):
                parts = [each[rows] for each in data]
                output, norm = self._minimize(batch._replace(data=parts), self._context())
            for own, each in zip(kept, parameters, strict=True):
                own[improves] = each.detach()[improves]
            # A model that has stopped keeps its error, which is above the average: that does not fall again.
            errors = torch.where(improves, self._errors(data), errors)
            averages, improves = losses.rolling_validation(averages, errors, self._persistence)
            if epoch == self._epochs or not improves.any():
                break
        with torch.no_grad():
            for own, each in zip(kept, parameters, strict=True):
                each.copy_(own)
        counts = {"epochs": epoch, "transitions": len(self._data[0])}
        metrics = {name: torch.tensor(count) for name, count in counts.items()}
        metrics["validation_error"] = errors.mean()
        return self._finish_step(output._replace(metrics=metrics), norm)

    def _add(self, data: Any) -> None:
        before, count = len(self._data[0]), len(data[0])
        self._data = [torch.cat(pair) for pair in zip(self._data, data, strict=True)]
        order = before + self._random(len(self._held), count).argsort(1)
        held = max(1, round(self._validation_fraction * count))
        self._held = torch.cat([self._held, order[:, :held]], 1)
        self._fitted = torch.cat([self._fitted, order[:, held:]], 1)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator, device=self.device)

    @torch.no_grad()
    def _errors(self, data: Any) -> torch.Tensor:
        """The validation errors `[K]`."""
        inputs, targets = (each[self._held] for each in data)
        return losses.ensemble_errors(self.networks(inputs), targets)

    def save(self) -> dict[str, Any]:
        own = [each.cpu() for each in (*self._data, self._fitted, self._held)]
        return {**super().save(), "data": own}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        *self._data, self._fitted, self._held = (each.to(self.device) for each in state["data"])


def _loss(models: DynamicsEnsemble, batch: ReplaySample, context: LossContext) -> LossOutput:
    """The sum over the models, each of which has parameters of its own."""
    inputs, targets = batch.data
    return LossOutput(losses.ensemble_errors(models(inputs), targets).sum(), {})
