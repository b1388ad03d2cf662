"""Puts one fault after the other into a copy of the code: the nearest tests must fail for each.

```console
$ python tests/mutants.py                        # all of tests/mutants.yaml
$ python tests/mutants.py --only 'vtrace|wake'   # those whose name or file matches
$ python tests/mutants.py --sample 20            # 20 of them, in a quarter of an hour
```
"""

import argparse
import concurrent.futures
import datetime
import importlib
import itertools
import json
import multiprocessing
import os
import queue
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".yaml")
COPIED = ("framework", "agents", "launch", "tests", "examples", "pyproject.toml", "setup.py", "README.md")
# Tests run in forks of one process that has imported these.
PRELOADED = ("torch", "numpy", "tree", "zmq", "psutil", "msgpack", "cloudpickle", "dm_env", "hypothesis")
TIMEOUT_S = 60.0  # A set of tests that takes longer hangs, which is a failure.
LEAST_SHARE = 0.95


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str

    def apply(self, text: str) -> str:
        """Returns the text of the file with the fault."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: got {count} places in {self.file}, expected 1. Adapt the list.")
        return text.replace(self.old, self.new)


def read_mutants(path: Path = LIST) -> list[Mutant]:
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [
        Mutant(name, group["file"], change["old"], change["new"], group["tests"])
        for group in groups
        for name, change in group["mutants"].items()
    ]


def _run_tests(folder: str, tests: str, output: str) -> None:
    """Runs pytest on a copy of the code, in a process of its own, and exits with its code."""
    os.setsid()  # What the tests leave behind is killed with this process.
    descriptor = os.open(output, os.O_WRONLY)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    os.environ.update(PYTHONPATH=folder, CI="1")  # With CI, a property that fails is not shrunk.
    sys.path.insert(0, folder)
    sys.argv = ["pytest"]
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:cpu_budget"]
    sys.exit(importlib.import_module("pytest").main([*options, *shlex.split(tests)]))


class Copy:
    """A copy of the code, in which one fault at a time is tested."""

    forks = multiprocessing.get_context("forkserver")
    _times = itertools.count(1_000_000_000)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / name)

    def passes(self, tests: str, timeout_s: float) -> tuple[bool, str]:
        """Runs tests; returns whether all pass, and the end of the output."""
        with tempfile.NamedTemporaryFile() as output:
            process = self.forks.Process(target=_run_tests, args=(str(self._folder), tests, output.name))
            process.start()
            process.join(timeout_s)
            if process.is_alive() and process.pid:
                os.killpg(process.pid, signal.SIGKILL)
                process.join()
            return process.exitcode == 0, output.read().decode(errors="replace")[-3000:]

    def kills(self, mutant: Mutant, timeout_s: float) -> bool:
        """Whether the tests of a fault fail with it."""
        path = self._folder / mutant.file
        text = path.read_text(encoding="utf-8")
        try:
            self._write(path, mutant.apply(text))
            return not self.passes(mutant.tests, timeout_s)[0]
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # Python takes compiled code for current if the source has the same size and second.
        when = next(self._times)
        os.utime(path, (when, when))


def run(mutants: list[Mutant], jobs: int) -> list[dict[str, object]]:
    """Tests all mutants in `jobs` copies; returns a record of each."""
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    groups: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        groups.setdefault(mutant.tests, []).append(mutant)

    def test(tests: str) -> list[dict[str, object]]:
        copy = copies.get()
        for _ in range(2):  # One that fails by chance must not end the run.
            began = time.monotonic()
            passed, output = copy.passes(tests, 10 * TIMEOUT_S)
            if passed:
                break
        else:
            print(f"{output}\n{tests}: got a failure without any fault, expected none.", flush=True)
        limit, results = max(TIMEOUT_S, 3 * (time.monotonic() - began)), []
        for mutant in groups[tests]:
            began = time.monotonic()
            end = "no test" if not passed else "killed" if copy.kills(mutant, limit) else "SURVIVED"
            seconds = round(time.monotonic() - began, 1)
            print(f"{end:8} {seconds:6.1f} s  {mutant.name}  ({mutant.file})", flush=True)
            results.append({"name": mutant.name, "file": mutant.file, "end": end, "seconds": seconds})
        copies.put(copy)
        return results

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for number in range(jobs):
            copies.put(Copy(Path(folder, str(number))))
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            return [result for results in pool.map(test, groups) for result in results]


def sample(mutants: list[Mutant], size: int, seed: str) -> list[Mutant]:
    """Draws some of the mutants; the seed says which."""
    chosen = random.Random(seed).sample(mutants, min(size, len(mutants)))
    print(f"{len(chosen)} of {len(mutants)} mutants; this option chooses them again: --seed {seed}")
    return sorted(chosen, key=mutants.index)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tests whether the tests see faults.")
    parser.add_argument("--only", default="", help="regular expression of names and files")
    parser.add_argument("--jobs", type=int, default=2, help="copies that are tested at the same time")
    parser.add_argument("--record", type=Path, help="file for the results as JSON")
    parser.add_argument("--sample", type=int, metavar="N", help="run N of them, drawn at random")
    parser.add_argument("--seed", help="which are drawn (default: another choice for each day and commit)")
    parser.add_argument("--list", type=Path, default=LIST, help="file of the mutants")
    arguments = parser.parse_args()
    mutants = [
        each for each in read_mutants(arguments.list) if re.search(arguments.only, f"{each.name} {each.file}")
    ]
    if arguments.sample:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        )
        day = datetime.date.today().isoformat()
        mutants = sample(mutants, arguments.sample, arguments.seed or f"{day}-{commit.stdout.strip()}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    Copy.forks.set_forkserver_preload(list(PRELOADED))
    began = time.monotonic()
    results = run(mutants, arguments.jobs)
    killed = sum(result["end"] == "killed" for result in results)
    print(f"{killed} of {len(results)} killed in {(time.monotonic() - began) / 60:.1f} minutes")
    for result in results:
        if result["end"] != "killed":
            print(f"{result['end']}: {result['name']} ({result['file']})")
    if arguments.record:
        arguments.record.write_text(json.dumps({"killed": killed, "mutants": results}, indent=1) + "\n")
    sys.exit(killed < LEAST_SHARE * len(results))


if __name__ == "__main__":
    main()
