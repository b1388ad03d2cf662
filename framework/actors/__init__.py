"""Actors that choose actions with a policy, and the environment loop that drives them."""

from framework.actors.environment_loop import EnvironmentLoop
from framework.actors.observers import ActionObserver, EnvironmentLoopObserver, ObservationObserver
from framework.actors.policy_actor import PolicyActor

__all__ = [
    "ActionObserver",
    "EnvironmentLoop",
    "EnvironmentLoopObserver",
    "ObservationObserver",
    "PolicyActor",
]
