"""Specs, learners, and batches of random or of played experience, as tests of agents need them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import tree
from dm_env import specs as dm_specs

from framework import adders, environments, replay, specs
from framework.actors import EnvironmentLoop, PolicyActor
from framework.core import Progress
from framework.environments.testing import FakeEnvironment, draw, draw_action, make_spec
from framework.networks import as_tensors
from framework.replay import ReplaySample
from framework.torch_agents import OnPolicyAgent
from framework.types import Step, StepResult, Transition

VECTOR = dm_specs.Array((4,), np.float32)
IMAGE = dm_specs.BoundedArray((4, 44, 44), np.uint8, 0, 255)
CHOICE = dm_specs.DiscreteArray(3, np.int64)
NUMBERS = dm_specs.BoundedArray((2,), np.float32, [-2, 0], [2, 1])
SCALE, CENTRE = torch.tensor([2.0, 0.5]), torch.tensor([0.0, 0.5])  # of `NUMBERS`
DISCRETE, CONTINUOUS = make_spec(VECTOR, CHOICE), make_spec(VECTOR, NUMBERS)
IMAGES = make_spec(IMAGE, CHOICE)
COSTS = make_spec(VECTOR, CHOICE, dict.fromkeys(("reward", "cost"), DISCRETE.rewards))
ENVS = 5  # of a program of on-policy agents


def learn(learner: Any, batch: Any) -> StepResult:
    """One step of `learner` on `batch`, moved to its device first, as a dataset does."""
    return learner.step(batch._replace(data=as_tensors(batch.data, learner.device)))


def make_learner(agent: Any, spec: Any = DISCRETE) -> Any:
    torch.manual_seed(0)
    agent = agent.for_program(ENVS)
    return agent.make_learner(agent.make_networks(spec), spec)


def make_policy(agent: Any, spec: Any = DISCRETE, evaluation: bool = False, version: int = 1) -> Any:
    torch.manual_seed(0)
    policy = agent.make_policy(agent.make_networks(spec), evaluation)
    policy.loaded(Progress(version=version, env_steps=1))
    return policy


def flat(module: Any) -> torch.Tensor:
    """A copy of all parameters, as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def moved_by(learner: Any, batch: Any) -> set[str]:
    """The children of the networks that a step on `batch` changes, by more than a restored constraint."""
    before = {name: parameter.detach().clone() for name, parameter in learner.networks.named_parameters()}
    learn(learner, batch)
    pairs = ((n, parameter, before[n]) for n, parameter in learner.networks.named_parameters())
    changed = (n for n, one, other in pairs if not torch.allclose(one, other, rtol=1e-6, atol=0.0))
    return {name.split(".")[0] for name in changed}


def apart(learner: Any) -> Any:
    """Makes the target networks differ from those that learn."""
    with torch.no_grad():
        for parameter in learner.targets.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return learner


# Fields of agents whose items have extras, or are more than transitions.
PLAYED = ("recurrent", "critic_penalty", "calibrated", "largest_return")


def batch_of(agent: Any, spec: Any = DISCRETE, seed: int = 0) -> ReplaySample:
    """A batch of random experience for a learner of `agent`."""
    config = agent.config
    if isinstance(agent, OnPolicyAgent) or hasattr(config, "burn_in"):
        return unrolls(agent, spec, seed)
    if any(getattr(config, name, None) for name in PLAYED):
        sample, _, _ = played(agent, FakeEnvironment, seed=seed, spec=spec, episode_length=8)
        chosen = np.random.default_rng(seed).integers(len(sample.info.key), size=config.batch_size)
        return tree.map_structure(lambda leaf: leaf[chosen], sample)
    return transitions(spec, seed, agent.config.batch_size)


def transitions(spec: Any = DISCRETE, seed: int = 0, size: int = 16) -> ReplaySample:
    """Items that were drawn with unequal probabilities."""
    random = np.random.default_rng(seed)
    observation, action = _observe(spec, random, size), draw_action(spec.actions, random, size)
    reward = _normal(random, size)
    discount = (random.random(size) < 0.8).astype(np.float32)
    data = Transition(observation, action, reward, discount, _observe(spec, random, size))
    return ReplaySample(_info(random, size), data)


def unrolls(agent: Any, spec: Any = DISCRETE, seed: int = 0) -> ReplaySample:
    """Rows of an actor with other parameters, with ends of terminated and of truncated episodes."""
    agent, random = agent.for_program(ENVS), np.random.default_rng(seed)
    on_policy, envs = isinstance(agent, OnPolicyAgent), agent.items_per_step
    shape = (envs, getattr(agent.config, "burn_in", 0) + agent.config.unroll_length + 1)
    mask, discount = np.ones((2, *shape), np.float32)
    start = np.zeros(shape, bool)
    start[:, 0] = on_policy  # As the adder has it; the state says whether an episode begins there.
    for env, t in np.argwhere(random.random(shape) < 0.2):
        if t > 0 and mask[env, t - 1] and not start[env, t]:
            mask[env, t], discount[env, t - 1] = 0.0, random.integers(2)
            start[env, t + 1 : t + 2] = True
    if on_policy:
        mask[:, -1] = 0.0
    torch.manual_seed(seed + 100)
    networks = agent.make_networks(spec)
    with torch.no_grad():
        for parameter in networks.parameters():
            parameter.mul_(2.0)
    policy, rows = agent.make_policy(networks), []
    policy.loaded(Progress(version=-2))
    policy.seed(seed)
    state = policy.initial_state(envs)
    for t in range(-2, shape[1]):  # The first two are not kept, so that the memory holds something.
        observation = _observe(spec, random, envs)
        action, extras, state = policy.step(observation, state)
        if t >= 0:
            reward = tree.map_structure(lambda _: _normal(random, envs), spec.rewards)
            rows.append(Step(observation, action, reward, discount[:, t], start[:, t], extras, mask[:, t]))
    data = tree.map_structure(lambda *leaves: np.stack(leaves, 1), *rows)
    if "state" in data.extras:  # Replay keeps that of the first row only.
        data.extras["state"] = tree.map_structure(lambda part: part[:, 0], data.extras["state"])
    return ReplaySample(_info(random, envs), data)


def unrolled(network: Any, data: Any, n: int, burn_in: int) -> torch.Tensor:
    """Outputs `[T, ...]` of a recurrent network for all rows of sequence `n`, one step at a time."""
    state = tuple(torch.as_tensor(part[n : n + 1]) for part in (data.extras["state"] if data.extras else ()))
    rows = []
    for t in range(data.mask.shape[1]):
        if data.start_of_episode[n, t]:
            state = network.initial_state(1)
        with torch.set_grad_enabled(t >= burn_in):
            values, state = network.step(torch.as_tensor(data.observation[n : n + 1, t]), state)
        rows.append(values[0])
    return torch.stack(rows)


def log_probs_and_values(model: Any, data: Any, n: int) -> tuple[Any, Any, Any]:
    """Of each row of unroll `n`, one step at a time: of its action, entropies, and values."""
    state = tuple(torch.as_tensor(part[n : n + 1]) for part in data.extras.get("state", ()))
    log_probs, entropies, values = [], [], []
    for t in range(data.reward.shape[1]):
        if t > 0 and data.start_of_episode[n, t]:
            state = model.initial_state(1)
        observation = torch.as_tensor(data.observation[n : n + 1, t])
        features = model.torso(observation)
        values.append(float(model.value(model.core.step(features, state)[0] if model.core else features)))
        policy, state = model.step(observation, state)
        probabilities = policy.logits.softmax(-1)[0].double().numpy()
        log_probs.append(np.log(probabilities[data.action[n, t]]))
        entropies.append(-(probabilities * np.log(probabilities)).sum())
    return np.array(log_probs), entropies, values


def project(probabilities: Any, reward: float, discount: float, atoms: Any) -> list[float]:
    """The distribution of `reward + discount * atom` on the atoms, one by one."""
    result, width = [0.0] * len(atoms), atoms[1] - atoms[0]
    for probability, atom in zip(probabilities, atoms, strict=True):
        value = min(max(reward + discount * atom, atoms[0]), atoms[-1])
        for i, other in enumerate(atoms):
            result[i] += probability * max(0.0, 1.0 - abs(value - other) / width)
    return result


def _normal(random: Any, size: int) -> np.ndarray:
    return (3 * random.normal(size=size)).astype(np.float32)


def _observe(spec: Any, random: Any, *leading: int) -> Any:
    def make(leaf: Any) -> np.ndarray:
        if leaf.dtype.kind != "f":
            return draw(leaf, random, leading)
        return random.normal(size=(*leading, *leaf.shape)).astype(leaf.dtype)

    return tree.map_structure(make, spec.observations)


def _info(random: Any, size: int) -> replay.SampleInfo:
    keys, ones = np.arange(size, dtype=np.uint64), np.ones(size)
    return replay.SampleInfo(keys, random.dirichlet(ones), np.full(size, size), ones, ones)


def played(
    agent: Any, environment: Any, steps: int = 90, envs: int = 3, seed: int = 0, **options: Any
) -> tuple[Any, Any, Any]:
    """All that an actor writes, as one batch; the networks that acted; and the spec."""
    torch.manual_seed(0)
    wrappers = agent.environment_wrappers()
    made = environments.make(environment, num_envs=envs, seed=seed, options=options, wrappers=wrappers)
    agent, spec = agent.for_program(envs), specs.make_environment_spec(made)
    networks = agent.make_networks(spec)
    name = adders.QUEUE_TABLE if isinstance(agent, OnPolicyAgent) else adders.REPLAY_TABLE
    table = replay.Table.queue(name, 1000)
    client = replay.EmbeddedClient([table], concurrent=False)
    adder, policy = agent.make_adder(client, spec), agent.make_policy(networks)
    loop = EnvironmentLoop(made, PolicyActor(policy, adder, num_envs=envs, seed=0), should_update=False)
    for _ in range(steps // envs):
        loop.step()
    adder.flush()
    return client.sample_batch(name, table.info.current_size), networks, spec
