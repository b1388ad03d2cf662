"""Adam: torch's fused one bit by bit, without its compiler."""

import copy

import pytest
import torch
import warm_python

from framework.learners import Adam


def _parameters():
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (5,), (), (2, 2, 2))]


def _set_gradients(parameters, seed, without=()):
    generator = torch.Generator().manual_seed(seed)
    for index, parameter in enumerate(parameters):
        parameter.grad = None if index in without else torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize(
    ("settings", "without"),
    [
        ({}, ()),
        ({"lr": 0.03, "eps": 1e-5}, ()),
        ({"betas": (0.5, 0.9), "weight_decay": 0.1}, ()),
        ({"weight_decay": 0.1, "decoupled_weight_decay": True}, ()),
        ({}, (1,)),
    ],
    ids=[
        "defaults",
        "rate and epsilon",
        "betas and decay",
        "decoupled decay",
        "a parameter without gradient",
    ],
)
def test_is_torchs_bit_by_bit(settings, without):
    ours, theirs = _parameters(), _parameters()
    groups = ([{"params": ours, **settings}], [{"params": theirs, **settings}])
    optimizers = Adam(groups[0]), torch.optim.Adam(groups[1], fused=True)
    for step in range(20):
        for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
            _set_gradients(parameters, step, without if step % 2 else ())
            optimizer.param_groups[0]["lr"] = settings.get("lr", 1e-3) / (1 + step)
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("saved_by_torch", [True, False])
def test_its_state_fits_torchs_and_torchs_fits_it(saved_by_torch):
    first, second = _parameters(), _parameters()
    makers = [lambda p: torch.optim.Adam(p, fused=True), Adam]
    make_first, make_second = makers if saved_by_torch else reversed(makers)
    before = make_first(first)
    for step in range(3):
        _set_gradients(first, step)
        before.step()
    after = make_second(second)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    with torch.no_grad():
        for to, of in zip(second, first, strict=True):
            to.copy_(of)
    for parameters, optimizer in ((first, before), (second, after)):
        _set_gradients(parameters, 9)
        optimizer.step()
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_groups_have_their_own_rates():
    parameters = _parameters()
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = Adam([{"params": parameters[:2], "lr": 0.0}, {"params": parameters[2:]}], lr=0.1)
    _set_gradients(parameters, 0)
    optimizer.step()
    moved = [not torch.equal(now, was) for now, was in zip(parameters, before, strict=True)]
    assert moved == [False, False, True, True]


def test_a_closure_is_refused():
    with pytest.raises(ValueError, match="closure"):
        Adam(_parameters()).step(lambda: 0.0)


def test_the_compiler_is_not_loaded():
    code = """
import sys, torch
sys.modules["torch._dynamo"] = None  # An import of it fails.
from framework import learners
p = torch.nn.Parameter(torch.zeros(2))
optimizer = learners.Adam([p])
p.grad = torch.ones(2)
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
"""
    warm_python.run(["-c", code], check=True)
