"""Actors that act by a policy, and the client that keeps the policy's parameters fresh."""

from framework.actors.policy_actor import PolicyActor
from framework.actors.variable_client import VariableClient

__all__ = ["PolicyActor", "VariableClient"]
