"""Actors that choose actions with a policy, and the environment loop that drives them."""

from framework.actors.acting import EnvironmentLoop, PolicyActor
from framework.actors.observers import ActionObserver, EnvironmentLoopObserver, ObservationObserver

__all__ = [
    "ActionObserver",
    "EnvironmentLoop",
    "EnvironmentLoopObserver",
    "ObservationObserver",
    "PolicyActor",
]
