"""`repertory train --config FILE`: settings in a file, and a run repeated from its own."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import pytest

from agents.dqn import DQNConfig
from framework import config_checks
from framework.commands import train
from framework.commands.options import UsageError
from framework.loggers import read_jsonl, without_times
from framework.runs import config_file


@pytest.fixture
def write(tmp_path):
    def make(text):
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return path

    return make


def test_flags_override_the_file_which_overrides_the_preset(write):
    path = write(
        "agent: dqn\nenvironment: gymnasium:CartPole-v1\nengine: serial\nlearning-rate: 3e-4\n"
        "n_step: 4\nhidden_sizes: [8, 8]\nnum_actors: 3\nmax_env_steps: 1_000\nmax_gradient_norm: null\n"
    )
    entry, options, run, config = train.parse_new(None, ["--config", str(path), "--n-step", "7"])
    assert entry.name == "dqn" and options.engine == "serial"
    assert (run.num_actors, run.max_env_steps, run.envs_per_actor, run.target_return) == (3, 1000, 4, 475.0)
    assert isinstance(config, DQNConfig) and config.n_step == 7 and config.learning_rate == 3e-4
    assert config.hidden_sizes == (8, 8) and config.max_gradient_norm is None


def test_the_file_chooses_the_environment_and_so_the_preset(write):
    path = write("environment: gymnasium:Acrobot-v1\n")
    assert train.parse_new("dqn", ["--config", str(path)])[2].target_return is None
    arguments = ["--environment", "gymnasium:CartPole-v1", f"--config={path}"]
    assert train.parse_new("dqn", arguments)[2].target_return == 475.0


def test_a_flag_gives_the_environment_that_a_file_does_not_name(write):
    path = write("agent: dqn\nenvironment: null\n")
    options = train.parse_new(None, ["--config", str(path), "--environment", "gymnasium:Acrobot-v1"])[1]
    assert options.environment == "gymnasium:Acrobot-v1"


@pytest.mark.parametrize(
    "text, error",
    {
        "agent's": ("agent: dqn\nlerning_rate: 1", "no field 'lerning_rate'.*Did you mean 'learning_rate'"),
        "run's": ("agent: dqn\nnum_actor: 1", "no field 'num_actor'.*Did you mean 'num_actors'"),
        "type": ("agent: dqn\nbatch_size: many", "settings.yaml: batch_size: got 'many', expected a whole"),
        "engine": ("agent: dqn\nengine: 3", "engine: got 3, expected a string"),
        "another file": ("agent: dqn\nconfig: other.yaml", "no field 'config'"),
        "another agent": ("agent: ppo", "is for the agent 'ppo', not for 'dqn'"),
        "no mapping": ("- agent", "got list, expected lines of the form NAME: VALUE"),
        "a name twice": ("num_actors: 2\nnum_actors: 3", "got 'num_actors' 2 times, expected once"),
        "a name in two spellings": ("num_actors: 2\nnum-actors: 3", "settings.yaml: got 'num_actors' in two"),
        "no name of an environment": ("environment: [a, b]", r"environment: got \['a', 'b'\], expected a"),
        "no date": ("seed: 2026-13-01", "settings.yaml: got text that is not YAML: month must be"),
        "no environment": ("agent: dqn\nenvironment: null", "environment: got null, .* --environment"),
        "no YAML": ("a: [", "text that is not YAML"),
        "an alias": ("a: &a [1]\nb: [*a, *a]", r"not YAML: got the alias '\*a', expected its value"),
        "an open nest": (f"a: {'[' * 3_000}", "not YAML: got more than 32 lists or mappings in each other"),
    }.values(),
)
def test_wrong_files(write, text, error):
    with pytest.raises(UsageError, match=error):
        train.parse_new("dqn", ["--config", str(write(text))])


def test_neither_agent_nor_file(repertory, write, tmp_path):
    code, _, err = repertory("train", "--config", write("num_actors: 2"))
    assert code == 2 and "which agent?" in err
    code, _, err = repertory("train", "dqn", "--config", tmp_path / "none.yaml")
    assert code == 1 and "none.yaml: No such file" in err


def test_a_run_is_repeated_from_its_own_file(repertory, write, tmp_path):
    settings = write(
        "agent: dqn\nengine: serial\nmax_env_steps: 300\nmin_replay_size: 50\nbatch_size: 16\n"
        "samples_per_insert: 4\nhidden_sizes: [16]\nevaluate_period: 150\nnum_evaluation_episodes: 2\n"
        "learner_log_period: 20\n"
    )
    code, _, err = repertory("train", "--config", settings, "--directory", tmp_path / "a", "--seed", "3")
    assert code == 0, err
    file = tmp_path / "a" / "config.yaml"
    code, _, err = repertory("train", "--config", file, "--directory", tmp_path / "b")
    assert code == 0, err
    metrics = [read_jsonl(tmp_path / name / "metrics.jsonl") for name in "ab"]
    first, second = ([without_times(row) for row in each] for each in metrics)
    assert first == second and len(first) > 5
    a, b = config_file.read(file), config_file.read(tmp_path / "b" / "config.yaml")
    assert a.pop("recorded") and b.pop("recorded") and a == b and a["seed"] == 3
    code, _, err = repertory("train", "--config", file, "--directory", tmp_path / "c", "--seed", "4")
    assert code == 0, err
    assert first != [without_times(row) for row in read_jsonl(tmp_path / "c" / "metrics.jsonl")]


def test_values_are_read_as_they_were_written(tmp_path):
    texts = ["1e3", "3e-4", "1_0e2", "-1.5E+2", "0x10", "12:30", "yes", "null", "1e", "e3", "1.5"]
    content = {"texts": texts, "1e3": "a name", "numbers": [1e-5, 3e22, 1e3, -0.5, 7, float("inf")]}
    config_file.write(tmp_path / "written.yaml", content)
    assert config_file.read(tmp_path / "written.yaml") == content


def test_fields_from_plain_values():
    @dataclasses.dataclass(frozen=True)
    class Config:
        sizes: tuple[int, ...] = (1,)
        names: tuple[str, ...] | None = None
        rate: float = 0.5
        layers: tuple[tuple[int, ...], ...] = ()
        pair: tuple[tuple[int, int], str] | None = None
        named: Mapping[str, tuple[int, ...]] | None = None
        shared: ClassVar[int] = 1

        def __post_init__(self):
            config_checks.fraction(self, "rate")

    read = config_file.from_plain(Config(), {"sizes": [3, 4], "names": ["a"]}, "x")
    assert read == Config((3, 4), ("a",), 0.5)
    nested = {"layers": [[8, 4], [2]], "pair": [[1, 2], "a"], "named": {"a": [3]}}
    expected = Config(layers=((8, 4), (2,)), pair=((1, 2), "a"), named={"a": (3,)})
    assert config_file.from_plain(Config(), nested, "x") == expected
    with pytest.raises(ValueError, match="x: Config has no field 'rates'; it has sizes, names, rate"):
        config_file.from_plain(Config(), {"rates": 1}, "x")
    with pytest.raises(ValueError, match="x: Config has no field 'shared'"):
        config_file.from_plain(Config(), {"shared": 1}, "x")
    with pytest.raises(ValueError, match="x: rate: got 2, expected between 0 and 1"):
        config_file.from_plain(Config(), {"rate": 2}, "x")
