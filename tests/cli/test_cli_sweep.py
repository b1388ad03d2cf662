"""`repertory sweep`: whole sweeps of short runs, and what the command says."""

import csv
import os
import re
import signal
import subprocess
import types

import psutil
import pytest
import warm_python
import yaml
from background import until

from framework.commands import sweep, sweep_report
from framework.commands.options import UsageError
from framework.experiments import executors
from framework.experiments.sweep import Sweep, SweepFolder, Variant

DQN = {
    "engine": "serial",
    "max_env_steps": 900,
    "min_replay_size": 100,
    "hidden_sizes": [[8]],
    "evaluate_period": 300,
    "num_evaluation_episodes": 2,
    "checkpoint_period": 200,
    "target_return": None,
}
RANDOM = {"engine": "serial", "max_env_steps": 60, "evaluate_period": 30, "num_evaluation_episodes": 2}
CARTPOLE = "gymnasium:CartPole-v1"


@pytest.fixture(autouse=True)
def warm_runs(monkeypatch):
    """Makes the runs of sweeps in this process forks, which do not end with it."""

    def popen(command, env, **options):
        env = {name: of for name, of in env.items() if name != executors.PARENT}
        return warm_python.Popen(command[1:], env=env, **options)

    monkeypatch.setattr(
        executors, "subprocess", types.SimpleNamespace(**{**vars(subprocess), "Popen": popen})
    )


@pytest.fixture
def write(tmp_path):
    """Writes the file of a sweep."""

    def written(**settings):
        path = tmp_path / "settings.yaml"
        path.write_text(yaml.safe_dump({"directory": str(tmp_path / "sweep"), **settings}))
        return path

    return written


def table(folder):
    with open(folder / "table.csv", newline="") as file:
        return list(csv.DictReader(file))


whole = [pytest.mark.release, pytest.mark.cpu_budget(300), pytest.mark.timeout(900)]


@pytest.mark.slow
@pytest.mark.cpu_budget(60)
@pytest.mark.parametrize(
    ("environments", "rates", "seeds"),
    [
        ([CARTPOLE], [1e-3], 2),
        pytest.param([CARTPOLE, "gymnasium:Acrobot-v1"], [1e-3, 3e-4], 3, marks=whole, id="2x2x3"),
    ],
)
def test_a_sweep_that_was_killed_ends_with_the_table_of_one_that_was_not(
    start, repertory, write, tmp_path, environments, rates, seeds
):
    settings = {**DQN, "learning_rate": rates}
    file = write(agents="dqn", environments=environments, seeds=seeds, set=settings, slots=2)
    killed = tmp_path / "killed"
    process = start("sweep", file, "--directory", str(killed), stdout=subprocess.DEVNULL)
    until(lambda: [*killed.glob("runs/*/checkpoints/*/DONE")], timeout=100)
    runs = psutil.Process(process.pid).children()
    os.killpg(process.pid, signal.SIGKILL)
    _, left = psutil.wait_procs(runs, 60)
    assert len(runs) == 2 and left == []  # They have stopped, with a checkpoint.
    tables = {}
    for folder in (killed, tmp_path / "sweep"):
        code, out, err = repertory("sweep", file, "--directory", folder)
        assert (code, err) == (0, ""), out
        tables[folder] = (folder / "table.csv").read_text(), (folder / "table.md").read_text()
    assert tables[killed] == tables[tmp_path / "sweep"]
    rows = table(killed)
    assert len(rows) == len(environments) * len(rates) * seeds
    assert {(row["state"], row["env_steps"]) for row in rows} == {("finished", "900")}
    assert [*killed.glob("curves-*.png")] and len(tables[killed][1].splitlines()) >= 3


def test_a_sweep_from_flags_with_a_last_evaluation_and_one_failure(repertory, tmp_path):
    flags = ["--environment", CARTPOLE, "--seeds", "1", "--directory", tmp_path / "sweep", "--slots", "2"]
    flags += ["--final-episodes", "3", "--final-seed", "7"]
    settings = [f"{name}={value}" for name, value in RANDOM.items()]
    # An environment whose option is wrong in one run: its processes begin, and fail.
    settings += ["wrappers=[[],['StepLimit(limit=5)'],['StepLimit(limit=-1)']]"]
    command = ["sweep", "random_actions", *flags, "--set", *settings]
    code, out, _ = repertory(*command)
    folder = SweepFolder(tmp_path / "sweep")
    rows = table(folder.path)
    assert code == 1 and len(rows) == 3, out
    by_state = {state: [row for row in rows if row["state"] == state] for state in ("finished", "failed")}
    assert len(by_state["finished"]) == 2 and len(by_state["failed"]) == 1
    assert re.findall(r"seed\d-?\w* failed\. .*limit: got -1.* Its log: ", out), out
    assert "Repeat them: repertory sweep" in out and "--retry-failed" in out
    for row in by_state["finished"]:
        last = folder.outcome(row["run"])["episode_return"]
        assert float(row["episode_return"]) == last and (last == 5.0) == ("StepLimit" in row["wrappers"])
    code, again, _ = repertory("sweep", folder.path)
    assert code == 1 and "running" not in again
    code, again, _ = repertory("sweep", folder.path, "--retry-failed")
    assert code == 1 and again.count("running") == 1


def test_status_and_stop(start, repertory, write, tmp_path):
    settings = {**RANDOM, "max_env_steps": 10_000_000, "evaluate_period": None}
    file = write(agents="random_actions", environments=CARTPOLE, seeds=3, set=settings, slots=1)
    process = start("sweep", file, stdout=subprocess.PIPE)
    folder = tmp_path / "sweep"
    files = lambda: [path for path in folder.glob("runs/*/metrics.jsonl") if path.stat().st_size]  # noqa: E731
    until(lambda: len(files()) == 1, timeout=100)
    code, out, _ = repertory("sweep", "status", folder)
    assert code == 0 and f"running as process {process.pid}, 1 running, 2 waiting" in out
    assert re.search(r"random_actions-CartPole-v1-seed1  running   [\d,]+ env steps\n", out)
    code, _, err = repertory("sweep", file)
    assert code == 1 and f"is being swept by process {process.pid}" in err
    code, out, _ = repertory("sweep", "stop", folder)
    assert code == 0 and "Go on with: repertory sweep" in out
    assert process.wait(60) == 143 and "Stopped by SIGTERM. Go on with" in process.stdout.read()
    code, out, _ = repertory("sweep", "status", folder)
    assert "not running, 1 stopped, 2 waiting" in out
    assert len([*folder.glob("runs/*/checkpoints/*/DONE")]) == 1
    assert repertory("sweep", "stop", folder)[0] == 1


@pytest.mark.release
def test_jobs_of_submitit(repertory, write, tmp_path):
    pytest.importorskip("submitit")
    slurm = {"cluster": "local", "timeout_min": 5}
    file = write(agents="random_actions", environments=CARTPOLE, set=RANDOM, executor="slurm", slurm=slurm)
    code, out, err = repertory("sweep", file)
    assert code == 0, out + err
    (row,) = table(tmp_path / "sweep")
    assert (
        row["state"] == "finished"
        and row["env_steps"] == "60"
        and [*tmp_path.glob("sweep/jobs/*_submitted.pkl")]
    )


@pytest.mark.cpu_budget(60)
def test_a_search_on_threads(repertory, write, tmp_path):
    pytest.importorskip("optuna")
    settings = {**DQN, "engine": "threads", "checkpoint_period": None, "max_env_steps": 300}
    ranges = {"learning_rate": {"low": 1e-6, "high": 1e-1, "log": True}}
    file = write(agents="dqn", environments=CARTPOLE, set=settings, search=ranges, optuna=2)
    code, out, err = repertory("sweep", file, "--objective", "return_per_cpu_second")
    assert code == 0, out + err
    assert re.search(
        r"Best of dqn in gymnasium:CartPole-v1: trial [01], learning_rate=[\d.e-]+: [\d.]+\n", out
    )
    rates = [float(row["learning_rate"]) for row in table(tmp_path / "sweep")]
    assert len({*rates}) == 2 and all(1e-6 <= rate <= 1e-1 for rate in rates)
    assert "running" not in repertory("sweep", tmp_path / "sweep")[1]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ("", 2, "got no agents, expected repertory sweep AGENT"),
        ("pop", 2, "Unknown agent 'pop'.*Did you mean 'ppo'"),
        (
            "dqn --set learning_rat=1,2",
            2,
            "run dqn-CartPole-v1-learning_rat=1-seed1 has no .*'learning_rate'",
        ),
        ("dqn --set learning_rate=-1", 2, "learning_rate: got -1, expected at least 0"),
        ("dqn --environment gymnasium:CartPol-v1", 2, "unknown environment 'gymnasium:CartPol-v1'"),
        ("dqn --max-env-steps 5", 2, "no flag --max-env-steps.*Settings of the runs go into --set"),
        ("dqn --slot 5", 2, "Did you mean '--slots'"),
        ("dqn sac", 2, "environments: got .., expected at least one"),  # They have no environment in common.
        ("dqn --search n_step.low=0 n_step.high=3 --optuna 2", 2, "n_step: got 0, expected at least 1"),
        ("nothing.yaml", 1, "nothing.yaml: No such file"),
        ("status nothing", 1, "nothing is no sweep"),
        ("run nothing name", 1, "nothing is no sweep"),
    ],
)
def test_wrong_command_lines(repertory, monkeypatch, tmp_path, arguments, code, text):
    monkeypatch.chdir(tmp_path)
    found, _, err = repertory("sweep", *arguments.split())
    assert found == code and re.search(text, err, re.DOTALL), err
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("enviroments: a", "has no field 'enviroments'.*Did you mean 'environments'"),
        (
            "agents: my.lab:thing\nenvironments: gymnasium:CartPole-v1",
            "expected registered names.*--allow my.lab",
        ),
        ("agents: dqn\nseeds: x", "seeds: got 'x', expected a whole number"),
        ("agents: [", "text that is not YAML"),
    ],
)
def test_wrong_files(repertory, tmp_path, content, text):
    (tmp_path / "sweep.yml").write_text(content)
    code, _, err = repertory("sweep", tmp_path / "sweep.yml")
    assert code == 2 and re.search(text, err, re.DOTALL), err


def test_flags_override_the_file_and_its_name_names_the_folder(write, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("agents: [dqn, ppo]\nseeds: [4, 5]\nslots: 3\nset: {n_step: 1}\n")
    made, again, allow = sweep.read([str(file), "--seeds", "2", "--environment", "a", "b", "--allow", "x"])
    assert (made.agents, made.seeds, made.slots, made.set) == (("dqn", "ppo"), 2, 3, {"n_step": (1,)})
    assert made.environments == ("a", "b") and made.place == "sweeps/mine" and not again and allow == ["x"]
    made, *_ = sweep.read(
        ["dqn", "ppo", "--seeds", "4", "7", "--set", "wrappers=my:Wrap", "--environment=c:d"]
    )
    assert made.seeds == (4, 7) and made.place.startswith("sweeps/dqn-ppo-")
    # The user of a command line has named these.
    assert sweep.read(["my.lab:A", "--environment", "c:d", "--set", "wrappers=[['e:f']]"])[2] == [
        "my.lab",
        "c",
        "e",
    ]
    assert sweep.read(["sac"])[0].environments == ("gymnasium:Pendulum-v1",)
    plain = tmp_path / "sweep.yaml"  # The name of the file in a sweep's own folder.
    plain.write_text("agents: dqn\n")
    assert sweep.read([str(plain)])[0].place == "sweeps/sweep"
    (tmp_path / "variants").mkdir()
    assert sweep.read([str(plain)])[0].place == sweep.read([str(tmp_path)])[0].place == str(tmp_path)
    with pytest.raises(UsageError, match="got no agents"):
        sweep.read(["--slots", "2"])


def test_a_run_that_does_not_exist(repertory, tmp_path):
    folder = SweepFolder(tmp_path / "sweep", Sweep())
    folder.save()
    folder.add([Variant("dqn-seed1", "dqn", CARTPOLE, 1, {})])
    code, _, err = repertory("sweep", "run", folder.path, "dqn-sed1")
    assert code == 2 and "has no run 'dqn-sed1'. Did you mean 'dqn-seed1'?" in err


def test_the_run_of_a_sweep_that_has_died_does_not_begin(repertory, monkeypatch, tmp_path):
    monkeypatch.setenv(executors.PARENT, "1")
    monkeypatch.setattr("launch.platforms.end_with_parent", lambda number: None)
    assert repertory("sweep", "run", tmp_path, "name")[0] == 143


def test_the_table_by_hand():
    variants, returns = [], {}
    for agent, environment, scores in (
        ("a", "x", [1, 2, 3, 10]),  # The mean of 2 and 3.
        ("a", "y", [0.5]),
        ("b", "x", [0]),
        ("c", "x", [5]),
        ("c", "y", [0.7]),
    ):
        for seed, value in enumerate(scores):
            name = f"{agent}{environment}{seed}"
            variants.append(Variant(name, agent, environment, seed, {"lr": 0.1, "n": 1}))
            returns[name] = float(value)
    variants.append(Variant("none", "d", "x", 1, {"lr": 0.1}))  # It has not finished.
    lines = sweep_report.as_table(variants, returns, ["lr"]).splitlines()
    cells = {tuple(line.strip("| ").split(" | ")[0:3:2]): line.strip("| ").split(" | ") for line in lines[2:]}
    assert cells["a", "x"][1] == "lr=0.1" and cells["a", "x"][3] == "4"
    assert cells["a", "x"][4].startswith("2.5 (") and cells["a", "x"][5] == "1 … 10"
    assert cells["b", "x"][3:] == ["1", "0", "0 … 0"]
    # Scaled: x by 0 … 10, y by 0.5 … 0.7. Of 0.1 0.2 0.3 1 0 the middle three are 0.1 0.2 0.3.
    assert cells["a", "all, scaled to 0 … 1"][4].startswith("0.2 (")
    assert cells["c", "all, scaled to 0 … 1"][3:5] == ["2", "0.75 (0.75 … 0.75)"]
    assert ("b", "all, scaled to 0 … 1") not in cells and len(lines) == 9
