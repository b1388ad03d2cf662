"""`repertory serve-environment`: environments for a run whose actors take them over the network."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tree

from framework import environments, interrupts
from framework import nest as nests
from framework.commands.options import UsageError, read_pairs
from framework.config_checks import RaisedAs
from framework.environments.remote import environment_server
from framework.environments.tensor import as_arrays


class _Exported(argparse.Action):
    """Copies the file of the server and exits."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
    ) -> None:
        shutil.copyfile(environment_server.__file__, values)
        print(f"Wrote {values}. It needs Python 3.8 or newer, numpy, pyzmq and msgpack.")
        parser.exit()


class _Environments:
    """Makes batches of the envs of any suite."""

    def __init__(self, name: str, options: Mapping[str, Any], stepping: str):
        self._arguments: dict[str, Any] = {"environment": name, "options": options, "stepping": stepping}
        with environments.make(name, options=options) as environment:
            spec = environment.spec
        self.spec = {field: environment_server.describe_spec(of) for field, of in spec._asdict().items()}

    def __call__(self, num_envs: int, seed: int | None) -> _ListBatch:
        return _ListBatch(as_arrays(environments.make(**self._arguments, num_envs=num_envs, seed=seed)))


class _ListBatch:
    """A batched environment whose actions and time steps are lists of arrays."""

    def __init__(self, environment: environments.BatchedEnvironment):
        self._environment, self.close = environment, environment.close
        self._build = nests.unflattener(environment.action_spec())

    def reset(self) -> list[np.ndarray]:
        return tree.flatten(self._environment.reset())

    def step(self, leaves: list[np.ndarray]) -> list[np.ndarray]:
        return tree.flatten(self._environment.step(self._build(leaves)))


def main(arguments: Sequence[str]) -> int:
    parser = environment_server.make_parser(
        "repertory serve-environment", names="such as gymnasium:CartPole-v1; see repertory list"
    )
    add = parser.add_argument
    add("--options", nargs="+", default=(), metavar="KEY=VALUE", help="keyword arguments of the environment")
    add("--stepping", choices=("auto", "inline", "vector", "processes"), default="auto", help="default: auto")
    add(
        "--export",
        action=_Exported,
        metavar="FILE",
        help="write the server as one file for other Pythons, and exit",
    )
    chosen = parser.parse_args(arguments)
    with RaisedAs(UsageError, ValueError, "--options: "):
        options = read_pairs(chosen.options)
    interrupts.clean_up_first()
    return environment_server.run(lambda: _Environments(chosen.environment, options, chosen.stepping), chosen)
