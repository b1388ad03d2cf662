"""`repertory serve`: the policy of a run over HTTP."""

from __future__ import annotations

import functools
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from framework import interrupts
from framework.commands.options import Allow, Checkpoint, CommandError, Run, check_at_least, parse
from framework.config_checks import RaisedAs
from framework.programs.loading import load_policy


@dataclass(frozen=True)
class ServeOptions:
    """Answers POST /act with actions of the policy of a run, also of one that is still training.

    repertory serve runs/cartpole --port 8000
    """

    run: Run  # Folder of the run.
    # Address to listen on. Whoever can reach it can use the policy: there is no password.
    host: str = "127.0.0.1"
    port: int = 8000  # 0 takes any that is free.
    checkpoint: Checkpoint = "latest"  # latest, best (as evaluated during the run), previous, or a step.
    reload_seconds: int = 2  # Time between two looks for a newer checkpoint, of latest and best.
    max_batch: int = 64  # Largest number of rows for which the policy acts at once.
    max_body: int = 4_000_000  # Largest number of bytes in a request.
    allow: Allow = ()  # A module whose objects the run may name. Give it once for each module.


def main(arguments: Sequence[str]) -> int:
    options = parse(ServeOptions, arguments, prog="repertory serve")
    check_at_least(options, port=0, max_batch=1, max_body=1, reload_seconds=1)
    try:
        import uvicorn

        from framework.export.server import PolicyService
    except ImportError as error:
        raise CommandError(
            f"repertory serve needs {error.name}, which is not installed: pip install 'repertory[serve]'"
        ) from error
    load = functools.partial(load_policy, options.run, options.checkpoint, options.allow)
    follows = options.checkpoint in ("latest", "best")
    with RaisedAs(CommandError, ValueError):
        service = PolicyService(
            load, options.max_batch, options.max_body, options.reload_seconds if follows else None
        )
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    place = f"--host {options.host} --port {options.port}: "
    with RaisedAs(CommandError, (OSError, OverflowError), place):
        listener = socket.create_server((options.host, options.port), family=family, backlog=2048)
    interrupts.clean_up_first()
    config = uvicorn.Config(service.app, log_level="warning", timeout_graceful_shutdown=10)
    print(f"Serving {options.run} on http://{options.host}:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(config).run(sockets=[listener])
    return 0
