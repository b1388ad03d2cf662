"""Everything that needs a GPU, measured and tested by one command that ends within nine minutes.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --device cpu --tiny --budget 120      # does it run? The figures say nothing.

It needs this repository, Python and pip. What is missing is installed: into the environment of this Python if
it is a virtual one, else into `.venv-gpu`, which also sees the machine's packages. Parts that lack a package
are left out. Each part is a process with a limit of its own, so that one that crashes or takes too long costs
its rows only. `gpu.json` and `gpu.md` in `--output` are written after each part.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
# What some parts need in addition to what `setup.py` asks for.
ALSO = ("pytest>=8", "pytest-timeout", "hypothesis", "tensordict")
AGENTS = ("dqn", "impala", "impala_deep", "ppo", "sac", "td3")
Row = dict[str, Any]
PATHS = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
ENVIRONMENT = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
MODULES = ("ale_py", "pytest", "tensordict")
FACTS = f"""
import importlib.util, json, sys, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
modules = [name for name in {MODULES} if importlib.util.find_spec(name)]
versions = ["torch", torch.__version__, "CUDA", str(torch.version.cuda), "Python", sys.version.split()[0]]
print(json.dumps({{"gpus": gpus, "modules": modules, "versions": " ".join(versions)}}))
"""


@dataclass(frozen=True)
class Part:
    """A process and its rows.

    Attributes:
      name: of the part.
      seconds: that it takes at most, if there are as many.
      command: its seconds and the file for its rows, to the arguments of Python.
      read: that file and its output, to its rows.
      left_out: why it is left out; empty if it is not.
    """

    name: str
    seconds: float
    command: Callable[[float, pathlib.Path], Sequence[Any]]
    read: Callable[[pathlib.Path, str], list[Row]] = lambda path, output: json.loads(path.read_text())
    left_out: str = ""


def parts(device: str, tiny: bool, facts: dict[str, Any]) -> list[Part]:
    """The parts in their order. What compiles comes last, since it may take long."""
    needs = {name: "" if name in facts["modules"] else f"{name} is not installed" for name in MODULES}
    agents, some = (["td3"], ["td3"]) if tiny else (AGENTS, ["dqn", "ppo", "sac"])
    one_gpu = "" if device == "cpu" or len(facts["gpus"]) > 1 else "there is one GPU"

    def learners(names: Sequence[str], ways: Sequence[str], processes: int = 1) -> Any:
        flags = ["--device", device, "--seconds", 0.05 if tiny else 0.4, "--turns", 3, *["--tiny"] * tiny]
        flags += ["--agents", *names, "--ways", *ways, "--processes", processes]
        return lambda seconds, path: ["-m", "benchmarks.learner.step", *flags, "--json", path]

    def each_learner(*ways: str, left_out: str = "") -> list[Part]:
        return [
            Part("learner steps", 22, learners([name], ways), left_out=left_out and f"{name}, {left_out}")
            for name in agents
        ]

    def prefetch(seconds: float, path: pathlib.Path) -> list[Any]:
        size = ["--items", 50, "--batch-size", 4, "--seconds", 0.2] if tiny else ["--seconds", 1.5]
        flags = ["--device", device, "--prefetch", 0, 2, *size]
        return ["-m", "benchmarks.learner.prefetch", *flags, "--json", path]

    def inference(seconds: float, path: pathlib.Path) -> list[Any]:
        size = ["--actors", 1, "--envs", 2, "--seconds", 1] if tiny else ["--actors", 12, "--envs", 16]
        game = "gymnasium:CartPole-v1" if tiny or needs["ale_py"] else "atari:Pong"
        flags = ["--device", device, "--environment", game, "--hidden", 512, "--modes", "local", "server"]
        return ["-m", "benchmarks.programs.inference", *flags, *size, "--json", path]

    def pong(seconds: float, path: pathlib.Path) -> list[Any]:
        row = ["pong", "repertory IMPALA, float32"]
        row = row if device == "cpu" else ["pong-gpu", "12 actors, a learner on a GPU"]
        window = 2.0 if tiny else max(2.0, min(110.0, seconds - 40.0))
        flags = ["--seconds", window, "--warm-up", 0 if tiny else 10]
        return ["benchmarks/throughput.py", "--one", *row, *flags]

    def tests(seconds: float, path: pathlib.Path) -> list[Any]:
        files = [file for file in (ROOT / "tests").rglob("test_*.py") if "cuda.is_av" in file.read_text()]
        flags = ["-q", "-p", "no:cacheprovider", "--tb=line", "-k", "cuda or gpu or configured_device"]
        return ["-m", "pytest", *flags, *sorted(files)]

    return [
        Part("tests that need a GPU", 100, tests, read_tests, needs["pytest"]),
        *each_learner("eager", "cuda_graph"),
        Part("learners, NCCL", 25, learners(some, ["group"])),
        Part("learners, NCCL", 50, learners(some, ["group"], 2), left_out=one_gpu),
        Part("prefetch", 25, prefetch),
        Part("inference", 45, inference, read_inference),
        Part("IMPALA in Pong", 25 if tiny else 160, pong, read_pong, needs["ale_py"]),
        *each_learner("compile"),
        *each_learner("leanrl", left_out="it needs a GPU" if device == "cpu" else needs["tensordict"]),
    ]


def read_tests(path: pathlib.Path, output: str) -> list[Row]:
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|skipped|error)", output)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    note = ", ".join([f"{count} {what}" for what, count in counts.items() if what != "passed"] + failed)
    row = {"row": "pytest", "value": counts.get("passed", 0), "unit": "passed", "note": note}
    return [row] if counts else []


def read_inference(path: pathlib.Path, output: str) -> list[Row]:
    rows = json.loads(path.read_text())["rows"]
    named = [{"row": row["mode"], "value": row["steps_per_second"], "unit": "env steps/s"} for row in rows]
    return [named[0], *[{**row, "of": named[0]["row"], "of_value": named[0]["value"]} for row in named[1:]]]


def printed(output: str) -> dict[str, Any]:
    """The last line of JSON: warnings may come after it."""
    found: dict[str, Any] = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
    return found


def read_pong(path: pathlib.Path, output: str) -> list[Row]:
    found = printed(output)
    units = {"env steps/s": found["seconds"], "env steps/CPU-s": found["cpu"]}
    return [{"row": "IMPALA", "value": found["steps"] / each, "unit": unit} for unit, each in units.items()]


def start(command: Sequence[Any], log: pathlib.Path) -> subprocess.Popen[bytes]:
    with log.open("w") as file:
        words = [str(each) for each in command]
        # A session of its own, so that its processes end with it.
        options: Any = {"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True}
        return subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, **options)


def end(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The code with which it ends within the seconds; None if it is cut off."""
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(max(0.0, seconds))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    return None


def run(command: Sequence[Any], seconds: float, log: pathlib.Path) -> tuple[str, str]:
    """The output of a command, and what was wrong with it; empty if nothing was."""
    code = end(start(command, log), seconds)
    output = log.read_text(errors="replace")
    last = (output.strip().splitlines() or ["no output"])[-1]
    trouble = "" if code == 0 else f"ended with {code}: {last[:200]}"
    return output, f"cut off after {seconds:.0f} s" if code is None else trouble


def rows_of(part: Part, python: str, seconds: float, folder: pathlib.Path, number: int) -> list[Row]:
    """The rows of a part, however it ends."""
    if part.left_out:
        return [{"row": "left out", "note": part.left_out}]
    path = folder / f"part{number}.json"
    path.unlink(missing_ok=True)  # That of another run.
    output, trouble = run([python, *part.command(seconds, path)], seconds, folder / f"part{number}.log")
    try:
        rows = part.read(path, output)
    except (OSError, ValueError, LookupError):
        rows = []
    return [*rows, {"row": "trouble", "note": trouble}] if trouble or not rows else rows


def table(facts: dict[str, Any], rows: Sequence[Row]) -> str:
    """The rows as markdown. A ratio is the value divided by the one two columns before it."""
    lines = [f"{', '.join(facts['gpus']) or 'no GPU'}, {facts['versions']}", ""]
    lines += ["| part | row | value | unit | divided by | which is | ratio | remarks |", "|---" * 8 + "|"]
    for row in rows:
        value, other = row.get("value"), row.get("of_value")
        numbers = [f"{each:,.1f}" if each is not None else "" for each in (value, other)]
        ratio = f"{value / other:.2f}" if value is not None and other else ""
        cells = [row["part"], row["row"], numbers[0], row.get("unit", "")]
        cells += [row.get("of", ""), numbers[1], ratio, row.get("note", "").replace("|", "/")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def lacking(wanted: Sequence[str]) -> list[str]:
    """Those of the requirements that this interpreter does not fulfill."""
    from pip._vendor.packaging.requirements import Requirement

    missing = []
    for text in wanted:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            there = requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
        except metadata.PackageNotFoundError:
            there = False
        missing += [] if there else [text]
    return missing


def install(seconds: float, folder: pathlib.Path) -> tuple[str, str]:
    """An interpreter with what is needed, as far as pip could install it; and what went wrong."""
    requirements = runpy.run_path(str(ROOT / "constraints/environment.py"))["requirements"]
    try:
        wanted = [lacking(requirements(ROOT, [])), lacking([*requirements(ROOT, ["atari"]), *ALSO])]
    except ImportError:
        return sys.executable, "pip is missing, so nothing was installed"
    python, troubles, ends = sys.executable, [], time.monotonic() + seconds
    if any(wanted) and sys.prefix == sys.base_prefix:
        python = str(ROOT / ".venv-gpu/bin/python")
        flags = ["--system-site-packages", "--without-pip", ROOT / ".venv-gpu"]
        troubles.append(run([sys.executable, "-m", "venv", *flags], 60, folder / "venv.log")[1])
    for number, missing in enumerate(wanted):
        if missing:
            pip = [sys.executable, "-m", "pip", "--python", python, "--retries", 1, "--timeout", 15]
            pip += ["install", *missing]
            limit = ends - time.monotonic()
            troubles.append(run(pip, limit, folder / f"pip{number}.log")[1])
    return python, "; ".join(filter(None, troubles))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see whether it runs")
    parser.add_argument("--budget", type=float, default=520.0, help="seconds for everything")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "runs/gpu", help="folder")
    options = parser.parse_args(arguments)
    ends = time.monotonic() + options.budget
    folder = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    python, trouble = install(options.budget / 2, folder)
    output, failed = run([python, "-c", FACTS], 60, folder / "facts.log")
    if failed:
        sys.exit(f"There is no torch: {failed} {trouble}")
    facts = printed(output)
    if options.device == "cuda" and not facts["gpus"]:
        sys.exit(f"There is no GPU for {facts['versions']}; --device cpu --tiny shows whether this runs.")
    rows: list[Row] = [{"part": "installing", "row": "trouble", "note": trouble}] if trouble else []
    todo = parts(options.device, options.tiny, facts)
    # While nothing is timed, the other cores fill the compiler's cache.
    ahead, compiled_at = [], time.monotonic() + 0.2 * options.budget
    if options.device == "cuda" and (os.cpu_count() or 1) > len(AGENTS):
        for name in AGENTS:
            flags = ["--device", "cuda", "--ways", "leanrl", "compile", "--seconds", 0, "--turns", 1]
            command = [python, "-m", "benchmarks.learner.step", *flags, "--agents", name]
            ahead.append(start(command, folder / f"ahead-{name}.log"))
    for number, part in enumerate(todo):
        # What a part leaves over is for the parts after it.
        asked = sum(each.seconds for each in todo[number:] if not each.left_out) or 1.0
        longer = 4.0 if options.tiny else 1.0  # A machine without a GPU may be slow and busy.
        seconds = part.seconds * min(longer, (ends - time.monotonic()) / asked)
        print(f"{part.name}: {part.left_out or f'{seconds:.0f} s at most'}", flush=True)
        rows += [{"part": part.name, **row} for row in rows_of(part, python, seconds, folder, number)]
        while ahead:
            end(ahead.pop(), compiled_at - time.monotonic())
        (folder / "gpu.json").write_text(json.dumps({**facts, "rows": rows}, indent=1))
        (folder / "gpu.md").write_text(table(facts, rows))
    print(table(facts, rows))


if __name__ == "__main__":
    main()
