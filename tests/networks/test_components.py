"""Every network, built from specs and checked by `check_component`."""

import functools

import numpy as np
import pytest
import torch
from dm_env import specs as dm_specs

from framework import networks
from framework.testing import check_component

VECTOR = dm_specs.Array((5,), np.float32)
NESTED = {
    "gear": dm_specs.DiscreteArray(4),
    "image": dm_specs.BoundedArray((10, 10, 4), np.float32, 0, 1),
    "place": VECTOR,
    "ticks": dm_specs.Array((2,), np.int32),
}
IMAGE = dm_specs.BoundedArray((4, 40, 48), np.uint8, 0, 255)
VALUES = functools.partial(networks.QNetwork, NESTED, 3, (8, 8))
POLICY = functools.partial(networks.PolicyNetwork, NESTED, (8,))

# Name, what makes it, and what it takes.
COMPONENTS = {
    "encoder": (lambda: networks.ObservationEncoder(NESTED, (8,)), NESTED),
    **{
        f"encoder of images, {torso}": (
            functools.partial(networks.ObservationEncoder, IMAGE, (), "relu", make),
            IMAGE,
        )
        for torso, make in networks.CONVOLUTIONS.items()
    },
    "mlp": (lambda: networks.MLP(5, (8,), 2, layer_norm=True), VECTOR),
    "noisy mlp": (lambda: noisy_mlp(), VECTOR),
    "renormalized mlp": (lambda: networks.MLP(5, (8,), 2, batch_renorm=True), VECTOR),
    "simba": (lambda: networks.SimBa(5, (8, 8), 2), VECTOR),
    "simba v2": (lambda: networks.SimBaV2(5, (8, 8), 2), VECTOR),
    "values": (VALUES, NESTED),
    "dueling values of a distribution": (lambda: VALUES(dueling=True, outputs_per_action=4), NESTED),
    "categorical policy": (lambda: POLICY(lambda width: networks.CategoricalHead(width, 3)), NESTED),
    "multi-categorical policy": (
        lambda: POLICY(lambda width: networks.MultiCategoricalHead(width, (2, 3))),
        NESTED,
    ),
    "gaussian policy": (lambda: POLICY(lambda width: networks.GaussianHead(width, 2)), NESTED),
    "squashed policy": (lambda: POLICY(lambda width: networks.SquashedGaussianHead(width, 2)), NESTED),
    "softplus policy": (lambda: POLICY(lambda width: networks.SoftplusGaussianHead(width, 2)), NESTED),
    "deterministic policy": (lambda: POLICY(lambda width: networks.DeterministicHead(width, 2)), NESTED),
}
RECURRENT = {
    "encoder": lambda: networks.RecurrentEncoder(NESTED, (8,), 6),
    "encoder of two layers": lambda: networks.RecurrentEncoder(NESTED, (8,), 6, lstm_layers=2),
    "values": lambda: networks.RecurrentQNetwork(NESTED, 3, (8,), 6, (8,)),
}


def noisy_mlp():
    made = networks.MLP(5, (8,), 2, noise=0.5)
    networks.redraw_noise(made, torch.Generator().manual_seed(0))
    return made


@pytest.mark.parametrize(("make", "spec"), COMPONENTS.values(), ids=COMPONENTS)
def test_a_network_keeps_rows_apart_and_passes_gradients(make, spec):
    check_component(make, spec, export=False)


@pytest.mark.parametrize("make", RECURRENT.values(), ids=RECURRENT)
def test_an_unroll_equals_its_steps(make):
    check_component(make, NESTED, recurrent=True, export=False)


@pytest.mark.release  # Each is compiled.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["values", "squashed policy"])
def test_a_network_is_the_same_compiled_and_exported(name):
    check_component(*COMPONENTS[name])
