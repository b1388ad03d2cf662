"""BatchPPO: the settings of its experiment, and a program of it on batches of whole episodes."""

import ast
import pathlib
import re

import pytest
import torch
from agent_batches import CONTINUOUS

from agents.batch_ppo import BatchPPO, BatchPPOConfig


def test_the_networks_and_the_optimizers_of_the_experiment():
    agent = BatchPPO()
    networks = agent.make_networks(CONTINUOUS)
    shapes = {name: tuple(parameter.shape) for name, parameter in networks.named_parameters()}
    for part, head in (("body", "head.mean"), ("value_body", "value_head")):
        layers = [shape for name, shape in shapes.items() if name.startswith(f"{part}.") and len(shape) == 2]
        assert layers == [(200, 4), (100, 200)]
        assert [shape[1] for name, shape in shapes.items() if name.startswith(head) and len(shape) == 2] == [
            100
        ]
    assert networks.head.log_std.tolist() == pytest.approx([-1.0, -1.0], abs=0.01)
    policy, value = agent.make_optimizer(networks).param_groups
    assert (policy["lr"], value["lr"]) == (1e-4, 1e-3)
    count = sum(p.numel() for p in networks.parameters() if p.requires_grad)
    assert sum(p.numel() for group in (policy, value) for p in group["params"]) == count
    first, _ = networks(torch.randn(8, 4))
    assert (first.mean.abs() < 1).all()


def test_the_page_has_the_settings():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "agents" / "batch_ppo.md").read_text(
        encoding="utf-8"
    )
    rows = [line for line in page.splitlines() if line.startswith("|")]
    settings = dict(re.findall(r"`(\w+)=([^`]+)`", "\n".join(rows)))
    assert len(settings) == 20
    config = BatchPPOConfig()
    assert {name: getattr(config, name) for name in settings} == {
        name: ast.literal_eval(text) for name, text in settings.items()
    }
