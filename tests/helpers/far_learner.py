"""A learner that sends its parameters, as one on another machine does."""

from __future__ import annotations

import threading

import numpy as np
import torch
from dm_env import specs as dm_specs

import launch
from framework.environments.testing import make_spec
from framework.parameters import NamedArrays
from framework.variables import VariableBlock

SPEC = make_spec(dm_specs.Array((4,), np.float32))


def networks_of(agent, value):
    """The networks of `agent`; all parameters are `value`."""
    networks = agent.make_networks(SPEC)
    with torch.no_grad():
        for parameter in networks.parameters():
            parameter.fill_(value)
    return networks


class FarLearner:
    """A learner of a DQN whose memory no other process can map. All parameters of version v are v."""

    def __init__(self, agent):
        self._agent = agent
        self._block = VariableBlock(self._parameters(0))
        self._block.publish(0, self._parameters(0))
        self._copies = 0
        self._changed = threading.Condition()

    def _parameters(self, version):
        return NamedArrays(networks_of(self._agent, version), ("q_network",)).arrays

    def variable_block(self):
        return self._block

    def get_variables(self, names=(), newer_than=-1, timeout=0.0):
        with self._changed:
            self._changed.wait_for(lambda: self._block.version > newer_than, timeout)
            found = self._block.get_variables(names, newer_than)
            self._copies += found is not None
            return found

    def wait_for_version(self, version, timeout, actor=None):
        with self._changed:
            return self._changed.wait_for(lambda: self._block.version >= version, timeout)

    def publish(self, version):
        with self._changed:
            self._block.publish(version, self._parameters(version), 10 * version)
            self._changed.notify_all()

    def seen(self):
        """Number of copies of parameters that it sent, and the name of its host."""
        return self._copies, launch.get_node_context().host
