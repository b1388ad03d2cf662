"""Bad input: one clear error that names the thing and the fix, a non-zero exit code, nothing lost."""

import contextlib
import dataclasses
import errno
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys

import pytest

import launch
from agents.dqn import DQN, DQNConfig
from framework.checkpoints import torch_part
from framework.commands import building, running
from framework.experiments import running as one_run
from framework.loggers.files import explained
from framework.programs import RunConfig
from framework.runs import registry, run_folder

TRAIN = ("train", "random_actions")

# By arguments: the exit code, and what the error must say. Flags without a command are those of TRAIN.
WRONG = {
    "": (2, ""),
    "trian": (2, "'trian' … Did you mean 'train'?"),
    "train": (2, "which agent … dqn … random_actions … --resume RUN"),
    "train dqm": (2, "Unknown agent 'dqm' … Did you mean 'dqn'?"),
    "graph dpn": (2, "Unknown agent 'dpn' … the agents are a2c"),
    "--max-env-step 5": (2, "--max-env-step … --max-env-steps"),
    "--num-envs 4": (2, "has no flag --num-envs. Did you mean '--envs-per-actor'?"),
    "--total-timesteps=5": (2, "has no flag --total-timesteps. Did you mean '--max-env-steps'?"),
    "eval somewhere --num-episodes 2": (2, "Did you mean '--episodes'?"),
    "--max-env-steps 1.5": (2, "expected a whole number such as 100000"),
    "--wrappers StepLimit(limt=1e2)": (2, "unexpected keyword argument 'limt' … Did you mean 'limit'?"),
    "--environment-options max_episode_step=5": (2, "argument 'max_episode_step' … 'max_episode_steps'?"),
    "--environment tasks:Navigation": (2, "Did you mean 'Navigation2D'?"),
    "train dqn --lerning-rate 1": (2, "--lerning-rate … --learning-rate"),
    "train ppo --clip 2": (2, "clip: got 2.0, expected more than 0 and"),
    "train impala --torso x": (2, "torso: got 'x', expected one of"),
    "--num-actors two": (2, "--num-actors … two"),
    "--engine warp": (2, "Unknown engine 'warp' … serial"),
    "--engine proceses": (2, "Did you mean 'processes'?"),
    "--environment gum:X": (2, "'gum:X' … gymnasium:CartPole-v1"),
    "--environment CartPole-v1": (2, "Did you mean 'gymnasium:CartPole-v1'?"),
    "--environment=gymnasium:CarPole-v1": (2, "gymnasium:CarPole-v1"),
    "train dqn --environment gymnasium:Pendulum-v1": (2, "DQN … one discrete action … agent for continuous"),
    "--restarts -1": (2, "restarts: got -1, expected at least 0"),
    "plot": (2, "got no runs"),
    "--num-actors 0": (2, "num_actors: got 0 … at least 1"),
    "train ppo --num-learners 2 --engine serial": (
        2,
        "num_learners: got 2 on engine 'serial', which has one process … Use engine 'processes'",
    ),
    "--environment gymnasium:ALE/Nowhere-v5": (2, "Atari games are 'atari:GAME' here"),
    "--environment gymnasium:MiniGrid-Nowhere-v0": (2, "MiniGrid's tasks are 'minigrid:TASK' here"),
    "--min-actors 1 --resources actor.strategy=PACK": (
        2,
        "resources['actor']: got strategy 'PACK' … expected SPREAD or None",
    ),
    "eval somewhere --episodes 0": (2, "--episodes: got 0"),
    "eval somewhere --seed -1": (2, "--seed: got -1 … at least 0"),
    "stop somewhere --timeout nan": (2, "timeout: got nan"),
    "stop somewhere --timeout -1": (2, "timeout: got -1"),
    "video somewhere --episodes 0": (2, "--episodes: got 0"),
    "video somewhere --max-steps -3": (2, "--max-steps: got -3"),
    "video somewhere --fps 0": (2, "--fps: got 0, expected at least 1"),
    "video somewhere --seed -1": (2, "--seed: got -1"),
    "serve-environment x --connect a:1 --key k --num-envs 1.5": (2, "--num-envs: invalid int value"),
    "serve-environment x --connect a:1 --key k --nim-envs 3": (2, "unrecognized arguments: --nim-envs 3"),
    "serve-environment --export no/x.py": (1, "no/x.py: No such file"),
}


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_command_lines(repertory, tmp_path, monkeypatch, arguments):
    code, texts = WRONG[arguments]
    monkeypatch.chdir(tmp_path)
    given, _, err = repertory(*(TRAIN if arguments.startswith("-") else ()), *shlex.split(arguments))
    assert given == code
    for text in texts.split(" … "):
        assert text in err
    assert "Traceback" not in err
    assert os.listdir(tmp_path) == []  # nothing was begun


@dataclasses.dataclass(frozen=True)
class SharesAField(DQNConfig):
    seed: int = 7


class Shares(DQN):
    def __init__(self, config: SharesAField | None = None):
        super().__init__(config or SharesAField())


def test_a_field_of_the_agents_config_with_the_name_of_a_setting(repertory, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_entry_points", lambda: {"shares": f"{__name__}:Shares"})
    monkeypatch.chdir(tmp_path)
    code, _, err = repertory("train", "shares", "--seed", "1")
    assert code == 2 and "SharesAField: got the field 'seed'" in err and "Rename the field" in err
    assert "Traceback" not in err and os.listdir(tmp_path) == []


@pytest.mark.parametrize("command", ["eval", "video", "plot", "status", "stop", "train --resume"])
def test_a_folder_that_is_no_run(repertory, tmp_path, command):
    code, _, err = repertory(*command.split(), tmp_path)
    assert code == 1 and str(tmp_path) in err and "no config.yaml" in err


def test_a_folder_that_holds_a_run_is_not_overwritten(repertory, make_run):
    folder = make_run(steps=[10])
    before = (folder.path / "config.yaml").read_bytes()
    code, _, err = repertory(*TRAIN, "--directory", folder.path)
    assert code == 1 and f"--resume {folder.path}" in err
    assert (folder.path / "config.yaml").read_bytes() == before


def test_a_run_that_begins_meanwhile_in_the_same_folder_keeps_its_settings(
    repertory, make_run, tmp_path, monkeypatch
):
    build = building.build_program
    with contextlib.ExitStack() as stack:

        def another_begins(*arguments):
            folder = make_run("same")
            stack.enter_context(folder.lock.held())
            before.append((folder.path / "config.yaml").read_bytes())
            return build(*arguments)

        before, path = [], tmp_path / "same"
        monkeypatch.setattr(building, "build_program", another_begins)
        code, _, err = repertory(*TRAIN, "--seed", "9", "--directory", path)
        assert code == 1 and f"being trained by process {os.getpid()}" in err
        assert [(path / "config.yaml").read_bytes()] == before


def test_a_run_without_a_checkpoint_leads_nowhere_and_says_so(repertory, make_run):
    folder = make_run()
    code, _, err = repertory(*TRAIN, "--directory", folder.path)
    assert code == 1 and "--resume" not in err and "ended before its first checkpoint" in err
    for arguments in (("train", "--resume", folder.path), ("eval", folder.path)):
        code, _, err = repertory(*arguments)
        assert code == 1 and "no checkpoint" in err and "--checkpoint" not in err
        command = err.strip().rpartition("Begin it again, in a new folder: repertory ")[2]
        assert shlex.split(command) == ["train", "--config", str(folder.path / "config.yaml")]


def test_a_running_run_without_a_checkpoint_is_not_called_ended(repertory, make_run):
    folder = make_run()
    with folder.lock.held() as lock:
        lock.truncate(0)
        print("4321", file=lock, flush=True)
        code, _, err = repertory("eval", folder.path)
        assert code == 1 and "no checkpoint yet, and process 4321 trains in it" in err
        code, _, err = repertory("train", "--resume", folder.path)
        assert code == 1 and "is being trained by process 4321" in err
        code, _, err = repertory(*TRAIN, "--directory", folder.path)
        assert code == 1 and "Process 4321 trains in it" in err and "ended" not in err


def test_parameters_that_no_learner_saved_are_not_evaluated(repertory, make_run):
    folder = make_run(agent="dqn")
    folder.checkpointer.save(30, {"counter": torch_part({"counts": {"env_steps": 30, "learner_steps": 7}})})
    code, out, err = repertory("eval", folder.path, "--episodes", 1)
    assert code == 1 and "ended before its learner saved any" in err and not out


def test_an_evaluation_that_cannot_be_written_is_shown(repertory, make_run):
    folder = make_run(steps=[10])
    (folder.path / "evaluation.json").mkdir()
    code, out, err = repertory("eval", folder.path, "--episodes", 1)
    assert code == 1 and "1 episodes" in out and "evaluation.json was not written" in err


class Level:
    """An environment that opens a file which is not there."""

    def __init__(self):
        open("/nowhere/level7.txt", encoding="utf-8").close()


def test_a_file_of_an_environment_is_no_error_of_the_disk(make_run):
    def build():
        program = launch.Program("test")
        program.add_node(launch.CourierNode(Level), label="level")
        return program

    with pytest.raises(launch.NodeError) as caught:
        launch.launch(build(), "threads")
    text = running._explain(caught.value, make_run())
    assert "/nowhere/level7.txt" in text and "Free some space" not in text


def test_runs_of_the_same_second_have_folders_of_their_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folders = {one_run.new_folder("dqn", "gymnasium:CartPole-v1", 1) for _ in range(3)}
    assert len(folders) == 3 and all(folder.is_dir() for folder in folders)


def test_launchpad_that_is_missing(repertory, tmp_path):
    if importlib.util.find_spec("launchpad") is not None:
        pytest.skip("Launchpad is installed")
    code, _, err = repertory(*TRAIN, "--engine", "launchpad", "--directory", tmp_path / "run")
    assert code == 1 and "repertory[deepmind]" in err
    assert not (tmp_path / "run").exists()


def test_list_says_what_is_missing(repertory, monkeypatch):
    agents = {"dqn": "agents.dqn:DQN", "c51": "agents.c51:C51", "own": "not_there:Own"}
    agents["td7"] = "agents.td7:TD7"
    monkeypatch.setattr(registry, "_entry_points", lambda: agents)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ale_py" else name)
    code, out, _ = repertory("list")
    assert code == 0
    for text in (
        "own  cannot be used: ",
        "No module named 'not_there'",
        "[atari]",
        "Deep Q-learning",
        " (on dqn)",
        "train dqn --environment atari:NAME\n",
        "train td7 --environment gymnasium:Ant-v5\n",
    ):
        assert text in out
    assert "repertory[ray]" not in out


def test_a_run_of_an_agent_that_is_gone(repertory, make_run, monkeypatch):
    folder = make_run(steps=[10])
    monkeypatch.setattr(registry, "_entry_points", lambda: {"dqn": "agents.dqn:DQN"})
    for arguments in (("train", "--resume", folder.path), ("eval", folder.path)):
        code, _, err = repertory(*arguments)
        assert code == 1 and "Unknown agent 'random_actions'" in err and str(folder.path) in err


def test_an_environment_whose_package_is_missing(repertory, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "Box2D", None)
    monkeypatch.delitem(sys.modules, "gymnasium.envs.box2d", raising=False)
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d.")]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "run"
    code, _, err = repertory(*TRAIN, "--environment", "gymnasium:LunarLander-v3", "--directory", folder)
    assert code == 1 and 'pip install "repertory[box2d]"' in err and "Traceback" not in err
    assert not folder.exists()


@pytest.mark.parametrize(
    "flags, module", [(("--replay-backend", "reverb"), "reverb"), (("--loggers", "csv", "wandb"), "wandb")]
)
def test_a_part_whose_package_is_missing(repertory, tmp_path, monkeypatch, flags, module):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == module else find_spec(name, *rest)
    )
    folder = tmp_path / "run"
    code, _, err = repertory("train", "dqn", *flags, "--directory", folder)
    assert code == 1 and f'pip install "repertory[{module}]"' in err
    assert not folder.exists()


# The run, the arguments of its resume, the exit code, and what the error must say.
RANDOM, OF_DQN = {"steps": [10]}, {"steps": [10], "agent": "dqn"}
UNSEEN = {"steps": [10], "evaluate_period": None}
RESUMES = [
    (RANDOM, "--environment gymnasium:Acrobot-v1", 2, "CartPole-v1' … 'gymnasium:Acrobot-v1' … new run"),
    (RANDOM, "dqn", 2, "'random_actions', not of 'dqn'"),
    (RANDOM, "--device cpu", 2, "has no flag --device"),
    (OF_DQN, "--device gpu", 2, "device: got 'gpu', expected the name of a torch"),
    (OF_DQN, "--inference-device gpu", 2, "inference_device: got 'gpu', expected"),
    (OF_DQN, "--directory elsewhere", 2, "elsewhere', expected '{run}'"),
    (OF_DQN, "--wrappers 'StepLimit(limit=200)'", 2, "--wrappers 'StepLimit(limit=200)'"),
    ({}, "", 1, "no checkpoint"),
    ({"steps": [10, 20]}, "--checkpoint 15", 1, "step-10 … step-20"),
    ({"steps": [1000]}, "", 1, "has made 1,000 env steps … --max-env-steps 2000"),
    ({"steps": [1000]}, "--max-env-steps 500", 1, "has made 1,000 env steps … --max-env-steps 2000"),
    ({"steps": [700], "ended": False}, "--max-env-steps 500", 1, "700 env steps, and its limit is 500"),
    (RANDOM, "--engine warp", 2, "Unknown engine 'warp'"),
    (RANDOM, "--restarts -1", 2, "restarts: got -1, expected at least 0"),
    (RANDOM, "--target-return nan", 2, "target_return: got nan"),
    (UNSEEN, "--target-return 5", 2, "got 5.0 without an evaluator"),
    (RANDOM, "--max-env-steps 0", 2, "max_env_steps: got 0, expected at least 1"),
]


@pytest.mark.parametrize("run, arguments, code, texts", RESUMES)
def test_wrong_resumes_change_nothing(repertory, make_run, run, arguments, code, texts):
    folder = make_run(**{name: value for name, value in run.items() if name != "ended"})
    if run.get("ended", True):
        folder.write_json("result.json", {"reason": "max_env_steps"})
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    given, _, err = repertory("train", *shlex.split(arguments), "--resume", folder.path)
    assert given == code
    for text in texts.split(" … "):
        assert text.format(run=folder.path) in err
    assert "Traceback" not in err and "Correct the file" not in err
    after = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    assert {path for path in before if before[path] != after.get(path)} == set()


# By case: what becomes of config.yaml, and what the error must say.
DAMAGED = {
    "of another environment": (lambda text: text.replace("[4]", "[5]"), ["[5]", "[4]"]),
    "an unknown key": (lambda text: f"{text}lerning_rate: 1\n", ["'lerning_rate'", "batch_size"]),
    "cut": (lambda text: "{", ["cannot be read"]),
    "a list": (lambda text: "[]", ["expected lines of the form NAME: VALUE"]),
    "empty": (lambda text: "{}", ["no entry 'recorded'"]),
    "newer": (lambda text: "recorded: {format: 99}", ["format 99"]),
}


@pytest.mark.parametrize("damage, texts", DAMAGED.values(), ids=DAMAGED)
def test_resume_with_a_damaged_config(repertory, make_run, damage, texts):
    file = make_run(steps=[10]).path / "config.yaml"
    file.write_text(damage(file.read_text()))
    code, _, err = repertory("train", "--resume", file.parent)
    assert code == 1 and all(text in err for text in texts), err


def test_an_error_of_the_code_that_makes_an_environment_names_it(repertory, tmp_path, monkeypatch):
    (tmp_path / "faulty.py").write_text("make = lambda: {}['size']")
    monkeypatch.syspath_prepend(tmp_path)
    code, _, err = repertory("train", "dqn", "--environment", "faulty:make")
    assert code == 1 and "faulty.py" in err and "framework" not in err
    assert err.endswith("\nerror: --environment faulty:make: KeyError: 'size'\n")


class TestResume:
    @pytest.fixture
    def interrupted(self, monkeypatch):
        monkeypatch.setattr(one_run, "_run", lambda *_: (None, signal.SIGINT))

    def test_with_other_settings(self, repertory, make_run):
        folder = make_run(steps=[1000], agent="dqn")
        arguments = ("train", "--resume", folder.path, "--max-env-steps=1000", "--num-actors", "1")
        arguments += ("--directory", folder.path)
        code, _, err = repertory(*arguments, "--learning-rate", "1e-2", "--no-double")
        assert code == 2 and "num_actors" not in err
        assert "learning_rate: got 0.01, expected 0.001; double: got False, expected True" in err
        assert "--learning-rate 1e-2 --no-double\n" in err
        new = f"--config {folder.path}/config.yaml --init {folder.path} --max-env-steps=1000 --num-actors 1"
        assert f"from these parameters: repertory train {new} --learning" in err
        assert "--num-actor" in repertory(*arguments, "--num-actor", "2")[2]
        folder.write_json("result.json", {})
        code, _, err = repertory(*arguments)  # The settings of the run: no error of theirs.
        assert code == 1 and "has made 1,000 env steps" in err

    def test_of_a_run_whose_learner_steps_are_spent(self, repertory, make_run, interrupted):
        folder = make_run(agent="dqn", max_env_steps=None, max_learner_steps=20)
        counts = {"env_steps": 1000, "learner_steps": 20}
        folder.checkpointer.save(1000, {"counter": torch_part({"counts": counts})})
        folder.write_json("result.json", {"reason": "max_learner_steps"})
        for limit in ((), ("--max-learner-steps", "15")):
            code, _, err = repertory("train", "--resume", folder.path, *limit)
            assert code == 1 and "has made 20 learner steps" in err and "--max-learner-steps 40" in err
        code, _, err = repertory("train", "--resume", folder.path, "--max-learner-steps", "40")
        assert code == 128 + signal.SIGINT, err
        assert run_folder.RunFolder.open(folder.path).config.max_learner_steps == 40
        assert not (folder.path / "result.json").exists()  # That of the run before.

    def test_of_a_run_interrupted_in_its_last_evaluation(self, repertory, make_run):
        folder = make_run(steps=[1000], num_evaluation_episodes=2)
        code, out, _ = repertory("train", "--resume", folder.path, "--engine", "serial")
        assert code == 0 and "The budget of 1,000 env steps is spent; greedy mean return over 2" in out

    @pytest.mark.parametrize(
        "flags, limit, target",
        [
            ((), 2000, 475.0),
            (("--target-return", "None"), 2000, None),
            (("--max-env-steps=None", "--target_return=480"), None, 480.0),
        ],
    )
    def test_with_and_without_a_limit_and_a_target(
        self, repertory, make_run, interrupted, flags, limit, target
    ):
        folder = make_run(steps=[1000], max_env_steps=2000, target_return=475.0)
        assert repertory("train", "--resume", folder.path, *flags)[0] == 128 + signal.SIGINT
        config = run_folder.RunFolder.open(folder.path).config
        assert (config.max_env_steps, config.target_return) == (limit, target)

    def test_with_a_damaged_checkpoint(self, repertory, make_run):
        folder = make_run(steps=[10, 20])
        part = folder.checkpointer.latest() / "counter"
        part.write_bytes(part.read_bytes()[:-5])
        code, _, err = repertory("train", "--resume", folder.path)
        assert code == 1
        assert "counter is truncated" in err and "previous" in err and "--checkpoint" in err
        assert len(folder.checkpointer.checkpoints()) == 2


ESCAPE = "\x1b]0;owned\x07"


def test_what_a_file_says_is_no_command_of_the_terminal(repertory, make_run):
    folder = make_run(steps=[10])
    file = folder.path / "config.yaml"
    file.write_text(file.read_text().replace("agent: random_actions", f"agent: {json.dumps(ESCAPE)}"))
    for arguments in (
        ("status", folder.path),
        ("train", "--config", file),
        ("train", "--resume", folder.path),
    ):
        _, out, err = repertory(*arguments)
        assert "owned" in out + err and "\x1b" not in out + err, arguments
    error = launch.NodeError("actor-0", "ValueError", ESCAPE, f"trace {ESCAPE}", f"log {ESCAPE}")
    assert str(error).count(r"\x1b]0;owned\x07") == 2 and "\x1b" not in str(error)


def test_a_folder_that_is_not_utf_8_is_refused_at_the_start(repertory, tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    with pytest.raises(ValueError, match=r"directory: got '.*caf\\udce9', expected a name in UTF-8"):
        RunConfig(directory=folder)
    code, out, err = repertory(*TRAIN, "--directory", folder)
    assert code == 2 and "UTF-8" in out + err and not os.path.exists(folder)


def test_advice_is_for_a_shell(repertory, make_run):
    folder = make_run("it's a run", steps=[10])
    _, _, err = repertory(*TRAIN, "--directory", folder.path)
    assert shlex.split(err[err.index("repertory train") :].partition(";")[0])[3] == str(folder.path)


class TestDisk:
    def test_a_picture_that_cannot_be_written(self, repertory, make_run, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        (tmp_path / "file.mp4").mkdir()
        path = make_run(returns=[1.0]).path
        monkeypatch.setattr("framework.commands.video.load_policy", lambda *_: None)
        monkeypatch.setattr("framework.commands.video.evaluated_or_latest", lambda *_: "latest")
        for arguments, output in (
            (("plot", path, "--output"), tmp_path / "file" / "x.png"),
            (("video", path, "--output"), tmp_path / "file" / "x.gif"),
            (("video", path, "--output"), tmp_path / "file.mp4"),
            (("graph", "random_actions", "--svg"), tmp_path / "file" / "x.svg"),
        ):
            code, _, err = repertory(*arguments, output)
            assert code == 1 and err.startswith(f"error: {arguments[0]}: could not use {tmp_path / 'file'}")
            assert "Give another place" in err

    def test_folder_that_cannot_be_made(self, repertory, tmp_path):
        (tmp_path / "file").write_text("")
        code, _, err = repertory(*TRAIN, "--directory", tmp_path / "file" / "run")
        assert code == 1 and str(tmp_path / "file" / "run") in err and "--directory" in err

    @pytest.mark.parametrize(
        ("place", "number", "advice"),
        [("{run}/logs/x", errno.EROFS, True), ("{run}x/y", errno.EROFS, False), (None, errno.ENOSPC, False)],
    )
    def test_only_a_file_of_the_run_leads_to_another_folder(
        self, repertory, tmp_path, monkeypatch, place, number, advice
    ):
        folder = tmp_path / "run"

        def fail(*_, **__):
            raise OSError(number, os.strerror(number), place and place.format(run=folder))

        monkeypatch.setattr(launch, "start", fail)
        code, _, err = repertory(*TRAIN, "--directory", folder)
        assert (
            code == 1 and explained(OSError(number, ""), place or "a file").strerror.format(run=folder) in err
        )
        assert ("--directory" in err) is advice and not (folder / "config.yaml").exists()

    def test_full_before_the_start(self, repertory, small_files, tmp_path):
        with small_files(100):
            code, _, err = repertory(*TRAIN, "--directory", tmp_path / "run")
        assert code == 1 and "size limit" in err and "--directory" in err
        assert os.listdir(tmp_path / "run") == ["run.lock"]


def test_the_module_gives_the_exit_code(start):
    process = start("train", "dpn", stderr=subprocess.PIPE)
    assert process.communicate(timeout=60)[1].startswith("error: Unknown agent 'dpn'")
    assert process.returncode == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line(start):
    with open("/dev/full", "w") as full:
        process = start("--version", stdout=full, stderr=subprocess.PIPE)
        error = process.communicate(timeout=60)[1]
    assert error.startswith("error: could not write the output: No space") and error.count("\n") == 1
    assert process.returncode == 1
