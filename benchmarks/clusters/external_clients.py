"""PPO learns CartPole from eight clients in JavaScript, one of which is killed and comes back.

python -m benchmarks.clusters.external_clients   # needs node; ends with 1 below a mean return of 475

The clients are `examples/external_cartpole.js`, one process each. Prints a line of JSON: the best mean return
of the episodes in a row of the actor, and how many episodes the killed client cut short.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLIENTS, STEPS, FLOOR, PATIENCE = 8, 200_000, 475.0, 900.0  # Env steps, return, seconds.
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "external_cartpole.js"


def main() -> int:
    if shutil.which("node") is None:
        print("skipped: node is not installed")
        return 0
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory())) / "run"
        held = ends.enter_context(socket.socket())  # Keeps the port for the listeners that share it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]

        def start(*command: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(command, stdout=sys.stderr)
            ends.callback(process.wait, 60)
            ends.callback(process.terminate)
            return process

        flags = f"""--environment external:tcp://127.0.0.1:{port} --num-actors 1 --envs-per-actor {CLIENTS}
            --max-env-steps {STEPS} --evaluate-period None --target-return None --seed 1"""
        train = [sys.executable, "-m", "framework.commands", "train", "ppo", "--directory", str(folder)]
        program = start(*train, *flags.split())
        token = folder / "clients.token"
        until(token.exists, program)
        clients = [start("node", str(EXAMPLE), str(port), str(token)) for _ in range(CLIENTS)]
        until(lambda: any(row["env_steps"] > STEPS / 4 for row in rows(folder)), program)
        clients[0].kill()
        start("node", str(EXAMPLE), str(port), str(token))
        until(lambda: False, program)
        found = [row for row in rows(folder) if row.get("episode_return") is not None]
        best = max(row["episode_return"] for row in found)
        dropped = max(row.get("dropped_episodes", 0) for row in rows(folder))
        print(json.dumps({"return": best, "floor": FLOOR, "dropped_episodes": dropped}))
        return int(program.wait() != 0 or best < FLOOR or dropped < 1)


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of the actor so far."""
    with contextlib.suppress(FileNotFoundError):
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row for row in found if row["label"].startswith("actor")]
    return []


def until(holds: Callable[[], bool], program: subprocess.Popen[bytes]) -> None:
    """Waits until something holds, or the program has ended."""
    deadline = time.monotonic() + PATIENCE
    while not holds() and program.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"The program was not done in {PATIENCE:g} s.")
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
