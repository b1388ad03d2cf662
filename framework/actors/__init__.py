"""Actors that act by a policy."""

from framework.actors.policy_actor import PolicyActor

__all__ = ["PolicyActor"]
