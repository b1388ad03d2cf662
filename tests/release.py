"""What a release must pass, suite by suite, and the record of what has passed.

    python tests/release.py run [SUITE …]   runs these; without names, those that are stale
    python tests/release.py stale           names the stale suites
    python tests/release.py check           fails if a suite is stale; `make tag` calls it

`tests/release.json` is the record, which is committed: for each suite, the commit, a hash of the files on
which the suite depends, seconds, and counts of tests. A suite is stale if the files at HEAD have another
hash. It runs what is committed only, and a suite that fails leaves the record as it is.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "release.json"
LIBRARY = ("framework", "agents", "launch", "setup.py")
HARNESS = tuple(f"results/{file.name}" for file in sorted((ROOT / "results").glob("*.py")))
TESTS = ("tests", ":!tests/release.json", "pyproject.toml")
ON_REVERB = "tests/conformance/replay tests/replay/test_reverb_backend.py"
ON_ENGINES = "tests/conformance/launch tests/conformance/flow tests/conformance/programs"
ON_RAY = (
    "tests/conformance/launch/test_ray_cluster.py",
    "tests/conformance/launch/test_ray_jobs.py",
    "tests/conformance/programs/test_ray_programs.py",
)
COUNT = re.compile(r"(\d+) (passed|failed|skipped)\b")
MUTANTS = re.compile(r"(\d+) of (\d+) killed")
RATIO = re.compile(r"\| (.+?) \| [\d,]+ \| [\d,]+ \| ([\d.]+) \| (.+?) \|")
CPU_SECONDS = re.compile(r"([\d,]+) CPU seconds; the ")


@dataclass(frozen=True)
class Suite:
    """Commands of the shell, which run one after the other, and the files on which their outcome depends."""

    commands: tuple[str, ...]
    paths: tuple[str, ...]


def _on_python(version: str) -> Suite:
    digits = version.replace(".", "")
    where = f'PYTHON="$(make -s python{version})" VENV=.venv-py{digits}'
    commands = (f"make test {where}", f"make train {where} RUN=$(mktemp -d)/run")
    return Suite(
        commands, (*LIBRARY, *TESTS, "examples", "benchmarks", *HARNESS, f"constraints/py{digits}.txt")
    )


def _on_back_end(name: str, *commands: str) -> Suite:
    return Suite(commands, (*LIBRARY, *TESTS, f"constraints/{name}.txt"))


SUITES: dict[str, Suite] = {
    "python3.10": _on_python("3.10"),
    "python3.12": _on_python("3.12"),
    "python3.13": _on_python("3.13"),
    "release": _on_back_end(
        "py311", ".venv/bin/python -m pytest -n 2 -m release tests --ignore tests/backends"
    ),
    # W&B and EnvPool are no part of the environment of `make test`.
    "extras": _on_back_end(
        "py311",
        ".venv/bin/python constraints/environment.py .venv-extras --extras test wandb envpool",
        ".venv-extras/bin/python -m pytest -m '' tests/loggers/test_loggers_wandb.py "
        "tests/environments/test_environments_envpool.py",
    ),
    # TensorFlow and JAX are no part of it either. A process that has TensorFlow has its back end of Keras.
    "keras": _on_back_end(
        "py311",
        ".venv/bin/python constraints/environment.py .venv-keras --extras test keras-tensorflow keras-jax",
        ".venv-keras/bin/python -m pytest -m '' tests/backends",
        ".venv-keras/bin/python -m pytest -m '' tests/conformance/replay/test_replay_tf_data.py",
    ),
    "notebooks": Suite(
        (
            ".venv/bin/python constraints/environment.py .venv-notebooks --extras test notebooks",
            ".venv-notebooks/bin/python -m pytest -m '' tests/examples/test_examples_notebooks.py",
        ),
        (*LIBRARY, *TESTS, "examples", "constraints/py311.txt"),
    ),
    # Files with clusters of their own run in processes of their own. Hosts are namespaces, which needs root.
    "ray": _on_back_end(
        "ray",
        f".venv-ray/bin/python -m pytest -m ray {ON_ENGINES} {' '.join(f'--ignore {x}' for x in ON_RAY)}",
        *(f".venv-ray/bin/python -m pytest -m ray {each}" for each in (*ON_RAY, "tests/cluster")),
    ),
    "reverb": _on_back_end("reverb", f".venv-reverb/bin/python -m pytest -n 2 -m reverb {ON_REVERB}"),
    "deepmind": _on_back_end(
        "deepmind",
        f".venv-deepmind/bin/python -m pytest -n 2 -m launchpad {ON_ENGINES}",
        f".venv-deepmind/bin/python -m pytest -n 2 -m '' tests/conformance/deepmind {ON_REVERB}",
    ),
    "server": _on_back_end("server", ".venv/bin/python -m pytest -m '' tests/conformance/environments"),
    "mutants": _on_back_end("py311", ".venv/bin/python tests/mutants.py"),
    "pair": Suite(("make pair BASE={base}",), LIBRARY),
    "nightly": Suite(("make nightly",), (*LIBRARY, *HARNESS)),
}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def hash_of(suite: Suite) -> str:
    """A hash of the suite's files at HEAD."""
    tree = git("ls-tree", "-r", "HEAD", "--", *(path for path in suite.paths if not path.startswith(":")))
    left_out = [path.removeprefix(":!") for path in suite.paths if path.startswith(":!")]
    lines = [line for line in tree.splitlines() if line.partition("\t")[2] not in left_out]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def read_record() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def stale() -> list[str]:
    record = read_record()
    return [name for name, suite in SUITES.items() if record.get(name, {}).get("hash") != hash_of(suite)]


def run_command(command: str) -> tuple[bool, list[str]]:
    """Runs a command, shows what it prints, and returns whether it succeeded, and its lines."""
    print(f"\n##### {command}", flush=True)
    lines = []
    with subprocess.Popen(
        ["bash", "-c", command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode == 0, lines


def run(name: str) -> bool:
    suite = SUITES[name]
    begin, counts, cpu, ratios = time.monotonic(), collections.Counter[str](), 0.0, {}
    day_before = git("rev-list", "-1", "--before=1 day ago", "HEAD").strip()
    base = read_record().get(name, {}).get("commit", day_before)
    for command in suite.commands:
        passed, lines = run_command(command.replace("{base}", base))
        if not passed:
            return False
        for line in lines:
            if line.startswith("=") and " in " in line:
                counts.update({what: int(number) for number, what in COUNT.findall(line)})
            if found := MUTANTS.match(line):
                counts.update(killed=int(found[1]), mutants=int(found[2]))
            if found := RATIO.match(line):
                ratios[found[1]] = f"{found[2]} ({found[3]})"
            if found := CPU_SECONDS.search(line):
                cpu += float(found[1].replace(",", ""))
    entry = {
        "commit": git("rev-parse", "HEAD").strip(),
        "hash": hash_of(suite),
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.monotonic() - begin),
        "cpu_seconds": round(cpu),
        "counts": dict(counts),
        **({"base": base, "ratios": ratios} if ratios else {}),
    }
    record = {**read_record(), name: entry}
    ordered = {each: record[each] for each in SUITES if each in record}
    RECORD.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("action", choices=("run", "stale", "check"))
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    options = parser.parse_args()
    unknown = sorted(set(options.suites) - set(SUITES))
    if unknown:
        parser.error(f"SUITE: got {', '.join(unknown)}, expected some of {', '.join(SUITES)}.")
    names = options.suites or stale()
    if options.action != "run":
        print(f"Stale suites of `make release`: {', '.join(names) or 'none'}")
        return 1 if names and options.action == "check" else 0
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RECORD.relative_to(ROOT)}")
    if changed:
        parser.error(f"run: got a tree with changes, expected what is committed. Commit these:\n{changed}")
    os.environ["CI"] = "true"  # The limits of CI hold.
    failed = [name for name in names if not run(name)]
    if failed:
        print(f"\n##### failed: {', '.join(failed)}")
    print(f"\n{len(names) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
