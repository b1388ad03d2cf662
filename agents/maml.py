"""MAML, as a plan: learns parameters that one policy gradient step adapts to a task (Finn et al., 2017)."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import tree
from torch import nn

from framework import config_checks as check
from framework import core, learners, losses, networks
from framework.datasets import Dataset
from framework.environments.seeded_episodes import SeededEpisodes
from framework.environments.single import takes
from framework.environments.tasks import find_task_environment, require_tasks
from framework.environments.wrappers import find_inside
from framework.flow import Flow, Node, Par
from framework.learners import LossContext, LossOutput, Prepared
from framework.losses.meta import Parameters
from framework.programs import PlanLearner, Preset, RolloutWorker, concatenate, stack
from framework.replay import EmbeddedClient, ReplaySample
from framework.specs import EnvironmentSpec
from framework.torch_agents import AgentConfig, OnPolicyAgent, TorchPolicy
from framework.types import Nest, Step
from framework.workers.collector import Collector


@dataclass(frozen=True)
class MetaConfig(AgentConfig):
    """Settings of agents with inner and outer steps, in addition to `AgentConfig`'s."""

    gae_lambda: float = 1.0  # 0 trusts the linear baseline, 1 the returns: less bias, more variance.

    # The inner step, which adapts to a task.
    inner_steps: int = 1  # Inner steps in a task. 0 learns one policy for all tasks.
    inner_learning_rate: float = 0.1  # Rate of plain gradient descent. Larger adapts faster, or too far.

    # The outer step: PPO's, on what the adapted policies collected.
    clip: float = 0.2  # Probability ratios are clipped to 1 +- this.
    epochs: int = 5  # Passes over a batch. More learn more from it, until the policies move too far.
    minibatch_tasks: int = 20  # Approximate number of tasks in a minibatch.
    learning_rate: float = 2e-3  # Initial learning rate of Adam.
    max_gradient_norm: float | None = 10.0  # Larger gradients are scaled down to this.

    # Networks.
    hidden_sizes: tuple[int, ...] = (64, 64)  # Hidden layers of the policy.
    activation: str = "relu"  # Activation of the hidden layers: relu, tanh, elu or silu.
    initial_std: float = 1.0  # Initial standard deviation of actions, in half-widths of their range.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 0, "inner_steps", "inner_learning_rate")
        check.at_least(self, 1, "epochs", "minibatch_tasks", "hidden_sizes")
        check.above(self, 0, "initial_std")
        check.fraction(self, "gae_lambda")
        check.between(self, 0, 1, "clip")
        check.one_of(self, networks.ACTIVATIONS, "activation")


@dataclass(frozen=True)
class MAMLConfig(MetaConfig):
    """Settings of MAML. A learner step uses `tasks_per_worker` tasks of every worker."""

    tasks_per_worker: int = 10  # Tasks of a worker in a learner step. More: less noise, longer rounds.
    unroll_length: int = 100  # Steps of an env in a task, before and after each inner step.
    evaluation_tasks: int = 20  # Tasks of an evaluation, with `num_evaluation_episodes` episodes in each.
    evaluation_inner_steps: int = 1  # Inner steps before these episodes.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 0, "evaluation_inner_steps")
        check.at_least(self, 1, "tasks_per_worker", "evaluation_tasks")
        check.at_least(self, 2, "unroll_length")


class MAMLNetworks(nn.Module):
    """The policy, `forward`, and the `encoder` of observations, in whose output the baseline is linear."""

    def __init__(self, config: MetaConfig, spec: EnvironmentSpec):
        super().__init__()
        self.actions = networks.make_actions(spec.actions)
        self.encoder = networks.ObservationEncoder(spec.observations)
        self.body = networks.MLP(self.encoder.output_size, config.hidden_sizes, activation=config.activation)
        self.head = self.actions.make_head(self.body.output_size)
        for part in self.head.modules():
            if isinstance(part, networks.GaussianHead):
                nn.init.constant_(part.log_std, float(np.log(config.initial_std)))

    def forward(self, observation: Nest) -> Any:
        return self.head(self.body(self.encoder(observation)))


class MAMLPolicy(TorchPolicy):
    """Samples from the policy's distribution, or takes its mode.

    Extras of each step: the `log_prob` of the action, and the unclipped `action` if it is continuous.
    """

    networks: Any

    def __init__(self, networks: Any, evaluation: bool = False):
        super().__init__(networks, networks.actions)
        self._greedy = evaluation

    def act(self, observation: Nest, state: Nest) -> tuple[torch.Tensor, Nest, Nest]:
        distribution = self.networks(observation)
        drawn = distribution.mode() if self._greedy else distribution.sample(self.random)
        extras = {"log_prob": distribution.log_prob(drawn)}
        if self.actions.continuous:
            extras["action"] = drawn
        return drawn, extras, state


class Rows(NamedTuple):
    """What B envs collected in one task with one policy, `[B, T, ...]`.

    A batch is `[tasks, rounds, B, T, ...]`; round k was collected after k inner steps.
    """

    observation: Nest
    action: torch.Tensor
    log_prob: torch.Tensor  # of the action, under the policy that acted
    advantage: torch.Tensor  # normalized
    mask: torch.Tensor
    episode_return: torch.Tensor  # [B, T]: the sum of rewards of the first episode, at each row


class TaskWorker(RolloutWorker):
    """Collects data in several tasks, and adapts to each task between its rounds."""

    agent: MAML
    networks: MAMLNetworks

    def sample_tasks(self) -> ReplaySample:
        """Draws `tasks_per_worker` tasks; returns their `Rows`, `[tasks, rounds, B, T, ...]`, in numpy."""
        agent, environment = self.agent, find_task_environment(self.collector.environment)
        count, steps = agent.config.tasks_per_worker, agent.config.inner_steps
        tasks = []
        with self.granted(count * (1 + steps) * agent.unroll_length):
            for task in environment.sample_tasks(count):
                environment.set_task(task)
                with networks.restored(self.networks):
                    rounds = [self._collect_rows()]
                    for _ in range(steps):
                        agent.adapt_to(self.networks, rounds[-1].data)
                        rounds.append(self._collect_rows())
                tasks.append(stack(rounds))
        return stack(tasks)

    def _collect_rows(self) -> ReplaySample:
        assert self.dataset is not None
        sample = collect(self.collector, self.step_envs, self.dataset, self.agent.unroll_length)
        return sample._replace(data=self.agent.make_rows(self.networks, sample.data))


def collect(collector: Collector, step: Callable[[], Any], dataset: Dataset, length: int) -> ReplaySample:
    """One unroll of every env from a reset, `[B, T + 1, ...]`; `step` steps the collector."""
    collector.reset()  # The reset would be a row of the unroll.
    for _ in range(length):
        step()
    return next(dataset)


class MetaAgent(OnPolicyAgent):
    """Inner steps, and an outer step that differentiates through them, on `Rows` of several tasks."""

    config: MetaConfig  # type: ignore[assignment]  # Has no value network.
    preload = ("torch._dynamo",)  # Which torch.func.grad imports, in nearly two CPU seconds.

    def make_policy(self, networks: Any, evaluation: bool = False) -> MAMLPolicy:
        return MAMLPolicy(networks, evaluation)

    def make_learner(self, networks: MAMLNetworks, spec: EnvironmentSpec) -> learners.MinibatchLearner:
        return learners.MinibatchLearner(
            networks,
            self.prepare,
            self.loss,
            epochs=self.config.epochs,
            minibatch_size=self.config.minibatch_tasks,
            **self.learner_settings(networks),
        )

    def make_rows(self, networks: MAMLNetworks, data: Step) -> Rows:
        """The rows of unrolls `[B, T + 1, ...]` that begin with an episode. The last one is to bootstrap."""
        with torch.no_grad():
            features = networks.encoder(data.observation)
        starts, mask, rewards = data.start_of_episode, losses.transition_mask(data.mask), data.reward.float()
        discounts, gae_lambda = self.config.discount * data.discount.float(), self.config.gae_lambda
        times = losses.episode_times(starts)
        values = losses.linear_baseline(features, times, rewards, discounts, data.mask)
        advantages = losses.generalized_advantages(rewards, discounts, values, data.mask, gae_lambda)
        first = rewards * mask * (starts.float().cumsum(1) < 2)
        rows = Rows(
            data.observation,
            networks.actions.drawn(data),
            data.extras["log_prob"],
            losses.normalize_advantages(advantages, mask),
            mask,
            first.sum(1, keepdim=True).expand_as(mask),
        )
        return tree.map_structure(lambda leaf: leaf[:, :-1], rows)

    def adapt(self, networks: MAMLNetworks, parameters: Parameters, rows: Rows) -> Parameters:
        """Returns the parameters after one inner step on the rows of a task."""

        def loss(parameters: Parameters) -> torch.Tensor:
            log_probs = self._log_probs(networks, parameters, rows)
            return losses.likelihood_ratio_loss(log_probs, rows.log_prob, rows.advantage, rows.mask)

        return losses.inner_step(parameters, loss, self.config.inner_learning_rate)

    def adapt_to(self, networks: MAMLNetworks, rows: Rows) -> None:
        """Makes an inner step of the networks themselves."""
        with torch.no_grad():  # torch.func.grad computes its gradient all the same.
            adapted = self.adapt(networks, dict(networks.named_parameters()), rows)
            networks.load_state_dict(adapted, strict=False)  # Buffers stay.

    def prepare(self, networks: MAMLNetworks, batch: ReplaySample, context: LossContext) -> Prepared:
        """Advantages come from the workers."""
        returns = batch.data.episode_return[..., 0].mean((0, 2))  # [rounds]
        metrics = {"return_before": returns[0], "return_after": returns[-1]}
        return Prepared(batch.data, len(batch.data.mask), metrics)

    def loss(self, networks: MAMLNetworks, rows: Rows, context: LossContext) -> LossOutput:
        """The mean over tasks, `[tasks, rounds, B, T, ...]`, of the surrogate after the inner steps."""
        parameters, count = dict(networks.named_parameters()), 1 + self.config.inner_steps

        def surrogate(rounds: Rows) -> losses.Surrogate:
            adapted: Parameters = parameters
            *before, rows = (tree.map_structure(operator.itemgetter(k), rounds) for k in range(count))
            for each in before:
                adapted = self.adapt(networks, adapted, each)
            log_probs, clip = self._log_probs(networks, adapted, rows), self.config.clip
            return losses.clipped_surrogate(log_probs, rows.log_prob, rows.advantage, rows.mask, clip)

        loss, kl, clip_fraction = (each.mean() for each in torch.func.vmap(surrogate)(rows))
        return LossOutput(loss, {"kl": kl, "clip_fraction": clip_fraction})

    def _log_probs(self, networks: MAMLNetworks, parameters: Parameters, rows: Rows) -> torch.Tensor:
        policy = torch.func.functional_call(networks, dict(parameters), (rows.observation,))
        return policy.log_prob(rows.action)


class MAML(MetaAgent):
    """Model-agnostic meta-learning for the environments of `tasks:`.

    Every worker collects `unroll_length` steps of its envs in a task, adapts the policy by an inner step of
    policy gradient, and collects again with the adapted policy. The learner improves the return *after* the
    inner step: it differentiates through that step, and makes several passes with PPO's clipped objective.
    """

    config: MAMLConfig = MAMLConfig()
    worker_class = TaskWorker

    def plan(self, workers: Sequence[Node], learner: PlanLearner) -> Flow:
        return Par(workers, TaskWorker.sample_tasks).sync().map(concatenate).map(learner.step)

    def environment_wrappers(self) -> Sequence[Any]:
        return (require_tasks,)  # Others are refused before a node starts.

    def make_networks(self, spec: EnvironmentSpec) -> MAMLNetworks:
        return self.custom_networks(spec, MAMLNetworks, ("actions", "encoder", "forward"))

    def session(self, spec: EnvironmentSpec, num_envs: int = 1, seed: int = 0) -> NoReturn:
        """Raises ValueError: a session does not know the tasks of its environments."""
        raise ValueError("session: got MAML, which sets tasks, expected an agent without tasks.")

    def play(self, loop: core.Loop, policy: core.Policy, num_episodes: int) -> dict[str, Any]:
        """Plays `num_episodes` episodes in each of `evaluation_tasks` tasks, greedily, after the inner steps.

        The result also has `return_before`, of as many episodes in each task before the first inner step.
        Each inner step uses one exploring unroll of every env of the loop, which does not count.
        """
        assert isinstance(policy, MAMLPolicy)
        environment, policy_networks = find_task_environment(loop.environment), policy.networks
        agent, spec = self.for_worker(environment.num_envs), environment.spec
        client = EmbeddedClient(agent.make_tables(spec), concurrent=False)
        explorer = agent.make_policy(policy_networks)
        exploring = Collector(loop.environment, explorer, agent.make_adder(client, spec))
        results: list[dict[str, Any]] = []
        seeded = find_inside(loop.environment, SeededEpisodes)
        # A family of others may draw without a seed: then every evaluation has tasks of its own.
        same = {"seed": seeded.first} if seeded and takes(environment.sample_tasks, "seed") else {}
        with agent.make_dataset(client) as dataset:
            for task in environment.sample_tasks(self.config.evaluation_tasks, **same):
                environment.set_task(task)
                with networks.restored(policy_networks):
                    before = loop.run_episodes(num_episodes)["episode_return"]
                    for _ in range(self.config.evaluation_inner_steps):
                        sample = collect(exploring, exploring.step, dataset, self.unroll_length)
                        self.adapt_to(policy_networks, self.make_rows(policy_networks, sample.data))
                    results.append({**loop.run_episodes(num_episodes), "return_before": before})
        return tree.map_structure(lambda *parts: np.concatenate(parts), *results)


PRESETS: Mapping[str, Preset] = {
    "tasks:Navigation2D": Preset(
        agent={"tasks_per_worker": 5},
        run={
            "num_actors": 2,
            "envs_per_actor": 20,
            "learner_log_period": 5,
            "max_env_steps": 800_000,
            "evaluate_period": 100_000,
        },
    ),
}
