"""Flows over the nodes of a program give the same items on every engine."""

from __future__ import annotations

import collections
import functools
import os
import pathlib
import re
import signal

import pytest

import launch
from framework.flow import Flow, Node, Par, StepError, alternate, concurrent, worker_node
from framework.flow.nodes import Host


class Worker:
    def __init__(self, seed: int) -> None:
        self.state = seed
        self.version = 0
        self.made = 0

    def sample(self) -> tuple[int, int, int]:
        self.made += 1
        self.state = (1103515245 * self.state + 12345) % 2**31
        return self.made, self.version, self.state

    def set_version(self, version: int) -> None:
        self.version = version

    def fail(self) -> None:
        raise ValueError("no luck")


class Driver:
    """Takes the items of each plan until there are enough, then stops the program with the results."""

    def __init__(self, plans, *clients) -> None:
        self._nodes = [Node(client, f"worker-{i}") for i, client in enumerate(clients)]
        self._plans, self._results = dict(plans), []

    def step(self) -> None:
        for name, plan in self._plans.items():
            for seed, node in enumerate(self._nodes):
                node.call(Worker.__init__, seed).result()
            self._results.append((name, next(item for item in plan(self._nodes) if item is not None)))
        launch.stop(dict(self._results))

    run = step


def run(plans, engine: str, num_workers: int = 2, **options):
    program = launch.Program("flow")
    with program.group("worker"):
        workers = [program.add_node(worker_node(Worker, seed)) for seed in range(num_workers)]
    program.add_node(launch.PyClassNode(Driver, plans, *workers), label="driver")
    return launch.launch(program, engine=engine, **options)


def ages(nodes, depth: int):
    """The plan of the staleness of 120 items: messages sent to the node minus the version in the item."""
    sent: collections.Counter[str] = collections.Counter()
    found = []

    def note(pair):
        node, (_, version, _) = pair
        found.append((node.name, sent[node.name] - version))
        sent[node.name] += 1
        node.call(Worker.set_version, sent[node.name])
        return found if len(found) == 120 else None

    return Par(nodes, Worker.sample).unordered(depth, source=True).map(note)


def ages_of_rounds(nodes):
    found = []

    def note(round_):
        found.extend(note.sent - version for _, version, _ in round_)
        note.sent += 1
        for node in nodes:
            node.call(Worker.set_version, note.sent)
        return found if len(found) == 120 else None

    note.sent = 0
    return Par(nodes, Worker.sample).sync().map(note)


def batches_of_rounds(nodes):
    return Par(nodes, Worker.sample).sync().batch(20).map(list)


def several_sources(nodes):
    first = Par(nodes[:1], Worker.sample).unordered().map(lambda item: ("a", item[0]))
    second = Par(nodes[1:], Worker.sample).unordered().map(lambda item: ("b", item[0]))
    found = collections.defaultdict(list)

    def note(item):
        found[item[0]].append(item[1])
        return dict(found) if all(len(found[name]) >= 20 for name in "ab") else None

    return concurrent(first, second, ahead=1).map(note)


def weighted(nodes):
    flows = [Par([node], Worker.sample).unordered(1).map(lambda _, i=i: i) for i, node in enumerate(nodes)]
    return alternate(*flows, weights=[3, 1]).batch(16)


PLANS = {
    **{f"staleness {depth}": functools.partial(ages, depth=depth) for depth in (0, 1, 2)},
    "staleness of rounds": ages_of_rounds,
    "rounds": batches_of_rounds,
    "several sources": several_sources,
    "weighted": weighted,
    "an iterable": lambda nodes: Flow.of(range(10)).batch(10),
}


def test_plans_give_the_same_items_on_every_engine(program_engine):
    found = run(PLANS, program_engine)
    for depth in (0, 1, 2):
        of_depth = found[f"staleness {depth}"]
        for name in {name for name, _ in of_depth}:
            of_node = [age for each, age in of_depth if each == name]
            assert of_node == [min(i, depth) for i in range(len(of_node))]
    assert found["staleness of rounds"] == [0] * 120
    assert found["rounds"] == run({"rounds": batches_of_rounds}, "serial")["rounds"]
    for made in found["several sources"].values():
        assert made == list(range(1, len(made) + 1))
    assert found["weighted"] == [0, 0, 0, 1] * 4
    assert found["an iterable"] == list(range(10))


def test_an_error_in_a_step_arrives_with_its_node_and_traceback(program_engine):
    with pytest.raises(launch.NodeError) as caught:
        run({"fails": lambda nodes: Par(nodes[1:], Worker.fail).sync()}, program_engine)
    error = caught.value.__cause__
    assert isinstance(error, StepError) and error.node == "worker-1"
    assert "in fail" in caught.value.traceback and "no luck" in str(error)


class Fragile(Worker):
    def die_once(self, path: str) -> tuple[int, int]:
        """Kills this process in its third step, the first time."""
        self.made += 1
        if self.made == 3 and not os.path.exists(path):
            open(path, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid(), self.made


@pytest.mark.parametrize("depth", [0, 2])
def test_a_killed_worker_is_restarted_and_the_flow_goes_on(tmp_path, depth):
    path = str(tmp_path / "died")

    def plan(nodes):
        found = collections.defaultdict(list)
        first = {node.name: node.call(lambda _: os.getpid()).result() for node in nodes}

        def note(pair):
            node, (pid, made) = pair
            found[node.name].append((pid != first[node.name], made))
            return dict(found) if (True, 5) in found[node.name] else None

        made = Par(nodes, lambda worker: Fragile.die_once(worker, path))
        return made.unordered(depth, source=True).map(note)

    found = run({"restarted": plan}, "processes", restarts={"worker": 1})["restarted"]
    assert os.path.exists(path)
    (killed,) = (items for items in found.values() if (True, 5) in items)
    # Answers that the process had not delivered are lost with it, and asked for again.
    before = [made for again, made in killed if not again]
    assert before == [1, 2][: len(before)]
    assert killed[len(before) :] == [(True, made) for made in range(1, 6)]


@pytest.mark.parametrize("engine", ["serial", "threads"])
def test_the_page_on_flows(engine, capsys):
    page = pathlib.Path(__file__).parents[3] / "docs" / "flow.md"
    code, *_ = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(compile(code.replace("serial", engine), str(page), "exec"), {"__name__": "page"})
    assert capsys.readouterr().out == "[1, 3, 5]\n"


def test_torch_has_one_thread_in_a_node(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    Host(Worker, 0)
    assert torch.get_num_threads() == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    Host(Worker, 0)
    assert torch.get_num_threads() == 1
