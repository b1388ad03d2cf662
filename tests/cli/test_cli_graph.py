"""`repertory graph`: pictures of graphs, made by hand and of every agent."""

import itertools
import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch

from agents.dqn import DQN
from framework.commands import building
from framework.commands.graph import as_text
from framework.commands.graph_svg import Group, as_svg
from framework.commands.options import CommandError
from framework.runs.registry import agent_names

# One agent for each form of a graph.
FORMS = ("apex", "bc", "dqfd", "dqn", "impala", "maml", "ppo", "ppo_dqn", "random_actions")


class TestGraph:
    GROUPS = [
        Group("replay", "ReplayNode", 1, ()),
        Group("learner", "CourierNode(LearnerWorker)", 1, ("replay",)),
        Group("actor", "CourierNode(<Actor>)", 2, ("replay", "learner")),
    ]

    def test_text(self):
        assert as_text("dqn", self.GROUPS) == (
            "program dqn\n"
            "  replay    ReplayNode\n"
            "  learner   CourierNode(LearnerWorker)  ->  replay\n"
            "  actor x2  CourierNode(<Actor>)        ->  replay, learner"
        )

    def test_what_train_refuses_is_not_drawn(self, repertory):
        code, out, err = repertory("graph", "dqn", "--environment", "gymnasium:Pendulum-v1")
        assert code == 2 and not out and "DQN cannot act in this environment: action spec" in err

    @pytest.mark.parametrize(
        "name", [pytest.param(n, marks=() if n in FORMS else pytest.mark.release) for n in agent_names()]
    )
    def test_of_every_agent_data_runs_to_the_right_and_no_arrow_behind_a_box_or_text_over_its_edge(
        self, repertory, tmp_path, name
    ):
        code, out, _ = repertory("graph", name, "--num-actors", "3", "--svg", tmp_path / "g.svg")
        assert code == 0 and "(_" not in out
        assert re.search(r"actor x3 .*->  (replay|learner)", out) and "evaluator" in out
        root = ElementTree.parse(tmp_path / "g.svg").getroot()
        space = "{http://www.w3.org/2000/svg}"
        rects = [rect for rect in root.iter(f"{space}rect") if rect.get("x") and rect.get("fill") != "none"]
        boxes = [tuple(float(rect.get(key)) for key in ("x", "y", "width", "height")) for rect in rects]
        places = {text.text: float(text.get("x")) for text in root.iter(f"{space}text")}
        in_order = [places[each] for each in ("actor x3", "replay", "learner", "evaluator") if each in places]
        assert name == "random_actions" or sorted(set(in_order)) == in_order
        for path in root.iter(f"{space}path"):
            if not path.get("marker-end"):
                continue
            numbers = [float(number) for number in re.findall(r"-?[\d.]+(?:e-?\d+)?", path.get("d"))]
            corners, t = np.array(numbers).reshape(-1, 2), np.linspace(0, 1, 50)[:, None]
            for p, q in itertools.pairwise(corners):
                line = (1 - t) * p + t * q
                for x, y, width, height in boxes:
                    middle = (x + width / 2, y + height / 2)
                    assert not (abs(line - middle) < (width / 2 - 6, height / 2 - 6)).all(1).any(), (p, q)
        small = [text.text or "" for text in root.iter(f"{space}text") if text.get("font-size") == "10"]
        assert boxes[0][2] >= 5.5 * max(map(len, small))

    def test_a_circle_of_calls_can_be_drawn(self):
        groups = [Group("a", "A", 1, ("b",)), Group("b", "B", 1, ("a",)), Group("c", "C", 1, ("c",))]
        root = ElementTree.fromstring(as_svg("circle", groups))
        texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
        assert {"a", "b", "c"} <= texts


WATCHED = """
import launch
from agents.dqn import DQN

def watch(learners, replay):
    pass

class Watched(DQN):
    def build(self, graph):
        super().build(graph)
        replay = graph.add_replay(name="other_replay")
        learner = graph.add_learner(replay, name="other_learner")
        graph.add_node("watcher", launch.PyNode(watch, [learner], replay=replay))
"""


def test_what_build_made_is_drawn_with_its_own_nodes(repertory, tmp_path, monkeypatch):
    (tmp_path / "watched.py").write_text(WATCHED)
    monkeypatch.syspath_prepend(tmp_path)
    flags = ("--num-actors", "4", "--replay-shards", "2", "--variable-sources", "2")
    code, text, _ = repertory("graph", "watched:Watched", *flags)
    assert code == 0
    assert re.search(r"watcher +PyNode\(watch\) +-> +other_learner, other_replay\n", text)
    assert re.search(r"\n +replay x2 +ReplayNode\(make_tables\)\n", text) and "other_replay x2" in text
    assert re.search(r"actor x4 .*-> +replay, variable_source, ", text)
    code, mermaid, _ = repertory("graph", "watched:Watched", *flags, "--format", "mermaid")
    ids = {title: node for node, title in re.findall(r'  (n\d+)\["([^<]+)<br/>', mermaid)}
    arrows = set(re.findall(r"  (n\d+) --> (n\d+)", mermaid))
    assert code == 0 and "flowchart TD" in mermaid
    assert {(ids["watcher"], ids["other_learner"]), (ids["watcher"], ids["other_replay x2"])} <= arrows
    assert len(arrows) == sum(
        len(line.split("->")[1].split(",")) for line in text.splitlines() if "->" in line
    )
    code, svg, _ = repertory("graph", "watched:Watched", *flags, "--format", "svg")
    texts = {text.text for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}
    assert code == 0 and {"watcher", "other_learner", "PyNode(watch)"} <= texts


def test_devices_and_what_crosses_between_them_are_shown(repertory, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    flags = ("--devices", "q_network.encoder=cuda:0", "--batch-size", "10")
    code, text, _ = repertory("graph", "dqn", *flags)
    # Four numbers to the encoder and back: of each observation, and twice of each next one.
    placed = "on cpu, q_network.encoder on cuda:0; 960 bytes cross per learner step"
    assert code == 0 and re.search(rf"\n  learner .*\n +{placed}\n", text)
    for form in ("svg", "mermaid"):
        code, text, _ = repertory("graph", "dqn", *flags, "--format", form)
        assert code == 0 and placed in text
    code, _, error = repertory("graph", "dqn", "--devices", "torso=cuda:0")
    assert code == 2 and "devices: got 'torso', expected the beginning" in error


CUDA = "from agents import dqn; make = lambda: dqn.DQN(dqn.DQNConfig(device='cuda'))"


@pytest.mark.parametrize("agent, error", [("maml", "a TaskEnvironment"), ("on_gpu:make", "see.*'cpu'")])
def test_what_train_refuses_is_not_drawn(repertory, tmp_path, monkeypatch, agent, error):
    (tmp_path / "on_gpu.py").write_text(CUDA)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for command, *flags in (("graph",), ("train", "--directory", tmp_path / "run")):
        code, out, err = repertory(command, agent, "--environment", "gymnasium:CartPole-v1", *flags)
        assert code in (1, 2) and not out and re.search(error, err)


class _Faulty(DQN):
    def make_networks(self, spec):
        raise self.error


@pytest.mark.parametrize("kind", [IndexError, RuntimeError, KeyError, TypeError, ValueError])
def test_a_fault_in_an_agents_own_code_is_told_with_its_place(kind, capsys):
    agent = _Faulty()
    agent.error = kind("a fault of mine")
    with pytest.raises(CommandError, match=f"_Faulty cannot act in this environment: {kind.__name__}"):
        building.check_agent(agent, None)
    assert "in make_networks" in capsys.readouterr().err
