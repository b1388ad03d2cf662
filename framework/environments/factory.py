"""`make`: from a name or a callable to a batched environment."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tree

from framework import config_checks, specs
from framework.environments import goals, infos, simulators, suites
from framework.environments.base import BatchedEnvironment
from framework.environments.border import checked
from framework.environments.processes import ProcessEnvironment
from framework.environments.single import SingleEnv, call_factory, env_seeds, make_env, takes
from framework.environments.stepping import InlineEnvironment, VectorEnvironment
from framework.environments.suites import EnvironmentSource
from framework.environments.tensor import as_arrays

STEPPING = ("auto", "inline", "vector", "processes")

Wrapper = Callable[[BatchedEnvironment], BatchedEnvironment]


def make(
    environment: str | Callable[..., Any],
    *,
    num_envs: int = 1,
    seed: int | None = None,
    stepping: str = "auto",
    num_processes: int | None = None,
    options: Mapping[str, Any] | None = None,
    wrappers: Sequence[Wrapper] = (),
    render_mode: str | None = None,
    reset_options: Mapping[str, Any] | None = None,
    info_metrics: Sequence[str] = (),
) -> BatchedEnvironment:
    """Makes `num_envs` environments and puts them behind one batched dm_env interface.

    ```python
    make("gymnasium:CartPole-v1", num_envs=64, seed=1)
    make("dm_control:cartpole/balance", wrappers=[wrappers.SinglePrecision, wrappers.Flatten])
    make("atari:Pong", num_envs=8, options={"sticky_actions": 0.0}, stepping="processes")
    make(MyEnvironment, num_envs=4, options={"size": 9})
    ```

    Args:
      environment: a suite's name such as `gymnasium:CartPole-v1` (`repertory list` shows the suites,
        entry points included); or a callable, or its name `module:object`. The callable returns a new
        `dm_env.Environment`, `gymnasium.Env`, `pettingzoo.ParallelEnv` or `AECEnv`, or all envs at once as a
        `gymnasium.vector.VectorEnv` or a batched environment of this package. Its parameter `seed` receives
        the env's seed. A callable with a parameter `num_envs` is called once and returns all envs; any other
        is called once for each.
      num_envs: B.
      seed: seed of all envs, from which each env gets its own. None: a different one in every run.
      stepping: how the envs are stepped. `inline`, and `auto`: one after the other in this thread, unless
        the callable makes all at once. `vector`: by gymnasium's vector environment, computed together where
        the environment has such an implementation. `processes`: by `num_processes` child processes, for slow
        environments.
      num_processes: number of child processes with `processes`; by default one per CPU core, and at most
        one per env.
      options: keyword arguments of the environment's constructor (for Atari: of `AtariOptions`).
      wrappers: applied in this order to the batched environment, the first innermost.
      render_mode: for `render()`: `rgb_array` where the environment draws only on request.
      reset_options: what gymnasium's `reset(options=...)` gets at each reset.
      info_metrics: names of numbers in gymnasium's `info`, which the environment then has as `infos`; or of
        the `infos` of a batched environment.

    Raises:
      ValueError: The name is unknown, or two arguments contradict each other.
      ImportError: A package that the environment needs is not installed. The message names the extra.
    """
    num_envs = config_checks.whole_number("num_envs", num_envs, 1)
    seed = None if seed is None else config_checks.whole_number("seed", seed, 0)
    if stepping not in STEPPING:
        raise ValueError(
            f"stepping: got {stepping!r}, expected one of {', '.join(STEPPING)}."
            f"{config_checks.nearest(stepping, STEPPING)}"
        )
    if num_processes is not None and stepping != "processes":
        raise ValueError(
            f"num_processes: got {num_processes} with stepping={stepping!r}, expected None. "
            "Use stepping='processes'."
        )
    source = suites.find(environment, dict(options or {}), render_mode)
    if reset_options or info_metrics:
        make_one = infos.Customized(source.make_one, info_metrics, reset_options or {})
        source = dataclasses.replace(source, make_one=make_one, make_vector=None)
    batched = _batch(source, num_envs, seed, stepping, num_processes)
    try:
        if info_metrics:
            batched = infos.with_infos(batched, info_metrics)
        goals.declare(batched, functools.partial(source.make_env, None))
        if wrappers:  # They treat arrays.
            batched = as_arrays(batched)
        for wrapper in wrappers:
            agents, batched = specs.agents(batched.spec), checked(wrapper(batched))
            if agents and tree.is_nested(batched.spec.rewards) and not specs.agents(batched.spec):
                raise ValueError(
                    f"wrappers: got {wrapper} for the agents {', '.join(agents)}, expected one that keeps "
                    "them apart. Combine agents inside of the environment."
                )
    except BaseException:
        batched.close()
        raise
    simulators.made(batched)
    return batched


def _batch(
    source: EnvironmentSource,
    num_envs: int,
    seed: int | None,
    stepping: str,
    num_processes: int | None,
) -> BatchedEnvironment:
    import gymnasium  # 0.2 s

    makes_batches = takes(source.make_one, "num_envs") and "num_envs" not in source.options
    if stepping == "vector" and not makes_batches and source.make_vector is not None:
        vector = source.make_vector(num_envs, **source.options)
        simulators.take(source.name, vector, simulators.now())
        return checked(VectorEnvironment(source.name, vector, seed))
    seeds = [seed] if makes_batches else env_seeds(seed, num_envs)
    if makes_batches and stepping == "processes":
        raise ValueError(
            f"{source.name}: stepping='processes' makes envs one by one, and the factory has a parameter "
            "num_envs. Use stepping='inline', or a factory of one env."
        )
    if stepping == "processes":
        return ProcessEnvironment(source, seeds, num_processes)
    first = call_factory(source.name, source.make_one, seeds[0], source.options, num_envs)
    many = isinstance(first, BatchedEnvironment) and (makes_batches or num_envs == 1 or first.num_envs > 1)
    if many or isinstance(first, gymnasium.vector.VectorEnv):
        if first.num_envs != num_envs:
            first.close()
            raise ValueError(
                f"{source.name}: the factory returned a batch of {first.num_envs} envs, expected {num_envs}. "
                "Give it a parameter num_envs, so that each node can ask for the envs that it steps."
            )
        return checked(first if many else VectorEnvironment(source.name, first, seed))
    if stepping == "vector" and not makes_batches:
        make_env(first, seeds[0]).close()
        raise ValueError(
            f"{source.name}: stepping='vector' needs a gymnasium environment known by its id, or a "
            "callable that returns a gymnasium.vector.VectorEnv. Use stepping='inline' or 'processes'."
        )
    if makes_batches and num_envs > 1:
        raise ValueError(
            f"{source.name}: got one env from a factory with a parameter num_envs, expected a batch of "
            f"{num_envs}. Return environments.make(..., num_envs=num_envs), or remove the parameter."
        )
    makers: list[Callable[[], SingleEnv]] = [functools.partial(make_env, first, seeds[0])]
    makers += [functools.partial(source.make_env, env_seed) for env_seed in seeds[1:]]
    return InlineEnvironment(source.name, makers)
