"""MB-MPO, as a plan: MAML whose tasks are learned models of one environment (Clavera et al., 2018)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
import tree
from dm_env import specs as dm_specs
from torch import nn
from torch.func import functional_call, vmap
from typing_extensions import Self

from agents.maml import MAMLNetworks, MAMLPolicy, MetaAgent, MetaConfig, Rows, collect
from framework import config_checks as check
from framework import core, learners, losses, networks, specs
from framework.flow import Flow, Node, Par, alternate
from framework.learners.dynamics import DynamicsLearner
from framework.losses.meta import Parameters
from framework.parameters import arrays_of
from framework.programs import PlanLearner, Preset, RolloutWorker, concatenate
from framework.replay import ReplaySample, SampleInfo
from framework.specs import EnvironmentSpec
from framework.types import Nest, Step, StepResult
from framework.workers.worker import Setup


@dataclass(frozen=True)
class MBMPOConfig(MetaConfig):
    """Settings of MB-MPO. A *task* is one of the models, which the workers share out.

    In a round, every env makes `models * unroll_length` steps, and the learner makes 1 + `meta_steps` steps.
    """

    # Data.
    unroll_length: int = 200  # Steps of an env with the policy that is adapted to a model.
    meta_steps: int = 20  # Outer steps of a round. More learn more from the models, also their errors.
    imagined_envs: int = 20  # Unrolls that each model imagines before and after each inner step.
    horizon: int = 100  # Steps of an imagined unroll. More: less bias by the baseline, more by the model.

    # The models.
    models: int = 5  # Models in the ensemble.
    model_hidden_sizes: tuple[int, ...] = (512, 512)  # Hidden layers of each model.
    model_learning_rate: float = 1e-3  # Learning rate of the models (Adam).
    model_batch_size: int = 500  # Transitions of each model in a step.
    model_epochs: int = 50  # Largest number of passes over the data of all rounds, in each round.
    model_persistence: float = 0.9  # Weight of the past in the validation error whose rise ends the passes.
    validation_fraction: float = 0.2  # Share of the data that a model leaves out. Each leaves out others.

    def __post_init__(self) -> None:
        super().__post_init__()
        check.at_least(self, 1, "meta_steps", "imagined_envs", "models", "model_hidden_sizes")
        check.at_least(self, 1, "model_batch_size", "model_epochs")
        check.at_least(self, 2, "unroll_length", "horizon")
        check.at_least(self, 0, "model_learning_rate")
        check.between(self, 0, 1, "validation_fraction")
        check.fraction(self, "model_persistence")


class MBMPONetworks(nn.Module):
    """The policy of encoded observations, and the models, which predict them."""

    def __init__(self, config: MBMPOConfig, spec: EnvironmentSpec):
        super().__init__()
        self.actions = networks.Actions(spec.actions)
        self.encoder = networks.ObservationEncoder(spec.observations)
        if self.encoder.images:
            raise ValueError(
                f"observation spec: got {spec.observations!r}, expected numbers, which the models of MB-MPO "
                "predict. Use Dreamer for pictures."
            )
        self._limit = 1.0 if np.isfinite(specs.bounds(spec.actions)).all() else np.inf
        width = self.encoder.output_size
        self.policy = MAMLNetworks(config, spec._replace(observations=dm_specs.Array((width,), np.float32)))
        self.models = networks.DynamicsEnsemble(
            width, self.actions.vector_size, config.model_hidden_sizes, config.models
        )

    def forward(self, observation: Nest) -> Any:
        return self.policy(self.encoder(observation))

    @torch.no_grad()
    def transitions(self, data: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs `[N, D + A]` and targets `[N, D + 2]` of the models, from unrolls `[B, T + 1, ...]`."""
        counted, encoded = losses.transition_mask(data.mask)[:, :-1] > 0, self.encoder(data.observation)
        inputs = torch.cat([encoded, self.vectors(self.actions.drawn(data))], -1)[:, :-1]
        numbers = torch.stack([data.reward, data.discount], -1)[:, :-1].float()
        return inputs[counted], torch.cat([encoded.diff(dim=1), numbers], -1)[counted]

    def vectors(self, drawn: torch.Tensor) -> torch.Tensor:
        """Sampled actions as the models see them, `[..., A]`: as the environment clips them."""
        return self.actions.vectors(drawn).clamp(-self._limit, self._limit)


class Imagination(nn.Module):
    """What a policy does in one model, with the parameters of one model of the ensemble."""

    def __init__(self, made: MBMPONetworks):
        super().__init__()
        self.policy, self.models, self._vectors = made.policy, made.models, made.vectors

    def forward(self, observation: torch.Tensor, noise: torch.Tensor) -> Step:
        """Rows `[B, T, ...]` from observations `[B, D]` on, with the noise of the actions `[T, B, A]`."""
        mask, rows = torch.ones_like(observation[:, 0]), []
        for each in noise.unbind(0):
            policy = self.policy(observation)
            drawn = policy.sample(noise=each)
            after, reward, discount = self.models.predict(observation, self._vectors(drawn))
            rows.append((observation, drawn, reward, discount, policy.log_prob(drawn), mask))
            observation, mask = after, mask * discount
        observation, drawn, reward, discount, log_prob, mask = (
            torch.stack(each, 1) for each in zip(*rows, strict=True)
        )
        starts = (torch.arange(len(noise), device=mask.device) == 0).expand_as(mask)
        return Step(
            observation, drawn, reward, discount, starts, {"action": drawn, "log_prob": log_prob}, mask
        )


class ModelWorker(RolloutWorker):
    """Imagines in its share of the models, and collects real data with the policies adapted to them."""

    agent: MBMPO
    networks: MBMPONetworks

    def __init__(self, setup: Setup, *, index: int = 0, **options: Any):
        super().__init__(setup, index=index, **options)
        self._models = torch.arange(index, self.agent.config.models, setup.config.num_actors)

    def make_policy(self, networks: MBMPONetworks) -> core.Policy:
        policy = self.agent.make_policy(networks)
        policy.variables, self._random = (), policy.random  # The models too.
        return policy

    def sample_adapted(self) -> ReplaySample:
        """One unroll of every env from a reset with each adapted policy, `[models * B, T + 1, ...]`."""
        assert self.dataset is not None
        agent, policy, samples = self.agent, self.networks.policy, []
        with self.granted(len(self._models) * agent.unroll_length):
            _, adapted = self._imagine(agent.config.inner_steps)
            for k in range(len(self._models)):
                with networks.restored(policy):
                    policy.load_state_dict({name: each[k] for name, each in adapted.items()}, strict=False)
                    samples.append(collect(self.collector, self.step_envs, self.dataset, agent.unroll_length))
        return concatenate([each._replace(data=networks.as_numpy(each.data)) for each in samples])

    def imagine(self) -> ReplaySample:
        """`Rows` `[models, rounds, B, T, ...]` with the newest parameters, in numpy."""
        with self.updated():
            rows, _ = self._imagine(1 + self.agent.config.inner_steps)
        data = tree.map_structure(lambda *leaves: torch.stack(leaves, 1).numpy(), *rows)
        return ReplaySample(SampleInfo(*np.zeros((5, len(self._models)))), data)

    def _imagine(self, rounds: int) -> tuple[list[Rows], Parameters]:
        return self.agent.imagine(self.networks, self._models, rounds, self._random)


class MBMPOLearner(core.Learner):
    """Fits the models to `Step`s of real data, and improves the policy on imagined `Rows`.

    Args:
      networks: the policy and the models.
      policy: the learner of the policy.
      models: the learner of the models.
    """

    def __init__(self, networks: MBMPONetworks, policy: learners.SGDLearner, models: learners.SGDLearner):
        self._networks, self._learners = networks, {"policy": policy, "models": models}
        self.device = policy.device
        self._metrics: dict[str, Any] = {}  # The newest of both.

    def step(self, batch: ReplaySample) -> StepResult:
        if isinstance(batch.data, Rows):
            self._learners["policy"].env_steps = self.env_steps
            self._metrics |= self._learners["policy"].step(batch).metrics
        else:
            real = batch._replace(data=self._networks.transitions(batch.data))
            metrics = self._learners["models"].step(real).metrics
            self._metrics |= {f"models/{name}": value for name, value in metrics.items()}
        return StepResult(dict(self._metrics), None)

    def parameters(self) -> dict[str, dict[str, np.ndarray]]:
        for learner in self._learners.values():
            learner.parameters()  # On a GPU, it tells of a step that was not finite.
        return arrays_of({name: child.state_dict() for name, child in self._networks.named_children()})

    def save(self) -> dict[str, Any]:
        return {name: learner.save() for name, learner in self._learners.items()}

    def restore(self, state: dict[str, Any]) -> None:
        for name, learner in self._learners.items():
            learner.restore(state[name])


class MBMPO(MetaAgent):
    """Meta-learning over an ensemble of learned models of the environment.

    Each worker imagines unrolls in its share of the models, adapts the policy to each of them by an inner
    step of policy gradient, and imagines again. The learner differentiates through that step, as MAML's. The
    adapted policies collect the real data, to which the models are fitted. Evaluations play without an inner
    step.
    """

    config: MBMPOConfig = MBMPOConfig()
    worker_class = ModelWorker

    def decided(self, config: Any, recorded: Mapping[str, Any]) -> tuple[Self, list[str]]:
        if config.num_actors > self.config.models:
            raise ValueError(
                f"num_actors: got {config.num_actors}, expected at most {self.config.models}, the number of "
                "models, which the workers share out."
            )
        return super().decided(config, recorded)

    def plan(self, workers: Sequence[Node], learner: PlanLearner) -> Flow:
        real = Par(workers, ModelWorker.sample_adapted).sync().map(concatenate).map(learner.step)
        imagined = Par(workers, ModelWorker.imagine).sync().map(concatenate).map(learner.step)
        return alternate(real, imagined, weights=(1, self.config.meta_steps))

    def make_networks(self, spec: EnvironmentSpec) -> MBMPONetworks:
        members = ("actions", "encoder", "policy.encoder", "models.predict", "vectors", "transitions")
        return self.custom_networks(spec, MBMPONetworks, members)

    def make_policy(self, networks: MBMPONetworks, evaluation: bool = False) -> MAMLPolicy:
        policy = super().make_policy(networks, evaluation)
        policy.variables = ("policy",)
        return policy

    def make_learner(self, networks: MBMPONetworks, spec: EnvironmentSpec) -> MBMPOLearner:  # type: ignore[override]
        config, policy = self.config, super().make_learner(networks.policy, spec)
        models = DynamicsLearner(
            networks.models,
            config.model_learning_rate,
            batch_size=config.model_batch_size,
            epochs=config.model_epochs,
            persistence=config.model_persistence,
            validation_fraction=config.validation_fraction,
            device=policy.device,
        )
        return MBMPOLearner(networks, policy, models)

    @torch.no_grad()
    def imagine(
        self, made: MBMPONetworks, models: torch.Tensor, rounds: int, random: torch.Generator
    ) -> tuple[list[Rows], Parameters]:
        """What the policy does in some models, with an inner step after each of `inner_steps` rounds.

        Before there is any data, nothing is imagined.

        Returns:
          The `Rows` of each round, `[K, B, T, ...]`, and the last parameters of the policy, `[K, ...]`.
        """
        config, count, starts = self.config, len(models), made.models.starts
        policy: Parameters = {
            name: torch.stack([each] * count) for name, each in made.policy.named_parameters()
        }
        fixed = {f"models.{name}": each[models] for name, each in made.models.named_parameters()}
        imagination, done = Imagination(made), []
        kind = "normal" if made.actions.continuous else "gumbel"
        for k in range(rounds if made.models.is_fitted else 0):
            draw = functools.partial(networks.draw, device=starts.device, generator=random)
            first = starts[draw(len(starts), torch.Size([count, config.imagined_envs]))]
            shape = count, config.horizon + 1, config.imagined_envs, made.actions.vector_size
            parameters = fixed | {f"policy.{name}": each for name, each in policy.items()}
            play = vmap(lambda parameters, *inputs: functional_call(imagination, parameters, inputs))
            data = play(parameters, first, draw(kind, torch.Size(shape)))
            done.append(vmap(functools.partial(self.make_rows, made.policy))(data))
            if k < config.inner_steps:
                policy = vmap(functools.partial(self.adapt, made.policy))(policy, done[-1])
        return done, policy

    def session(self, spec: EnvironmentSpec, num_envs: int = 1, seed: int = 0) -> NoReturn:
        """Raises ValueError: the data of a session does not come from adapted policies."""
        raise ValueError("session: got MBMPO, which adapts its policy, expected an agent that does not.")


PRESETS: Mapping[str, Preset] = {
    "gymnasium:Pendulum-v1": Preset(
        agent={
            "discount": 0.95,
            "gae_lambda": 0.95,
            "horizon": 50,
            "imagined_envs": 40,
            "model_hidden_sizes": (128, 128),
            "activation": "tanh",
        },
        run={
            "num_actors": 1,
            "envs_per_actor": 1,
            "learner_log_period": 21,
            "max_env_steps": 10_000,
            "evaluate_period": 2_000,
        },
    ),
}
