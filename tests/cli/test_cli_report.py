"""`repertory report`: a page that needs no other file, and a folder from which a policy acts."""

import base64
import html.parser
import os
import re

import numpy as np
import pytest
import tree
import yaml

from framework.checkpoints import torch_part
from framework.loggers import JSONLLogger
from framework.programs import load_policy
from framework.runs.run_folder import RunFolder


class Page(html.parser.HTMLParser):
    """What a page refers to, the cells of its tables, and its open tags, which must be none."""

    def __init__(self, text):
        super().__init__()
        self.refers, self.cells, self.open = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.refers += [value for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag == "td":
            self.cells.append("")
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.cells[-1] += data


@pytest.fixture
def page(repertory, tmp_path):
    def make(*arguments):
        code, out, err = repertory("report", *arguments, "--output", tmp_path / "page.html")
        assert code == 0, err
        text = (tmp_path / "page.html").read_text()
        return text, Page(text), out

    return make


class TestPage:
    def test_has_curves_tables_settings_and_versions_in_one_file(self, make_run, page):
        runs = [make_run(name, returns=[1.0, 4.0, 3.0], seed=seed) for seed, name in enumerate("ab", 1)]
        (other := make_run("<i>c", returns=[2.0, 5.0], max_evaluation_steps=7)).write_json(
            "result.json", {"reason": "max_env_steps"}
        )
        with JSONLLogger(other.metrics) as log:
            for step, loss in ((1, 0.5), (2, 0.25)):
                row = {"label": "learner", "steps": step, "env_steps": 90 * step, "loss<": loss}
                log.write({**row, "time/wall_s": 60.0 * step, "rows": 512})
        text, parsed, _ = page(*(run.path for run in (*runs, other)), "--no-video")
        assert parsed.open == [] and not [
            name for name in parsed.refers if not name.startswith(("data:", "#"))
        ]
        assert "url(" not in re.sub(r"url\(#\w+\)", "", text)
        rows = [parsed.cells[place : place + 9] for place in (0, 9, 18)]
        assert rows[0][:3] == ["a", "1", "300"] and rows[0][5:7] == ["3.0", "4.0 at step 200"]
        assert rows[2][0] == "<i>c" and rows[2][3:5] == ["2", "2.0"] and rows[2][8] == "max_env_steps"
        assert text.count("<svg") == 2 and "(2 seeds)" in text  # The returns, and the learner's metrics.
        assert "loss&lt;" in text and ">rows<" not in text, "a metric that never changes is no curve"
        assert "currentColor" in text and "#010203" not in text and "color-scheme: light dark" in text
        assert "max_evaluation_steps: 7" in text and RunFolder.open(other.path).engine in parsed.cells
        assert np.__version__ in parsed.cells

    def test_a_run_without_rows_has_a_page(self, make_run, page):
        assert "No returns were logged yet." in page(make_run().path, "--no-video")[0]

    def test_records_an_episode(self, make_run, page):
        _, parsed, out = page(make_run(steps=[10], returns=[1.0]).path)
        (source,) = [name for name in parsed.refers if not name.startswith("#")]
        assert base64.b64decode(source.removeprefix("data:video/mp4;base64,"))[4:8] == b"ftyp"
        assert "episode 1 of 1: return" in out

    def test_takes_a_video_unless_a_checkpoint_is_newer(self, make_run, page):
        run = make_run(steps=[10])
        (run.path / "video.gif").write_bytes(b"GIF of the newest policy")
        assert base64.b64encode(b"GIF of the newest policy").decode() in page(run.path)[0]
        os.utime(run.path / "video.gif", (1, 1))
        assert "data:video/mp4" in page(run.path)[0]

    def test_reads_no_file_through_a_link(self, make_run, repertory, tmp_path):
        run = make_run(steps=[10])
        (tmp_path / "secret").write_text("of this user")
        (run.path / "video.mp4").symlink_to(tmp_path / "secret")
        os.utime(tmp_path / "secret", (2e9, 2e9))
        code, _, err = repertory("report", run.path, "--output", tmp_path / "page.html")
        assert code == 1 and "video.mp4" in err and not (tmp_path / "page.html").exists()

    def test_says_why_there_is_no_video(self, make_run, page):
        text, _, out = page(make_run(returns=[1.0]).path)  # It has no checkpoint.
        assert "no checkpoint" in out and "No video: " in text


class TestFolder:
    @pytest.mark.parametrize(
        ("agent", "environment"),
        [
            ("ppo", "CartPole-v1"),
            ("td7", "Pendulum-v1"),
            ("r2d2", "CartPole-v1"),
            ("random_actions", "Acrobot-v1"),
        ],
    )
    def test_acts_as_the_run_does(self, agent, environment, make_run, repertory, tmp_path):
        run = make_run(steps=[30], agent=agent, environment=f"gymnasium:{environment}", returns=[1.0])
        assert repertory("report", run.path, "--folder", tmp_path / "hub", "--no-video")[0] == 0
        policies = [load_policy(path) for path in (run.path, tmp_path / "hub")]
        assert policies[1].step == 30 and not (tmp_path / "report.html").exists()
        assert (tmp_path / "hub" / "policy.pt2").exists() == (agent != "random_actions")
        rng = np.random.default_rng(0)
        for _ in range(20):
            drawn = rng.normal(size=(1, *policies[0].spec.observations.shape)).astype(np.float32)
            np.testing.assert_array_equal(*(policy(drawn) for policy in policies))

    def test_acts_with_the_parameters_of_the_best_evaluation(self, make_run, repertory, tmp_path):
        run = make_run(steps=[30], agent="dqn")
        policy = load_policy(run.path)
        best = {name: value + 1 for name, value in policy.networks.state_dict().items()}
        learner = run.checkpointer.restore().state("learner")
        row = {"env_steps": 20, "learner_steps": 3}
        run.checkpointer.save(
            40, {"learner": torch_part(learner), "best": torch_part({"networks": best, "row": row})}
        )
        arguments = ("--no-video", "--folder", tmp_path / "hub")
        assert repertory("report", run.path, *arguments)[0] == 0
        acting = load_policy(tmp_path / "hub")
        assert acting.step == 20
        tree.map_structure(np.testing.assert_array_equal, dict(acting.networks.state_dict()), best)

    def test_has_a_card_with_the_evaluation_of_its_checkpoint(self, make_run, repertory, tmp_path):
        run = make_run(steps=[300], returns=[1.0, 2.0], agent="ppo")
        told = []
        for evaluation in (None, {"step": 200, "mean": 9.0}, {"step": 300, "mean": 7.0}):
            if evaluation:
                more = {
                    "standard_deviation": 0.5,
                    "episodes": 3,
                    "best": False,
                    "checkpoint": "checkpoint-000001-step-300",
                }
                run.write_json("evaluation.json", {**evaluation, **more})
            hub = tmp_path / f"hub{len(told)}"
            assert repertory("report", run.path, "--folder", hub, "--no-video")[0] == 0
            _, metadata, text = (hub / "README.md").read_text().split("---\n", 2)
            card = yaml.safe_load(metadata)
            (result,) = card["model-index"][0]["results"]
            told.append(result["metrics"][0]["value"])
        assert told == ["2.00", "2.00", "7.00 +/- 0.50"]
        assert card["library_name"] == "repertory" and {"ppo", "CartPole-v1"} <= {*card["tags"]}
        assert "| evaluation | 7.0 ± 0.50 over 3 episodes, at step 300 |" in text
        (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        exec(snippet.replace(f'"{hub.name}"', repr(str(hub))), {})

    def test_keeps_keys_and_machines_to_itself(self, make_run, repertory, tmp_path):
        resources = {"learner": {"env": {"CUDA_VISIBLE_DEVICES": "secret-1"}}}
        run = make_run(steps=[30], resources=resources, loggers=("wandb(project='secret-2')",), returns=[1.0])
        names = (tmp_path / "hub", tmp_path / "page.html")
        code, _, err = repertory("report", run.path, "--folder", names[0], "--output", names[1], "--no-video")
        assert code == 0, err
        for file in (*names[0].rglob("*"), names[1]):
            assert file.is_dir() or b"secret" not in file.read_bytes(), file
        assert load_policy(names[0]).config.loggers == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "report: got no runs, expected repertory report RUN"),
        (["{run}", "--output", "page.pdf"], "--output: got page.pdf, expected a name that ends in .html"),
        (["{run}", "{other}", "--folder", "hub"], "--folder: got 2 runs, expected the one"),
        (["{run}", "--folder", "{run}"], "which is there, expected a new or an empty folder"),
    ],
)
def test_wrong_lines_say_what_was_expected(arguments, message, make_run, repertory):
    paths = {"run": make_run().path, "other": make_run("other").path}
    code, _, err = repertory("report", *(argument.format(**paths) for argument in arguments))
    assert code == 2 and message in err
