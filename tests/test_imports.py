"""What imports what: one way only, and light packages stay light."""

from __future__ import annotations

import ast
import functools
import importlib
import pathlib
import re
import subprocess
import sys

import pytest
import warm_python

import framework
from agents.dqn import DQN
from agents.maml import MAML
from framework import plans, programs, workers
from framework.programs import make_program

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Leaf modules, which import nothing of the rest.
REPLAY_MAY = ("framework.replay", "framework.types", "framework.nest", "framework.interrupts")
REPLAY_MAY += ("framework.checkpoints",)
HEAVY = ["torch", "ray", "tensorflow", "reverb", "launchpad", "gymnasium", "matplotlib", "rich"]


MODULE = re.compile(r"(framework|agents)\.[\w.]*(:\w+)?")


@functools.cache
def imported_by(path: pathlib.Path, dynamic: bool = False) -> set[str]:
    """Absolute names of all modules that the file imports, anywhere in it.

    With `dynamic`, also those that its strings name: what `importlib` gets, or a table that it reads.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif dynamic and isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.update([node.value.replace(":", ".")] if MODULE.fullmatch(node.value) else [])
    return names


def wrong_imports(package, is_wrong):
    """`FILE: NAME` for each import in the package whose name is wrong."""
    paths = list((ROOT / package).rglob("*.py"))
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in paths
        for name in imported_by(path, dynamic=True)
        if is_wrong(name)
    ]


def test_imports_are_found_however_they_are_written(tmp_path):
    written = {
        "import framework.nest": "framework.nest",
        "def f():\n    from framework import nest": "framework.nest",
        "import importlib\nimportlib.import_module('framework.nest')": "framework.nest",
        "TABLE = {'replay': 'framework.nest:map'}": "framework.nest.map",
    }
    for number, (code, name) in enumerate(written.items()):
        path = tmp_path / f"{number}.py"
        path.write_text(code)
        assert name in imported_by(path, dynamic=True), code


def test_imports_point_one_way():
    assert wrong_imports("launch", lambda name: name.split(".")[0] in ("framework", "agents")) == []
    assert wrong_imports("framework", lambda name: name.split(".")[0] == "agents") == []


def test_replay_imports_nothing_else_of_the_framework():
    others = lambda name: name.startswith("framework.") and not name.startswith(REPLAY_MAY)  # noqa: E731
    assert wrong_imports("framework/replay", others) == []


def test_experiments_stand_above_all_but_the_commands():
    above = ("framework/experiments/", "framework/commands/")
    above += ("framework/__init__.py", "framework/runs/__init__.py")  # For type checkers only.
    found = wrong_imports("framework", lambda name: name.startswith("framework.experiments"))
    assert found and [each for each in found if not each.startswith(above)] == []


CORE = ("tables", "rows", "local", "remote", "server")
# What stands on top: Reverb's names and writers, a real dm-reverb, and what puts the parts together.
GUESTS = ("reverb_api", "dm_reverb", "client", "serving", "sharded", "node")


def test_the_core_of_replay_does_not_know_its_guests():
    guests = tuple(f"framework.replay.{name}" for name in GUESTS)
    is_guest = lambda name: name.startswith((*guests, "reverb", "acme", "framework.actors"))  # noqa: E731
    assert [each for part in CORE for each in wrong_imports(f"framework/replay/{part}", is_guest)] == []


def test_no_module_is_put_where_none_is():
    written = re.compile(r"sys\.modules\[[^]]+\]\s*=[^=]")
    files = [path for package in ("framework", "agents", "launch") for path in (ROOT / package).rglob("*.py")]
    assert [path for path in files if written.search(path.read_text(encoding="utf-8"))] == []


LIGHT = """
import framework, launch
from framework import replay
from framework.variables import VariableBlock
from framework.runs.checkpoints import RunCheckpointer
from framework.runs.services import Counter
from framework.programs import RunConfig; RunConfig()
from framework.commands import cli, status, stop, plot
"""


def test_light_imports_stay_light():
    code = f"""if True:
        import sys
        for line in {LIGHT.strip().splitlines()!r}:
            exec(line)
            print(line, [each for each in {HEAVY!r} if each in sys.modules])
    """
    options = {"capture_output": True, "text": True, "timeout": 60, "check": True}
    found = subprocess.run([sys.executable, "-c", code], **options)
    assert found.stdout == LIGHT.lstrip().replace("\n", " []\n")


def test_a_script_that_hides_the_package_launch_is_named(tmp_path, monkeypatch):
    (tmp_path / "launch.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "launch")
    with pytest.raises(ImportError, match=r"launch\.py, expected Repertory's package"):
        importlib.reload(framework)


def import_graph() -> dict[str, set[str]]:
    """Which module imports which, anywhere in its file: under ``TYPE_CHECKING`` and in functions too."""
    files = [path for package in ("framework", "agents", "launch") for path in (ROOT / package).rglob("*.py")]
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in files
    }
    graph = {}
    for module, path in paths.items():
        names = imported_by(path)
        # `from package import name` is an import of package.name where that is a module, else of package.
        found = {name if name in paths else name.rpartition(".")[0] for name in names}
        graph[module] = (found & paths.keys()) - {module}
    return graph


def test_no_imports_go_round_in_a_circle():
    graph = import_graph()
    assert len(graph) > 100
    while leaves := [module for module, imports in graph.items() if not imports & graph.keys()]:
        for module in leaves:
            del graph[module]
    assert not graph, f"these import each other, or what does: {sorted(graph)}"


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.parametrize(
    ("agent", "environment"), [(DQN(), "gymnasium:CartPole-v1"), (MAML(), "tasks:Navigation2D")]
)
def test_what_processes_are_forked_with_starts_no_thread(agent, environment):
    modules = make_program(agent, environment).preload
    code = f"import os; [__import__(name) for name in {modules!r}]; print(len(os.listdir('/proc/self/task')))"
    found = warm_python.run(["-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {"framework.programs.make", *agent.preload} <= set(modules)
    assert found.stdout == "1\n"


@pytest.mark.parametrize("package", [plans, programs, workers], ids=lambda package: package.__name__)
def test_packages_have_the_names_that_type_checkers_see(package):
    names = re.findall(r"import (\w+) as \1\n", pathlib.Path(package.__file__).read_text(encoding="utf-8"))
    assert len(names) >= 5 and {*names} <= {*dir(package)}
    assert [getattr(package, name).__name__ for name in names] == names


def test_names_of_programs_are_imported_when_they_are_used():
    code = (
        "import framework.programs as p; print('Session' in dir(p), hasattr(p, 'Sessions'), "
        "p.Callback is p.Callback, p.RunConfig().num_actors)"
    )
    found = warm_python.run(["-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout == "True False True 1\n", found.stderr
