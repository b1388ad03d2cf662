"""How much crosses between the devices of a learner whose networks are on several."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from framework import adders, environments, replay, specs
from framework.actors import EnvironmentLoop, PolicyActor
from framework.environments.testing import FakeEnvironment
from framework.learners.device_map import place
from framework.networks import as_tensors
from framework.specs import EnvironmentSpec
from framework.torch_agents import TorchAgent


def crossed_bytes(agent: TorchAgent, spec: EnvironmentSpec, num_envs: int) -> int:
    """The bytes that cross in the first learner step. It is made here, on random experience, on the CPU.

    Args:
      agent: the agent; this machine need not have the devices of its config.
      spec: the spec of one env, as the agent sees it.
      num_envs: number of envs of the program.
    """
    plain = copy.copy(agent).for_program(num_envs)
    plain.config = dataclasses.replace(agent.config, device="cpu", devices={}, step_mode="eager")
    networks = plain.make_networks(spec)
    batch = _experience(plain, plain.make_networks(spec), spec)
    crossings = place(networks, agent.config.device, agent.config.devices, moves=False)
    learner = plain.make_learner(networks, spec)
    learner.step(batch._replace(data=as_tensors(batch.data)))
    return crossings.crossed


def _experience(agent: TorchAgent, networks: Any, spec: EnvironmentSpec) -> Any:
    """A batch of a learner step, of a policy in an environment of random observations."""
    options = {"spec": spec, "episode_length": 100}
    environment = environments.make(FakeEnvironment, num_envs=agent.num_envs, seed=0, options=options)
    name = getattr(agent, "items_table", adders.QUEUE_TABLE)
    table = replay.Table.queue(name, 100 * (agent.items_per_step + agent.num_envs))
    client = replay.EmbeddedClient([table], concurrent=False)
    # Random frames are no stacks.
    adder = agent.make_adder(client, spec._replace(observations=specs.unstacked(spec.observations)))
    actor = PolicyActor(agent.make_policy(networks), adder, num_envs=agent.num_envs, seed=0)
    loop = EnvironmentLoop(environment, actor, should_update=False)
    while table.info.current_size < agent.items_per_step:
        loop.step()
    return client.sample_batch(name, agent.items_per_step)
