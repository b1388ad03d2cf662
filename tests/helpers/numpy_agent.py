"""An agent without torch: its networks are a nest of arrays, its policy and its learner compute in numpy."""

from __future__ import annotations

import copy

import numpy as np

from agents.random_actions import RandomActions
from framework import core
from framework.parameters import load_state, state_of
from framework.types import StepResult


class LinearPolicy(core.Policy):
    """Draws actions by scores that are linear in the observation. It acts with copies, as on a device."""

    variables = ("policy",)

    def __init__(self, networks, evaluation):
        self._networks, self._noise = networks, 0.0 if evaluation else 1.0
        self._random = np.random.default_rng(0)
        self.loaded(core.Progress())

    def loaded(self, progress):
        super().loaded(progress)
        self._placed = copy.deepcopy(self._networks["policy"])

    def initial_state(self, batch_size):
        return ()

    def step(self, observation, state):
        scores = observation @ self._placed["weight"] + self._placed["bias"]
        return np.argmax(scores + self._noise * self._random.gumbel(size=scores.shape), -1), (), state

    def seed(self, seed):
        self._random = np.random.default_rng(seed)

    def save(self):
        return dict(self._random.bit_generator.state)

    def restore(self, state):
        self._random.bit_generator.state = state


class LinearLearner(core.Learner):
    """Moves the scores of the drawn actions towards rewards."""

    def __init__(self, networks):
        self.networks, self.steps = networks, 0

    def step(self, batch):
        data, policy = batch.data, self.networks["policy"]
        observation, action, reward = (np.asarray(x) for x in (data.observation, data.action, data.reward))
        error = reward - (observation @ policy["weight"] + policy["bias"])[np.arange(len(action)), action]
        gradient = error[:, None] * np.eye(len(policy["bias"]), dtype=np.float32)[action] / len(action)
        policy["weight"] += 0.1 * observation.T @ gradient
        policy["bias"] += 0.1 * gradient.sum(0)
        self.networks["errors"]["mean"][...] = np.abs(error).mean()
        self.steps += 1
        return StepResult({"error": self.networks["errors"]["mean"].item()})

    def parameters(self):
        return self.networks

    def save(self):
        return copy.deepcopy({"networks": state_of(self.networks), "steps": self.steps})

    def restore(self, state):
        load_state(self.networks, state["networks"])
        self.steps = state["steps"]


class Linear(RandomActions):
    """Learns from replay, as the agent that acts at random, but from what its policy does."""

    def make_networks(self, spec):
        weight = np.zeros((*spec.observations.shape, spec.actions.num_values), np.float32)
        errors = {"mean": np.zeros((), np.float32)}  # It does not act.
        return {"policy": {"weight": weight, "bias": weight[0].copy()}, "errors": errors}

    def make_policy(self, networks, evaluation=False):
        return LinearPolicy(networks, evaluation)

    def make_learner(self, networks, spec):
        return LinearLearner(networks)
