"""A standalone replay server: `python -m framework.replay --config tables.py --port 8000`.

The config is a Python file with a function `tables()` that returns a list of `Table`s, and optionally a
function `checkpointer()` that returns a checkpointer. The command executes it: use files that you trust.
"""

from __future__ import annotations

import argparse
import dataclasses
import runpy
import signal
import sys
from collections.abc import Sequence
from typing import Any

from framework import interrupts
from framework.replay.errors import CheckpointError
from framework.replay.server.limits import Limits
from framework.replay.serving import Server
from launch.rpc.sockets import CurveKeys
from launch.texts import integer, nearest, printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM, or Ctrl-C, which raises `KeyboardInterrupt`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m framework.replay", description="Serves replay tables.")
    add = parser.add_argument
    add("--config", required=True, help="a Python file with a function tables(), and perhaps checkpointer()")
    add("--port", type=integer, help="port of this machine; a free one by default")
    add("--address", help="instead of --port: tcp://interface:port, with --keys, or ipc://path")
    add("--keys", help="file with the clients' keys; created if it does not exist")
    add("--max-bytes", type=integer, help="memory budget of all rows, in bytes")
    for limit in dataclasses.fields(Limits):
        add(
            f"--{limit.name.replace('_', '-')}", type=integer, default=limit.default, help="see replay.Limits"
        )
    add("--compress", nargs="*", default=(), help="patterns of columns to compress, such as '*pixels*'")
    chosen, unknown = parser.parse_known_args(arguments)
    if unknown:
        flag = unknown[0].split("=")[0]
        parser.error(f"there is no {flag}.{nearest(flag, parser.format_usage().split())}")
    interrupts.clean_up_first()
    try:
        config = runpy.run_path(chosen.config)
        if not callable(config.get("tables")):
            raise ValueError(
                f"{chosen.config}: got no tables, expected a function tables() that returns a list of Tables."
            )
        checkpointer: Any = config["checkpointer"]() if callable(config.get("checkpointer")) else None
        server = Server(
            config["tables"](),
            chosen.port,
            checkpointer,
            address=chosen.address,
            curve=None if chosen.keys is None else CurveKeys.from_file(chosen.keys),
            max_bytes=chosen.max_bytes,
            compress=tuple(chosen.compress),
            limits=Limits(*[getattr(chosen, limit.name) for limit in dataclasses.fields(Limits)]),
        )
    except (ValueError, OSError, CheckpointError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with server:
        print(f"serving {', '.join(sorted(server.tables))} at {server.address}", flush=True)
        server.wait()
    return 0


if __name__ == "__main__":
    sys.exit(interrupts.ending(main))
