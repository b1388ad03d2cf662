"""Configs of all agents: each field changes something, is checked, and is on the agent's page."""

import dataclasses
import pathlib

import markers
import pytest
from agent_cases import SMALL, spec_of
from config_fields import FIELDS, OF_DELAYED, OF_SEQUENCES, WRONG, accepted, learned, unchanged

from framework.programs import RunConfig
from framework.programs.registry import find_agent

# Where an agent's default is the table's value, or its loss does what for others the adder does.
OWN = {
    "appo": {**OF_SEQUENCES, **OF_DELAYED},
    "impala": {**OF_SEQUENCES, "optimizer": ("adam", learned, {})},
    "r2d2": OF_SEQUENCES,
    "recurrent_td3": {**OF_SEQUENCES, **OF_DELAYED},
    "td3": OF_DELAYED,
}
# Values that fit no field of the same agent.
OWN_WRONG = {
    "c51": {"huber_delta": (2.0,), "munchausen": (0.9,), "v_min": (10.0,)},
    "d4pg": {"v_min": (150.0,), "num_atoms": (1,)},
    "dqn": {"min_replay_size": (10_000_000,)},
    "impala": {"unroll_length": (1,)},
    "mpo": {"v_min": (150.0,)},
    "ppo": {"unroll_length": (1,)},
    "qr_dqn": {"num_quantiles": (1,)},
    "r2d2": {"period": (7,)},
    "recurrent_td3": {"period": (7,)},
    "td7": {"hidden_sizes": ((),)},
}


@pytest.mark.parametrize("name", SMALL)
def test_every_field_changes_something(name):
    agent, own = SMALL[name], OWN.get(name, {})
    fields = [field.name for field in dataclasses.fields(agent.config) if field.name != "device"]
    assert unchanged(agent, spec_of(name), {field: own.get(field) or FIELDS[field] for field in fields}) == []


@pytest.mark.parametrize("name", [*SMALL, "dqfd", "flow_dqn", "maml"])
def test_a_value_that_makes_no_sense_is_refused(name):
    config = SMALL[name].config if name in SMALL else find_agent(name).make_config()
    fields = [field.name for field in dataclasses.fields(config) if field.name in WRONG]
    assert len(fields) > 15
    assert accepted(config, {field: WRONG[field] for field in fields}) == []
    assert accepted(config, OWN_WRONG.get(name, {})) == []


DOCS = pathlib.Path(__file__).parents[2] / "docs"
CONFIGS = {path: find_agent(path.stem).make_config() for path in DOCS.glob("agents/*.md")}


@pytest.mark.parametrize("path", [*CONFIGS, DOCS / "programs.md"], ids=lambda path: path.stem)
def test_the_page_shows_every_field_its_default_and_its_effect(path):
    config, page = CONFIGS.get(path, RunConfig()), path.read_text(encoding="utf-8")
    shown = markers.on_page_markdown(page)
    for field in dataclasses.fields(config):
        row = f"| `{field.name}` | `{getattr(type(config)(), field.name)!r}` | "
        assert row in shown and row not in page


@pytest.mark.parametrize("path", sorted((DOCS.parent / "agents").glob("[a-z]*.py")), ids=lambda p: p.stem)
def test_an_agent_is_a_file_of_at_most_300_lines_and_its_presets(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    presets = [number for number, line in enumerate(lines) if line.startswith("PRESETS")]
    assert (presets or [len(lines)])[0] <= 300
