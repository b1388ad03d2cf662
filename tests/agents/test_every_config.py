"""Configs of all agents: each field changes something, is checked, and is on the page of settings."""

import dataclasses
import pathlib
import re

import pytest
from agent_cases import SMALL, spec_of
from config_fields import (
    FIELDS,
    OF_DELAYED,
    OF_SEQUENCES,
    WRONG,
    accepted,
    learned,
    mixed,
    network,
    unchanged,
)

from framework.programs import RunConfig
from framework.runs.registry import agent_names, find_agent

# Where an agent's default is the table's value, or its loss does what for others the adder does.
OWN = {
    "a2c": OF_SEQUENCES,
    "appo": {**OF_SEQUENCES, **OF_DELAYED},
    "bc": {"recurrent": ("lstm", network, {})},
    "crossq": {"actor_delay": (1, learned, {})},
    "edac": {"num_critics": (4, network, {})},
    "dreamer": {
        "reward_clip": OF_SEQUENCES["reward_clip"],
        # Values begin at 0, and the range of returns counts from 1 on.
        "target_update_period": (2, learned, {"learning_rate": 1.0}),
        "return_range_rate": (0.9, learned, {"learning_rate": 1.0}),
    },
    "impala": {**OF_SEQUENCES, "optimizer": ("adam", learned, {})},
    "ppo": OF_SEQUENCES,
    "pqn": OF_SEQUENCES,
    "r2d2": OF_SEQUENCES,
    "recurrent_td3": {**OF_SEQUENCES, **OF_DELAYED},
    "rebrac": {**OF_SEQUENCES, **OF_DELAYED},
    "rlpd": {"demonstrations": ("data", mixed, {}), "num_critics": (3, network, {})},
    "simba_v2": {
        "dropout": (0.5, learned, {"network": "mlp"}),
        "layer_norm": (None, network, {"network": "mlp"}),
    },
    "td3": OF_DELAYED,
    "td3_bc": OF_DELAYED,
}
# Agents whose items are not those of the shared adder. They refuse `hindsight_goals`.
WITHOUT_GOALS = ("bc", "cql", "dqfd", "dreamer", "r2d2", "rebrac", "recurrent_td3")
PRIORITIES = ("prioritized", "priority_exponent", "importance_sampling_exponent")
# Fields that an agent refuses, or has no use for, because it learns from no reward.
WITHOUT = {
    "bc": ("discount", "n_step", "reward_clip", "target_update_period", "target_update_rate"),
    "crossq": ("network", "target_update_period", "target_update_rate"),
    "dreamer": ("n_step",),  # It has another lambda.
    "ppo_lagrangian": ("reward_clip",),
    "rebrac": ("n_step", *PRIORITIES),
    "simba_v2": ("n_step",),
    "td3_bc": PRIORITIES,
}
# Values that fit no field of the same agent.
OWN_WRONG = {
    "bc": {
        "n_step": (2,),
        "reward_clip": (1.0,),
        "target_update_period": (2,),
        "target_update_rate": (1.0,),
    },
    "c51": {"huber_delta": (2.0,), "munchausen": (0.9,), "v_min": (10.0,)},
    "d4pg": {"v_min": (150.0,), "num_atoms": (1,)},
    "dqn": {"min_replay_size": (10_000_000,)},
    "impala": {"unroll_length": (1,)},
    "mpo": {"v_min": (150.0,), "num_samples": (1,)},
    "ppo": {"unroll_length": (1,)},
    "qr_dqn": {"num_quantiles": (1,)},
    "dqfd": {"hindsight_goals": (1,)},
    "crossq": {"network": ("simba",), "target_update_rate": (0.5,), "target_update_period": (2,)},
    "sac": {"dropout": (1.0,), "temperature": (0.0,)},
    "simba_v2": {"n_step": (2,), "num_atoms": (1,), "largest_return": (0.0,)},
    "tqc": {"dropped_quantiles": (25,), "num_quantiles": (1,)},
    "dreamer": {
        "period": (7,),
        "hindsight_goals": (1,),
        "n_step": (2,),
        "imagination_rows": (7,),
        "deter_size": (9, 0),
    },
    "r2d2": {"period": (7,), "hindsight_goals": (1,)},
    "recurrent_td3": {"period": (7,), "hindsight_goals": (1,)},
    "rebrac": {"hindsight_goals": (1,), "prioritized": (True,), "n_step": (2,)},
    "td7": {"hidden_sizes": ((),), "critic_hidden_sizes": ((),)},
}


# Every second inherited field of an agent waits for the release: heirs of the same fields have the others.
@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.release)])
@pytest.mark.parametrize("name", SMALL)
def test_every_field_changes_something(name, which):
    agent, own = SMALL[name], OWN.get(name, {})
    fields = [field.name for field in dataclasses.fields(agent.config)]
    fields = [field for field in fields if name not in WITHOUT_GOALS or not field.startswith("hindsight_")]
    fields = [field for field in fields if field not in ("device", "devices", *WITHOUT.get(name, ()))]
    here = {*own, *vars(type(agent.config))["__annotations__"]}
    place = [*SMALL].index(name)
    fields = [f for at, f in enumerate(fields) if (0 if f in here else (place + at) % 2) == which]
    assert unchanged(agent, spec_of(name), {field: own.get(field) or FIELDS[field] for field in fields}) == []


@pytest.mark.parametrize("name", [*SMALL, "apex", "dqfd", "keras_dqn", "keras_ppo", "maml", "mbmpo", "simba"])
def test_a_value_that_makes_no_sense_is_refused(name):
    config = SMALL[name].config if name in SMALL else find_agent(name).make_config()
    fields = [field.name for field in dataclasses.fields(config) if field.name in WRONG]
    assert len(fields) > 15
    assert accepted(config, {field: WRONG[field] for field in fields}) == []
    assert accepted(config, OWN_WRONG.get(name, {})) == []


ROOT = pathlib.Path(__file__).parents[2]
SETTINGS = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
CONFIGS = {name: find_agent(name).make_config() for name in agent_names()}


@pytest.fixture(scope="module")
def sections():
    """The sections of the page of settings, by their headings and by other agents with the same fields."""
    parts = {part.partition("\n")[0]: part for part in SETTINGS.split("\n## ")[1:]}
    also = {name: part for part in parts.values() for name in re.findall(r"^Also of `(\w+)`", part, re.M)}
    return {**parts, **also}


@pytest.mark.parametrize("name", [*CONFIGS, "Runs"])
def test_the_page_of_settings_shows_every_field_its_default_and_its_effect(name, sections):
    config = CONFIGS.get(name, RunConfig())
    bases = re.findall(r"^From \[(\w+)\]\(#(\w+)\): (.*)", sections[name], re.MULTILINE)
    for field in dataclasses.fields(config):
        default = repr(getattr(type(config)(), field.name))
        if f"\n| `{field.name}` | `{default}` | " not in sections[name]:
            (base,) = (base for base, _, fields in bases if f"`{field.name}={default}`" in fields)
            assert f"\n| `{field.name}` | `" in sections[base]
    assert all(anchor == base.lower() for base, anchor, _ in bases)


@pytest.mark.parametrize("path", sorted((ROOT / "agents").glob("[a-z]*.py")), ids=lambda p: p.stem)
def test_an_agent_is_a_file_of_at_most_300_lines_and_its_presets(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    presets = [number for number, line in enumerate(lines) if line.startswith("PRESETS")]
    assert (presets or [len(lines)])[0] <= 300
