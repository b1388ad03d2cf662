"""From an agent to its program graph."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import launch
from framework import core
from framework.config_checks import is_device
from framework.programs.acting import INFERENCE
from framework.programs.graph import Graph


def make_program(
    agent: core.Agent,
    environment_factory: str | Callable[..., Any],
    *,
    num_actors: int = 1,
    envs_per_actor: int = 1,
    num_learners: int = 1,
    seed: int = 0,
    max_env_steps: int | None = None,
    max_learner_steps: int | None = None,
    target_return: float | None = None,
    num_evaluation_episodes: int = 20,
    evaluate_period: int | None = 5000,
    publish_period: int = 10,
    update_period: int = 10,
    log_period: int = 1000,
    learner_log_period: int = 500,
    checkpoint_period: int | None = 50_000,
    keep_checkpoints: int = 3,
    directory: str | pathlib.Path | None = None,
    inference: str = "local",
    inference_device: str = "cpu",
    inference_min_batch: int = 1,
    inference_max_batch: int | None = None,
    inference_timeout: float = 0.001,
    inference_messages: bool = False,
    replay_backend: str = "framework.replay",
    stepping: str = "auto",
    logger_factory: Callable[[], Any] | None = None,
    on_write: Callable[[dict[str, Any]], None] | None = None,
    name: str | None = None,
) -> launch.Program:
    """The program graph of ``agent``, ready for any engine::

        program = make_program(DQN(DQNConfig()), "gymnasium:CartPole-v1", max_env_steps=50_000)
        result = launch.launch(program, engine="serial")

    Nodes: ``replay``, ``counter``, ``monitor``, ``checkpointer`` (with a ``directory``), ``learner``,
    ``inference`` (where it is a server), ``actor`` (``num_actors`` of them) and ``evaluator``. The
    environment is built here once, to read its specs, and then in each node that steps it.

    Args:
      agent: how the parts are made. An agent without tables runs without replay and learner.
      environment_factory: a name for ``environments.make``, or a callable that returns an environment.
      num_actors: actor nodes.
      envs_per_actor: environments that each of them steps as one batch.
      num_learners: learner nodes, each of which learns from an equal shard of every batch; more than one need
        an engine with a process for each node, and on GPUs one GPU for each of them.
      seed: of everything; on the serial engine the same seed gives the same run, bit by bit.
      max_env_steps: env steps of all actors together, made exactly; None for no limit.
      max_learner_steps: learner steps; None for no limit.
      target_return: the program ends when an evaluation's mean return reaches this; None for no goal.
      num_evaluation_episodes: episodes of one evaluation, played greedily.
      evaluate_period: env steps between two evaluations; None for no evaluator.
      publish_period: learner steps between two versions of the parameters that actors can pull.
      update_period: batched steps between two questions of an actor for newer parameters.
      log_period: env steps of one actor between two of its rows of metrics.
      learner_log_period: learner steps between two rows of the learner.
      checkpoint_period: env steps between two checkpoints, beside the one at the end.
      keep_checkpoints: how many of them are kept.
      directory: of the run: metrics and checkpoints; if it holds a checkpoint, the run goes on from there.
        None keeps nothing.
      inference: where actions come from. ``local``: each actor has the policy. ``server``: a node
        ``inference`` has it for all actors, in batches. ``alternating``: an actor's envs in two halves, one
        stepping while the other's actions are computed. ``alternating+server``: both.
      inference_device: of the node ``inference``.
      inference_min_batch: envs that it acts for once ``inference_timeout`` has passed.
      inference_max_batch: envs that it acts for at once, and never more in one step of the policy; None is
        all.
      inference_timeout: seconds that the first env of a batch waits for others.
      inference_messages: its arrays travel in messages, even where there is shared memory.
      replay_backend: the module with Reverb's API that serves the tables.
      stepping: how an env steps its envs, see ``environments.make``.
      logger_factory: returns the logger of all rows; None writes ``metrics.jsonl`` in ``directory``.
      on_write: called with the monitor's snapshot after every row, in the monitor's process.
      name: of the program; the agent's class name if None.

    Raises:
      ValueError: for limits and counts that make no sense, each named.
    """
    _check_positive(
        num_actors=num_actors,
        envs_per_actor=envs_per_actor,
        num_learners=num_learners,
        max_env_steps=max_env_steps,
        max_learner_steps=max_learner_steps,
        num_evaluation_episodes=num_evaluation_episodes,
        evaluate_period=evaluate_period,
        publish_period=publish_period,
        update_period=update_period,
        log_period=log_period,
        learner_log_period=learner_log_period,
        checkpoint_period=checkpoint_period,
        keep_checkpoints=keep_checkpoints,
        inference_min_batch=inference_min_batch,
        inference_max_batch=inference_max_batch,
    )
    if target_return is not None and evaluate_period is None:
        raise ValueError("target_return needs an evaluator: give evaluate_period (env steps)")
    _check_inference(
        inference,
        envs_per_actor,
        num_actors * envs_per_actor,
        inference_min_batch,
        inference_max_batch,
        inference_timeout,
    )
    if not is_device(inference_device):
        raise ValueError(f"inference_device is {inference_device!r}; expected 'cpu', 'cuda:0' or the like")
    make_environment = functools.partial(_make_environment, agent, environment_factory, stepping)
    spec = _spec_of(make_environment, seed)
    agent = agent.for_envs(num_actors * envs_per_actor)
    has_tables = bool(agent.make_tables(spec))
    if not has_tables and num_learners > 1:
        raise ValueError(f"num_learners is {num_learners}, and {type(agent).__name__} learns nothing; use 1.")
    agent.for_learner(0, num_learners)  # refuses here what it would refuse in the node
    directory = None if directory is None else pathlib.Path(directory).absolute()

    graph = Graph(launch.Program(name or type(agent).__name__.lower()), agent, spec, seed)
    if has_tables:
        graph.add_replay(directory, keep_checkpoints, replay_backend)
    graph.add_counter(max_env_steps, directory)
    graph.add_monitor(logger_factory, on_write, directory)
    if directory is not None:
        graph.add_checkpointer(directory, keep_checkpoints)
    if has_tables:
        graph.add_learners(
            num_learners,
            max_steps=max_learner_steps,
            publish_period=publish_period,
            log_period=learner_log_period,
            checkpoint_period=checkpoint_period,
            num_actors=num_actors,
        )
    if inference.endswith("server"):
        graph.add_inference(
            num_actors * envs_per_actor,
            device=inference_device,
            min_batch=inference_min_batch,
            max_batch=inference_max_batch,
            timeout=inference_timeout,
            update_period=update_period,
            messages=inference_messages,
            log_period=log_period,
        )
    graph.add_actors(
        num_actors,
        make_environment,
        envs=envs_per_actor,
        log_period=log_period,
        update_period=update_period,
        mode=inference,
        messages=inference_messages,
        ends_program=evaluate_period is None,
    )
    if evaluate_period is not None:
        graph.add_evaluator(
            make_environment,
            num_episodes=num_evaluation_episodes,
            every=evaluate_period,
            max_env_steps=max_env_steps,
            target_return=target_return,
        )
    return graph.program


def _check_positive(**values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")


def _check_inference(
    mode: str, envs: int, num_envs: int, min_batch: int, max_batch: int | None, timeout: float
) -> None:
    if mode not in INFERENCE:
        raise ValueError(f"inference is {mode!r}; expected one of {', '.join(INFERENCE)}")
    if mode.startswith("alternating") and envs < 2:
        raise ValueError(
            f"inference is {mode!r}, which divides an actor's envs in two; envs_per_actor is {envs}, "
            "expected at least 2"
        )
    if min_batch > num_envs:
        raise ValueError(
            f"inference_min_batch is {min_batch}; expected at most the envs of the program, {num_envs}"
        )
    if max_batch is not None and max_batch < min_batch:
        raise ValueError(
            f"inference_max_batch is {max_batch}; expected at least inference_min_batch, {min_batch}"
        )
    if not timeout >= 0:
        raise ValueError(f"inference_timeout is {timeout}; expected seconds, at least 0")


def _spec_of(make_environment: Callable[[int, int], Any], seed: int) -> Any:
    from framework import specs

    environment = make_environment(1, seed)
    try:
        return specs.make_environment_spec(environment)
    finally:
        environment.close()


def _make_environment(agent: core.Agent, factory: Any, stepping: str, num_envs: int, seed: int) -> Any:
    from framework import environments

    wrappers = agent.environment_wrappers()
    return environments.make(factory, num_envs=num_envs, seed=seed, stepping=stepping, wrappers=wrappers)
