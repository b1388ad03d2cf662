"""Learning curves: what is read of a run, how seeds are joined, the picture and the table."""

import json

import numpy as np
import pytest

from framework import runs
from framework.commands import curves, plot
from framework.commands.options import CommandError


def write(folder, *rows):
    with folder.metrics.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def points(folder, label="evaluator", metric="episode_return", axis="steps"):
    curve = curves.read_curve(folder, label, metric, axis)
    return list(zip(curve.x.tolist(), curve.y.tolist(), strict=True))


class TestReading:
    def test_rows_of_two_actors_are_at_the_env_steps_of_the_program(self, make_run):
        folder = make_run(returns=[1.0, 2.0, 4.0], num_actors=2)
        write(
            folder,
            {"label": "actor-0", "steps": 50, "env_steps": 50, "episode_return": 9.0},
            {"label": "actor-1", "steps": 10, "env_steps": 60},
            {"label": "actor-1", "steps": 30, "env_steps": 80, "episode_return": 7.0},
            {"label": "actor-0", "steps": 90, "env_steps": 120, "episode_return": 8.0},
            {"label": "evaluator", "env_steps": 300, "episode_return": 5.0},  # evaluated again
            {"label": "learner", "steps": 5, "env_steps": 250, "loss": 0.5},
        )
        assert points(folder) == [(100, 1), (200, 2), (300, 5)]
        assert points(folder, "actor") == [(50, 9), (80, 7), (120, 8)]
        assert points(folder, "learner", "loss") == [(250, 0.5)]
        assert points(folder, "learner", "loss", "updates") == [(5, 0.5)]

    def test_a_resumed_run_has_only_what_was_kept_but_all_its_hours(self, make_run):
        folder = make_run()
        rows = [(100, 10, 1.0, 360), (200, 20, 2.0, 720), (300, 30, 3.0, 1080)]
        again = [(200, 18, 2.5, 360), (300, 28, 3.5, 720)]  # from a checkpoint after step 100
        for session in (rows, again):
            for number, (steps, version, value, seconds) in enumerate(session):
                row = {"label": "evaluator", "env_steps": steps, "variables_version": version}
                row |= {"episode_return": value, "time/wall_s": seconds}
                write(
                    folder,
                    {**row, "resumed": True, "resumed_at": 100} if session is again and number == 0 else row,
                )
        assert points(folder) == [(100, 1), (200, 2.5), (300, 3.5)]
        assert points(folder, axis="updates") == [(10, 1), (18, 2.5), (28, 3.5)]
        hours = points(folder, axis="hours")
        np.testing.assert_allclose([x for x, _ in hours], [0.1, 0.2, 0.3, 0.4, 0.5])
        assert [y for _, y in hours] == [1, 2, 3, 2.5, 3.5]

    def test_a_label_without_rows_since_the_resume_has_only_what_was_kept(self, make_run):
        folder = make_run()
        for steps in (100, 200):
            write(folder, {"label": "actor-0", "env_steps": steps, "episode_return": 1.0})
            write(folder, {"label": "actor-1", "env_steps": steps + 1, "episode_return": 2.0})
        write(folder, {"label": "learner", "env_steps": 160, "steps": 5, "resumed_at": 150})
        write(folder, {"label": "actor-0", "env_steps": 170, "episode_return": 3.0, "resumed_at": 150})
        write(folder, {"label": "learner", "env_steps": 180, "steps": 6})
        assert points(folder, "actor") == [(100, 1), (101, 2), (170, 3)]

    def test_hours_of_a_start_whose_first_row_comes_later_than_the_last_of_the_start_before(self, make_run):
        folder = make_run()
        for seconds, more in ((3600, {}), (7200, {"resumed_at": 0}), (7300, {})):
            write(folder, {"label": "evaluator", "episode_return": 1.0, "time/wall_s": seconds, **more})
        np.testing.assert_allclose([x for x, _ in points(folder, axis="hours")], [1, 3, 3 + 100 / 3600])

    def test_actors_at_one_place_count_as_their_mean(self, make_run):
        folder = make_run()
        for actor, value in enumerate((10.0, 200.0)):
            row = {"label": f"actor-{actor}", "env_steps": 5, "variables_version": 3, "episode_return": value}
            write(folder, row)
        assert points(folder, "actor", axis="updates") == [(3, 105)]


class TestJoining:
    X = np.array([0.0, 100.0, 200.0])

    def test_where_all_have_data(self):
        first, second = curves.Curve(self.X, self.X * 1.0), curves.Curve(self.X[:2], self.X[:2] * 3.0)
        joined = curves.join([first, second])
        assert joined.x[0] == 0 and joined.x[-1] == 100
        np.testing.assert_allclose(joined.center, 2 * joined.x)
        np.testing.assert_allclose(joined.high - joined.center, joined.x)
        np.testing.assert_allclose(joined.center - joined.low, joined.x)

    def test_nowhere_is_an_error(self):
        with pytest.raises(CommandError, match="begins at 150, and another ends at 100"):
            curves.join([curves.Curve(self.X[:2], self.X[:2]), curves.Curve(self.X[:2] + 150, self.X[:2])])

    def test_quartiles_are_about_the_median(self):
        joined = curves.join(
            [curves.Curve(self.X, self.X * 0 + value) for value in (1, 2, 3, 4, 90)], "quartiles"
        )
        assert (joined.low[-1], joined.center[-1], joined.high[-1]) == (2, 3, 4)

    @pytest.mark.parametrize(
        "values, mean",
        [([5], 5), ([1, 2, 9], 4), ([9, 1, 2, 3], 2.5), ([100, 1, 3, 5, -100], 3), (range(10), 4.5)],
    )
    def test_interquartile_mean_by_hand(self, values, mean):
        assert curves.interquartile_mean(np.array(values, float)) == mean

    def test_the_interval_of_the_interquartile_mean(self):
        stats = pytest.importorskip("scipy.stats")
        values = np.random.default_rng(1).normal(size=12)
        joined = curves.join([curves.Curve(self.X, self.X * 0 + value) for value in values], "iqm")
        mean, of = stats.trim_mean(values, 0.25), lambda v, axis: stats.trim_mean(v, 0.25, axis=axis)
        drawn = stats.bootstrap((values,), of, method="percentile", n_resamples=2000, rng=1)
        interval = drawn.confidence_interval
        np.testing.assert_allclose(joined.center, mean)
        np.testing.assert_allclose([joined.low[0], joined.high[0]], interval, atol=0.1)

    def test_many_points_become_means_over_stretches(self):
        x = np.arange(1000.0)
        curve = curves.smooth(curves.Curve(x, np.where(x % 2, 1.0, 3.0)), places=10)
        assert len(curve.x) == 10 and np.all(np.diff(curve.x) > 0)
        np.testing.assert_allclose(curve.y, 2.0, atol=0.02)
        few = curves.Curve(x[:5], x[:5])
        assert curves.smooth(few, places=10) is few


class TestCommand:
    @pytest.fixture
    def drawn(self, monkeypatch):
        """The arguments of the last picture: curves, text of the y axis."""
        calls = {}
        draw = plot.draw

        def record(lines, what, *rest, **options):
            calls.update(curves={name: len(members) for name, members in lines.items()}, what=what)
            return draw(lines, what, *rest, **options)

        monkeypatch.setattr(plot, "draw", record)
        return calls

    def test_seeds_are_one_curve_and_settings_are_not(self, make_run, tmp_path, repertory, drawn):
        runs = [make_run(f"s{seed}", returns=[1.0, 2.0 + seed], seed=seed) for seed in (1, 2)]
        runs.append(make_run("longer", returns=[1.0, 5.0, 5.0], seed=3, max_env_steps=2000))
        runs.append(make_run("other", returns=[3.0], envs_per_actor=9))
        runs.append(make_run("agent", returns=[3.0], agent="dqn"))
        output = tmp_path / "new" / "curves.png"
        arguments = (*(folder.path for folder in runs), "--output", output)
        code, out, _ = repertory("plot", *arguments)
        assert code == 0 and "5 runs" in out and "written" in out
        name = "random_actions, gymnasium:CartPole-v1, envs_per_actor="
        assert out.splitlines()[1:] == [f"{name}1: ends with its shortest run at 200 of 300"]
        assert drawn["curves"] == {f"{name}1": 3, f"{name}9": 1, "dqn, gymnasium:CartPole-v1": 1}
        assert drawn["what"] == "episode return (greedy)"
        assert "replaced" in repertory("plot", *arguments)[1]
        assert output.read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(
        "band, last", [("std", "4 ± 0.8165"), ("quartiles", "4 (3.5 … 4.5)"), ("iqm", "4 (3 … 5)")]
    )
    def test_table(self, make_run, tmp_path, repertory, band, last):
        runs = [make_run(f"s{seed}", returns=[1.0, 2.0 + seed], seed=seed).path for seed in (1, 2, 3)]
        output = tmp_path / "curves.svg"
        flags = ("--output", output, "--band", band, "--table")
        code, out, _ = repertory("plot", *runs, *flags)
        row = f"| random_actions, gymnasium:CartPole-v1 | 3 | 200 | {last} | 3 … 5 |"
        assert code == 0 and row in out
        assert row in output.with_suffix(".md").read_text() and curves.BANDS[band] in output.read_text()
        code, out, _ = repertory("plot", runs[0], *flags)  # One seed has no spread.
        assert code == 0 and "| 1 | 200 | 3 | 3 … 3 |" in out and out.startswith("1 run in ")

    def test_a_run_that_is_given_twice_counts_once(self, make_run, tmp_path, repertory, drawn, monkeypatch):
        monkeypatch.chdir(tmp_path)
        runs = [make_run("a", returns=[1.0, 2.0]).path, "a/", "b", "../" + tmp_path.name + "/a"]
        make_run("b", returns=[1.0, 3.0], seed=1)
        code, out, _ = repertory("plot", *runs)
        assert code == 0 and "2 runs in curves.png" in out and list(drawn["curves"].values()) == [2]

    @pytest.mark.parametrize("axis, text", curves.AXES.items())
    def test_axes_and_labels(self, make_run, tmp_path, repertory, drawn, axis, text):
        folder = make_run()
        row = {"env_steps": 100, "variables_version": 7, "time/wall_s": 9.0, "episode_return": 1.0}
        write(folder, {"label": "evaluator", **row}, {"label": "actor-0", **row})
        output = tmp_path / "curves.svg"
        code, _, err = repertory(
            "plot", folder.path, "--x", axis, "--label", "evaluator,actor", "--output", output
        )
        assert code == 0, err
        assert f"<!-- {text} -->" in output.read_text()
        name = "random_actions, gymnasium:CartPole-v1"
        assert drawn["curves"] == {f"{name}, greedy": 1, f"{name}, acting, with exploration": 1}

    @pytest.mark.parametrize(
        "returns, flags, code, texts",
        [
            ([1.0], ("--metric", "los"), 1, ["'los'", "rows of evaluator", "have env_steps, episode_return"]),
            ([1.0], ("--x", "hours"), 1, ["against hours"]),
            ([], (), 1, ["no rows at all"]),
            ([1.0], ("--label", "evaluator,"), 2, ["--label: got 'evaluator,'"]),
            ([1.0], ("--output", "x.docx"), 2, ["x.docx"]),
        ],
        ids=["no metric", "no times", "no rows", "a label without a name", "unknown format"],
    )
    def test_what_cannot_be_drawn(self, make_run, repertory, returns, flags, code, texts):
        given, _, err = repertory("plot", make_run(returns=returns).path, *flags)
        assert given == code and all(text in err for text in texts), err

    def test_a_name_without_a_suffix_is_a_png(self, make_run, repertory, tmp_path):
        path = make_run(returns=[1.0]).path
        for done in ("written", "replaced"):
            code, out, _ = repertory("plot", path, "--output", tmp_path / "curves")
            assert code == 0 and f"in {tmp_path / 'curves.png'}, which was {done}" in out
        assert (tmp_path / "curves.png").exists() and not (tmp_path / "curves").exists()

    def test_names_that_begin_with_an_underscore_are_shown(self, tmp_path):
        one = curves.Curve(np.arange(2.0), np.arange(2.0))
        lines = {"__main__:Own": [one], "_a|b": [one, one]}  # The first is an agent of a notebook.
        picture = plot.draw(lines, "return", tmp_path / "curves.svg").read_text()
        for label in ("__main__:Own", "_a|b (2 seeds)"):
            assert f"<!--  {label} -->" in picture
        rows = plot.as_table(lines, "return", "steps", "std").splitlines()[2:]
        assert [row.split(" | ")[0] for row in rows] == [r"| \_\_main\_\_:Own", r"| _a\|b"]


class TestPython:
    """`framework.runs.plot`, and what a notebook makes of its result."""

    def test_runs_and_folders_are_drawn_in_a_picture_that_a_cell_shows(self, make_run, tmp_path):
        folders = [make_run(name, returns=[1.0, 2.0], seed=seed).path for seed, name in enumerate("ab")]
        picture = plot.plot([runs.Run(folders[0]), str(folders[1])], tmp_path / "c.png", band="iqm")
        assert picture == tmp_path / "c.png" and picture.read_bytes()[1:4] == b"PNG"
        assert "data:image/png;base64,iVBOR" in picture._repr_mimebundle_()["text/html"]
        picture.unlink()
        assert picture._repr_mimebundle_() == {"text/plain": repr(picture)}
        assert plot.plot(folders[0], tmp_path / "one.svg").exists()

    def test_wrong_arguments_say_what_was_expected(self, make_run, tmp_path):
        run = make_run(returns=[1.0])
        for arguments, message in (
            ({"runs": []}, "runs: got none"),
            (
                {"runs": run.path, "x": "env_steps"},
                "x: got 'env_steps', expected one of steps, updates, hours",
            ),
            ({"runs": run.path, "band": "sd"}, "band: got 'sd', expected one of std, quartiles, iqm"),
            ({"runs": run.path, "label": "eval"}, "it has rows of evaluator"),
        ):
            with pytest.raises((ValueError, CommandError), match=message):
                plot.plot(**arguments, output=tmp_path / "c.png")
