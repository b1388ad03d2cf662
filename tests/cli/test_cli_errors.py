"""Bad input: one clear error that names the thing and the fix, a non-zero exit code, nothing lost."""

import dataclasses
import importlib.util
import os
import resource
import signal
import socket
import subprocess
import sys

import pytest

import launch
from agents.dqn import DQN, DQNConfig
from framework.checkpoints import torch_part
from framework.commands import train
from framework.programs import config_file, registry, run_folder

TRAIN = ("train", "random_actions")

# Case: (arguments, exit code, what the error must say).
WRONG = {
    "no command": ((), 2, []),
    "unknown command": (("trian",), 2, ["'trian'", "Did you mean 'train'?"]),
    "no agent": (("train",), 2, ["which agent", "dqn", "random_actions", "--resume RUN"]),
    "unknown agent": (("train", "dpn"), 2, ["Unknown agent 'dpn'", "Did you mean 'dqn'?"]),
    "unknown agent to draw": (("graph", "dpn"), 2, ["Unknown agent 'dpn'", "the agents are a2c"]),
    "unknown flag": ((*TRAIN, "--max-env-step", "5"), 2, ["--max-env-step", "--max-env-steps"]),
    "unknown config key": (("train", "dqn", "--lerning-rate", "1"), 2, ["--lerning-rate", "--learning-rate"]),
    "no such value": (("train", "ppo", "--clip", "2"), 2, ["clip: got 2.0, expected more than 0 and"]),
    "no such network": (
        ("train", "impala", "--torso", "x"),
        2,
        ["torso: got 'x', expected one of"],
    ),
    "wrong value": ((*TRAIN, "--num-actors", "two"), 2, ["--num-actors", "two"]),
    "unknown engine": ((*TRAIN, "--engine", "warp"), 2, ["Unknown engine 'warp'", "serial"]),
    "unknown suite": ((*TRAIN, "--environment", "gum:X"), 2, ["'gum:X'", "gymnasium:CartPole-v1"]),
    "no suite": ((*TRAIN, "--environment", "CartPole-v1"), 2, ["Did you mean 'gymnasium:CartPole-v1'?"]),
    "unknown environment": ((*TRAIN, "--environment=gymnasium:CarPole-v1"), 2, ["gymnasium:CarPole-v1"]),
    "actions that do not fit": (
        ("train", "dqn", "--environment", "gymnasium:Pendulum-v1"),
        2,
        ["DQN", "one discrete action", "agent for continuous actions"],
    ),
    "nothing to plot": (("plot",), 2, ["got no runs"]),
    "no actors": ((*TRAIN, "--num-actors", "0"), 2, ["num_actors: got 0", "at least 1"]),
    "learners of one process": (
        ("train", "ppo", "--num-learners", "2", "--engine", "serial"),
        2,
        ["--num-learners 2 requires one process per learner", "--engine processes"],
    ),
    "Atari by its other name": (
        (*TRAIN, "--environment", "gymnasium:ALE/Nowhere-v5"),
        2,
        ["Atari games are 'atari:GAME' here"],
    ),
    "MiniGrid by its other name": (
        (*TRAIN, "--environment", "gymnasium:MiniGrid-Nowhere-v0"),
        2,
        ["MiniGrid's tasks are 'minigrid:TASK' here"],
    ),
    "a strategy that elastic actors cannot have": (
        (*TRAIN, "--min-actors", "1", "--resources", "actor.strategy=PACK"),
        2,
        ["resources['actor']: got strategy 'PACK'", "expected SPREAD or None"],
    ),
    "no episodes": (("eval", "somewhere", "--episodes", "0"), 2, ["--episodes: got 0"]),
    "seed of an evaluation": (("eval", "somewhere", "--seed", "-1"), 2, ["--seed: got -1", "at least 0"]),
    "a time that ends no wait": (("stop", "somewhere", "--timeout", "nan"), 2, ["timeout: got nan"]),
    "a time before the start": (("stop", "somewhere", "--timeout", "-1"), 2, ["timeout: got -1"]),
    "no pictures": (("video", "somewhere", "--episodes", "0"), 2, ["--episodes: got 0"]),
    "no steps": (("video", "somewhere", "--max-steps", "-3"), 2, ["--max-steps: got -3"]),
    "no frames per second": (("video", "somewhere", "--fps", "0"), 2, ["--fps: got 0, expected at least 1"]),
    "seed of a video": (("video", "somewhere", "--seed", "-1"), 2, ["--seed: got -1"]),
    "a server to nowhere": (("serve-environment", "--export", "no/x.py"), 1, ["no/x.py: No such file"]),
}


@pytest.mark.parametrize("arguments, code, texts", WRONG.values(), ids=WRONG)
def test_wrong_command_lines(repertory, tmp_path, monkeypatch, arguments, code, texts):
    monkeypatch.chdir(tmp_path)
    given, _, err = repertory(*arguments)
    assert given == code
    for text in texts:
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


@pytest.mark.parametrize("command", ["eval", "video", "plot", "status", "stop"])
def test_a_folder_that_is_no_run(repertory, tmp_path, command):
    code, _, err = repertory(command, tmp_path)
    assert code == 1 and str(tmp_path) in err and "no config.yaml" in err


def test_resume_of_what_is_no_run(repertory, tmp_path):
    code, _, err = repertory("train", "--resume", tmp_path / "gone")
    assert code == 1 and "no config.yaml" in err


def test_a_folder_that_holds_a_run_is_not_overwritten(repertory, make_run):
    folder = make_run(steps=[10])
    before = (folder.path / "config.yaml").read_bytes()
    code, _, err = repertory(*TRAIN, "--directory", folder.path)
    assert code == 1 and f"--resume {folder.path}" in err
    assert (folder.path / "config.yaml").read_bytes() == before


def test_a_run_without_a_checkpoint_leads_nowhere_and_says_so(repertory, make_run):
    folder = make_run()
    code, _, err = repertory(*TRAIN, "--directory", folder.path)
    assert code == 1 and "--resume" not in err and "ended before its first checkpoint" in err
    for arguments in (("train", "--resume", folder.path), ("eval", folder.path)):
        code, _, err = repertory(*arguments)
        assert code == 1 and "no checkpoint" in err and "--checkpoint" not in err


def test_a_running_run_without_a_checkpoint_is_not_called_ended(repertory, make_run):
    folder = make_run()
    with folder.locked() as lock:
        lock.truncate(0)
        print("4321 0 elsewhere", file=lock, flush=True)
        code, _, err = repertory("eval", folder.path)
        assert code == 1 and "no checkpoint yet, and process 4321 trains in it" in err
        code, _, err = repertory("train", "--resume", folder.path)
        assert code == 1 and "is being trained by process 4321" in err
        code, _, err = repertory(*TRAIN, "--directory", folder.path)
        assert code == 1 and "Process 4321 trains in it" in err and "ended" not in err


@pytest.mark.parametrize(
    ("written", "message"),
    [("4321 0 elsewhere", "process 4321 of the host elsewhere"), ("{pid} 0 {host}", "or has died")],
)
def test_a_process_that_is_not_here_is_not_stopped(repertory, make_run, written, message):
    folder = make_run()
    with folder.locked() as lock:
        lock.truncate(0)
        print(written.format(pid=os.getpid(), host=socket.gethostname()), file=lock, flush=True)
        code, _, err = repertory("stop", folder.path)  # It would end this process.
    assert code == 1 and message in err


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
    text = train._explain(caught.value, make_run().path)
    assert "/nowhere/level7.txt" in text and "Free some space" not in text


def test_runs_of_the_same_second_have_folders_of_their_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folders = {train._new_folder("dqn", "gymnasium:CartPole-v1", 1) for _ in range(3)}
    assert len(folders) == 3 and all(folder.is_dir() for folder in folders)


def test_launchpad_that_is_missing(repertory, tmp_path):
    if importlib.util.find_spec("launchpad") is not None:
        pytest.skip("Launchpad is installed")
    code, _, err = repertory(*TRAIN, "--engine", "launchpad", "--directory", tmp_path / "run")
    assert code == 1 and "repertory[deepmind]" in err
    assert not (tmp_path / "run").exists()


def test_list_says_what_is_missing(repertory, monkeypatch):
    monkeypatch.setattr(registry, "_entry_points", lambda: {"dqn": "agents.dqn:DQN", "own": "not_there:Own"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ale_py" else name)
    code, out, _ = repertory("list")
    assert code == 0
    for text in (
        "own  cannot be used: ",
        "No module named 'not_there'",
        "repertory[atari]",
        "Deep Q-learning",
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
    assert code == 1 and "pip install 'repertory[box2d]'" in err and "Traceback" not in err
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


class TestResume:
    def test_with_a_different_environment(self, repertory, make_run):
        folder = make_run(steps=[10])
        before = (folder.path / "config.yaml").read_bytes()
        code, _, err = repertory("train", "--resume", folder.path, "--environment", "gymnasium:Acrobot-v1")
        assert code == 2
        assert "'gymnasium:CartPole-v1'" in err and "'gymnasium:Acrobot-v1'" in err and "new run" in err
        assert (folder.path / "config.yaml").read_bytes() == before

    def test_when_the_environment_has_changed(self, repertory, make_run):
        folder = make_run(steps=[10])
        config = config_file.read(folder.path / "config.yaml")
        spec = config["recorded"]["environment_spec"]
        config["recorded"]["environment_spec"] = spec.replace("(4,)", "(5,)")
        config_file.write(folder.path / "config.yaml", config)
        code, _, err = repertory("train", "--resume", folder.path)
        assert code == 1 and "(5,)" in err and "(4,)" in err

    def test_as_another_agent(self, repertory, make_run):
        code, _, err = repertory("train", "dqn", "--resume", make_run(steps=[10]).path)
        assert code == 2 and "'random_actions', not of 'dqn'" in err

    def test_on_another_device(self, repertory, make_run):
        code, _, err = repertory("train", "--resume", make_run(steps=[10]).path, "--device", "cpu")
        assert code == 2 and "--device: got 'cpu', but 'random_actions' has no such setting" in err
        folder = make_run("other", steps=[10], agent="dqn")
        before = (folder.path / "config.yaml").read_bytes()
        code, _, err = repertory("train", "--resume", folder.path, "--device", "gpu")
        assert code == 2 and "device: got 'gpu', expected the name of a torch" in err
        assert "Correct the file" not in err
        code, _, err = repertory("train", "--resume", folder.path, "--inference-device", "gpu")
        assert code == 2 and "inference_device: got 'gpu', expected" in err
        assert (folder.path / "config.yaml").read_bytes() == before

    def test_with_other_settings(self, repertory, make_run):
        folder = make_run(steps=[1000], agent="dqn")
        before = (folder.path / "config.yaml").read_bytes()
        arguments = ("train", "--resume", folder.path, "--max-env-steps=1000", "--num-actors", "1")
        arguments += ("--directory", folder.path)
        code, _, err = repertory(*arguments, "--learning-rate", "1e-2", "--no-double")
        assert code == 2 and "num_actors" not in err
        assert "learning_rate: got 0.01, expected 0.001; double: got False, expected True" in err
        assert (
            "--learning-rate 1e-2 --no-double\n" in err
            and f"--config {folder.path}/config.yaml --num-" in err
        )
        assert (folder.path / "config.yaml").read_bytes() == before
        assert "--num-actor" in repertory(*arguments, "--num-actor", "2")[2]
        err = repertory("train", "--resume", folder.path, "--wrappers", "StepLimit(limit=200)")[2]
        assert "--wrappers 'StepLimit(limit=200)'" in err  # For the shell.
        folder.write_json("result.json", {})
        code, _, err = repertory(*arguments)  # The settings of the run: no error of theirs.
        assert code == 1 and "has made 1,000 env steps" in err
        code, _, err = repertory("train", "--resume", folder.path, "--directory", "elsewhere")
        assert code == 2 and f"elsewhere', expected '{folder.path}'" in err

    def test_without_a_checkpoint(self, repertory, make_run):
        code, _, err = repertory("train", "--resume", make_run().path)
        assert code == 1 and "no checkpoint" in err

    def test_of_a_finished_run(self, repertory, make_run):
        folder = make_run(steps=[1000])
        folder.write_json("result.json", {"reason": "max_env_steps"})
        for limit in ((), ("--max-env-steps", "500")):
            code, _, err = repertory("train", "--resume", folder.path, *limit)
            assert code == 1 and "has made 1,000 env steps" in err and "--max-env-steps 2000" in err

    def test_of_a_run_whose_learner_steps_are_spent(self, repertory, make_run, monkeypatch):
        folder = make_run(agent="dqn", max_env_steps=None, max_learner_steps=20)
        counts = {"env_steps": 1000, "learner_steps": 20}
        folder.checkpointer.save(1000, {"counter": torch_part({"counts": counts})})
        folder.write_json("result.json", {"reason": "max_learner_steps"})
        for limit in ((), ("--max-learner-steps", "15")):
            code, _, err = repertory("train", "--resume", folder.path, *limit)
            assert code == 1 and "has made 20 learner steps" in err and "--max-learner-steps 40" in err
        monkeypatch.setattr("framework.commands.train._run", lambda *_: (None, signal.SIGINT))
        code, _, err = repertory("train", "--resume", folder.path, "--max-learner-steps", "40")
        assert code == 128 + signal.SIGINT, err
        assert run_folder.RunFolder.open(folder.path).config.max_learner_steps == 40

    def test_of_an_interrupted_run_with_a_limit_below_its_steps(self, repertory, make_run):
        folder = make_run(steps=[700], evaluate_period=None)
        before = (folder.path / "config.yaml").read_bytes()
        code, _, err = repertory(
            "train", "--resume", folder.path, "--engine", "serial", "--max-env-steps", "500"
        )
        assert code == 1 and "has made 700 env steps, and its limit is 500" in err
        assert (folder.path / "config.yaml").read_bytes() == before

    def test_of_a_run_interrupted_in_its_last_evaluation(self, repertory, make_run):
        folder = make_run(steps=[1000], num_evaluation_episodes=2)
        code, out, _ = repertory("train", "--resume", folder.path, "--engine", "serial")
        assert code == 0 and "The budget of 1,000 env steps is spent; greedy mean return over 2" in out

    def test_that_is_interrupted_leaves_no_result_of_the_run_before(self, repertory, make_run, monkeypatch):
        folder = make_run(steps=[1000])
        folder.write_json("result.json", {"reason": "max_env_steps"})
        monkeypatch.setattr("framework.commands.train._run", lambda *_: (None, signal.SIGINT))
        code, _, err = repertory("train", "--resume", folder.path, "--max-env-steps", "2000")
        assert code == 128 + signal.SIGINT, err
        assert not (folder.path / "result.json").exists()

    @pytest.mark.parametrize(
        "flags, limit, target",
        [
            ((), 2000, 475.0),
            (("--target-return", "None"), 2000, None),
            (("--max-env-steps=None", "--target_return=480"), None, 480.0),
        ],
    )
    def test_with_and_without_a_limit_and_a_target(
        self, repertory, make_run, monkeypatch, flags, limit, target
    ):
        folder = make_run(steps=[1000], max_env_steps=2000, target_return=475.0)
        monkeypatch.setattr("framework.commands.train._run", lambda *_: (None, signal.SIGINT))
        assert repertory("train", "--resume", folder.path, *flags)[0] == 128 + signal.SIGINT
        config = run_folder.RunFolder.open(folder.path).config
        assert (config.max_env_steps, config.target_return) == (limit, target)

    @pytest.mark.parametrize(
        "flag, value, text",
        [
            ("--restarts", "-1", "restarts: got -1, expected at least 0"),
            ("--target-return", "nan", "target_return: got nan"),
            ("--target-return", "5", "target_return: got 5.0 without an evaluator"),
            ("--max-env-steps", "0", "max_env_steps: got 0, expected at least 1"),
        ],
    )
    def test_with_wrong_values(self, repertory, make_run, flag, value, text):
        folder = make_run(steps=[10], evaluate_period=None)
        folder.write_json("result.json", {"reason": "max_env_steps"})
        before = (folder.path / "config.yaml").read_bytes()
        code, _, err = repertory("train", "--resume", folder.path, "--max-env-steps", "20", flag, value)
        assert code == 2 and text in err and "Traceback" not in err
        assert (folder.path / "config.yaml").read_bytes() == before and (folder.path / "result.json").exists()

    def test_with_an_unknown_engine(self, repertory, make_run):
        code, _, err = repertory("train", "--resume", make_run(steps=[10]).path, "--engine", "warp")
        assert code == 2 and "Unknown engine 'warp'" in err

    def test_with_a_damaged_checkpoint(self, repertory, make_run):
        folder = make_run(steps=[10, 20])
        part = folder.checkpointer.latest() / "counter"
        part.write_bytes(part.read_bytes()[:-5])
        code, _, err = repertory("train", "--resume", folder.path)
        assert code == 1
        assert "counter is truncated" in err and "previous" in err and "--checkpoint" in err
        assert len(folder.checkpointer.checkpoints()) == 2

    def test_with_an_unknown_checkpoint(self, repertory, make_run):
        folder = make_run(steps=[10, 20])
        code, _, err = repertory("train", "--resume", folder.path, "--checkpoint", "15")
        assert code == 1 and "step-10" in err and "step-20" in err

    def test_with_an_unknown_config_key(self, repertory, make_run):
        folder = make_run(steps=[10])
        config = config_file.read(folder.path / "config.yaml")
        config_file.write(folder.path / "config.yaml", {**config, "lerning_rate": 1})
        code, _, err = repertory("train", "--resume", folder.path)
        assert code == 1 and "'lerning_rate'" in err and "batch_size" in err and "config.yaml" in err


@pytest.mark.parametrize(
    "content, text",
    [
        ("{", "cannot be read"),
        ("[]", "expected lines of the form NAME: VALUE"),
        ("{}", "no entry 'recorded'"),
        ("recorded: {format: 99}", "format 99"),
    ],
    ids=["cut", "list", "empty", "newer"],
)
def test_a_damaged_config(repertory, make_run, content, text):
    folder = make_run(steps=[10])
    (folder.path / "config.yaml").write_text(content)
    code, _, err = repertory("train", "--resume", folder.path)
    assert code == 1 and text in err


class TestDisk:
    def test_a_picture_that_cannot_be_written(self, repertory, make_run, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        path = make_run(returns=[1.0]).path
        monkeypatch.setattr("framework.commands.video.load_policy", lambda *_: None)
        for arguments, output in (
            (("plot", path, "--output"), tmp_path / "file" / "x.png"),
            (("video", path, "--output"), tmp_path / "file" / "x.gif"),
            (("graph", "random_actions", "--svg"), tmp_path / "file" / "x.svg"),
        ):
            code, _, err = repertory(*arguments, output)
            assert code == 1 and err.startswith(
                f"error: {arguments[0]}: could not use {tmp_path / 'file'}"
            ), err
            assert "Give another place" in err

    def test_folder_that_cannot_be_made(self, repertory, tmp_path):
        (tmp_path / "file").write_text("")
        code, _, err = repertory(*TRAIN, "--directory", tmp_path / "file" / "run")
        assert code == 1 and str(tmp_path / "file" / "run") in err and "--directory" in err

    def test_full_before_the_start(self, repertory, tmp_path):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            code, _, err = repertory(*TRAIN, "--directory", tmp_path / "run")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert code == 1 and "size limit" in err and "--directory" in err
        assert os.listdir(tmp_path / "run") == []


def test_console_script_and_module_give_the_exit_code():
    done = subprocess.run(
        [sys.executable, "-m", "framework.commands", "train", "dpn"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and done.stderr.startswith("error: Unknown agent 'dpn'")
