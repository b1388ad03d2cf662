"""Actors that choose actions with a policy, and the environment loop that drives them."""

from framework.actors.acting import PolicyActor as PolicyActor
from framework.actors.environment_loop import EnvironmentLoop as EnvironmentLoop
from framework.actors.observers import ActionObserver as ActionObserver
from framework.actors.observers import EnvironmentLoopObserver as EnvironmentLoopObserver
from framework.actors.observers import ObservationObserver as ObservationObserver
