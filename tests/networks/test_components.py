"""Every network, built from specs and checked by `check_component`."""

import functools
import inspect

import numpy as np
import pytest
import torch
from dm_env import specs as dm_specs

from framework import networks
from framework.environments.testing import make_spec
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
WITH_ACTION = (NESTED, dm_specs.BoundedArray((2,), np.float32, -1, 1))
TARGETS = networks.Targets(NESTED)


class Of(torch.nn.Module):
    """A network that is called by `call(network, inputs)`."""

    def __init__(self, network, call):
        super().__init__()
        self.network, self._call = network, call

    def forward(self, inputs):
        return self._call(self.network, inputs)


class Core(networks.RecurrentCore):
    """A memory whose state is no output of an unroll."""

    def unroll(self, inputs, state, starts):
        return super().unroll(inputs, state, starts)[0]


def embeddings():
    return networks.StateActionEmbeddings(NESTED, 2, 5, (8,))


def embedded(network, inputs):
    state = network.state(inputs[0])
    return state, network(state, inputs[1])


def estimates(critics, inputs):
    return critics(*inputs).movedim(0, -1)  # The axis of the critics is the first one.


CRITICS = functools.partial(networks.Critics, NESTED, 2, (8,))
EMBEDDED = functools.partial(networks.EmbeddedCritics, NESTED, 2)

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
    "bounded policy": (lambda: POLICY(lambda width: networks.BoundedGaussianHead(width, 2)), NESTED),
    "values without hidden layers": (lambda: networks.QNetwork(NESTED, 3, (), dueling=True), NESTED),
    "quantiles": (lambda: networks.ImplicitQuantileNetwork(NESTED, 3, [0.3, 0.7], (8,)), NESTED),
    "actor and critic": (lambda: networks.ActorCritic(make_spec(NESTED), (8,)), NESTED),
    "critics": (lambda: Of(CRITICS(count=3), estimates), WITH_ACTION),
    "critics of distributions": (lambda: Of(CRITICS(outputs_per_action=4), estimates), WITH_ACTION),
    "embeddings": (lambda: Of(embeddings(), embedded), WITH_ACTION),
    "embedded policy": (lambda: networks.EmbeddedPolicy(NESTED, 2, embeddings(), (6, 6)), NESTED),
    "embedded critics": (lambda: Of(EMBEDDED(embeddings(), (6, 6), count=3), estimates), WITH_ACTION),
    "two-hot": (lambda: networks.TwoHotHead(5, [8], 9), VECTOR),
    "picture encoder": (
        lambda: Of(networks.Encoder(TARGETS, [8], 2), lambda network, inputs: network(*TARGETS(inputs))),
        NESTED,
    ),
    "picture decoder": (lambda: networks.Decoder(5, TARGETS, [8], 2), VECTOR),
}
# These compute `[..., *]`: `[B, T, ...]`, too.
OF_TIME = ("encoder", "mlp", "values", "gaussian policy", "critics", "embedded policy", "embedded critics")
RECURRENT = {
    "encoder": lambda: networks.RecurrentEncoder(NESTED, (8,), 6),
    "encoder of two layers": lambda: networks.RecurrentEncoder(NESTED, (8,), 6, lstm_layers=2),
    "values": lambda: networks.RecurrentQNetwork(NESTED, 3, (8,), 6, (8,)),
}
CORES = {kind: functools.partial(Core, 5, 4, kind) for kind in ("lstm", "gru")}
# Statistics learn nothing by gradients, `RSSM` takes the noise of its samples, and the inputs of
# `DynamicsEnsemble` have a model's axis: they have tests of their own.
ELSEWHERE = {"Moments", "ObservationNormalizer", "RewardScale", "BoundedRewardScale", "ReturnRange"}
ELSEWHERE |= {"RSSM", "DynamicsEnsemble", "Dropout"}


def noisy_mlp():
    made = networks.MLP(5, (8,), 2, noise=0.5)
    networks.redraw_noise(made, torch.Generator().manual_seed(0))
    return made


@pytest.mark.parametrize(("make", "spec"), COMPONENTS.values(), ids=COMPONENTS)
def test_a_network_keeps_rows_apart_and_passes_gradients(make, spec):
    check_component(make, spec, export=False)


@pytest.mark.parametrize("name", OF_TIME)
def test_a_network_takes_the_axis_of_time(name):
    check_component(*COMPONENTS[name], time=True, export=False)


@pytest.mark.parametrize("make", RECURRENT.values(), ids=RECURRENT)
def test_an_unroll_equals_its_steps(make):
    check_component(make, NESTED, recurrent=True, export=False)


@pytest.mark.parametrize("make", CORES.values(), ids=CORES)
def test_an_unroll_of_a_memory_equals_its_steps(make):
    check_component(make, VECTOR, recurrent=True, export=False)


def test_every_public_network_is_here():
    made = [make() for make, _ in COMPONENTS.values()] + [
        make() for make in (*RECURRENT.values(), *CORES.values())
    ]
    known = {kind for each in made for module in each.modules() for kind in type(module).__mro__}
    public = {name: each for name, each in vars(networks).items() if inspect.isclass(each)}
    missing = {
        name for name, each in public.items() if issubclass(each, torch.nn.Module) and each not in known
    }
    assert missing == ELSEWHERE


@pytest.mark.release  # Each is compiled.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["values", "squashed policy"])
def test_a_network_is_the_same_compiled_and_exported(name):
    check_component(*COMPONENTS[name])
