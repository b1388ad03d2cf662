"""The variable client: what it copies and when, from a block and by messages; what does not fit is named."""

import concurrent.futures

import numpy as np
import pytest
import torch
from helpers.numpy_agent import LinearPolicy
from torch import nn

from framework import core
from framework.parameters import NamedArrays
from framework.variables import VariableBlock, VariableClient, Variables
from launch.context import NodeContext, entered


class Networks(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = nn.Linear(2, 1)
        self.critic = nn.Linear(3, 1)


class ActsOnly(core.Policy):
    """Needs the child `policy` only."""

    variables = ("policy",)

    def initial_state(self, batch_size):
        return ()

    def step(self, observation, state):
        return observation, (), state


def parameters(value, names=("policy", "critic")):
    arrays = NamedArrays(Networks(), names).arrays
    return {name: {key: np.full_like(each[key], value) for key in each} for name, each in arrays.items()}


def answer(value, version, names=("policy",)):
    return Variables(version, 10 * version, parameters(value, names))


def value(networks):
    return networks.policy.weight[0, 0].item()


def answered(result):
    future = concurrent.futures.Future()
    future.set_result(result)
    return future


class Source:
    """A node whose block cannot be reached: it answers when told to. ``requests`` holds the open futures."""

    def __init__(self, block=None):
        self.requests, self.asked = [], []
        self.futures = self
        self.block = block

    def variable_block(self):
        return answered(self.block)

    def get_variables(self, names, newer_than):
        future = concurrent.futures.Future()
        self.requests.append(future)
        self.asked.append((names, newer_than))
        return future


def make(**kwargs):
    source, networks, policy = Source(), Networks(), ActsOnly()
    return source, networks, VariableClient(source, networks, policy, **kwargs)


@pytest.mark.parametrize("through", ["block", "node"])
def test_newer_parameters_are_copied_from_the_block(through):
    block, networks, policy = VariableBlock(parameters(0.0)), Networks(), ActsOnly()
    source = Source(block)
    client = VariableClient(block if through == "block" else source, networks, policy)
    before = value(networks)
    assert not client.update() and value(networks) == before and client.version == -1
    block.publish(3, parameters(5.0), env_steps=70)
    assert client.update()
    assert (value(networks), client.version, policy.progress) == (5.0, 3, core.Progress(3, 70))
    assert not client.update()
    assert source.requests == []  # a block that can be reached needs no messages


def test_on_ray_it_finds_the_block_of_a_node_that_was_restarted_elsewhere(monkeypatch):
    monkeypatch.setattr(VariableClient, "look_s", 0.0)
    source, networks = Source(VariableBlock(parameters(0.0))), Networks()
    source.block.publish(1, parameters(1.0))
    with entered(None, NodeContext("test", "actor", 0, "actor-0", "ray")):
        client = VariableClient(source, networks, ActsOnly())
    assert client.update() and value(networks) == 1.0
    source.block = VariableBlock(parameters(0.0))
    source.block.publish(2, parameters(2.0))
    seen = [client.update() for _ in range(4)]  # It asks, takes the answer, and reads.
    assert any(seen) and (value(networks), client.version) == (2.0, 2)
    source.block = None  # It cannot be mapped from here: from now on by messages.
    for _ in range(4):
        client.update()
    assert source.asked


@pytest.mark.parametrize("mapped", [True, False])
def test_on_ray_a_wait_takes_the_newest_parameters_of_a_node_that_was_restarted_elsewhere(mapped):
    old, new = VariableBlock(parameters(0.0)), VariableBlock(parameters(0.0))
    old.publish(1, parameters(1.0))
    source, networks = Source(old), Networks()
    with entered(None, NodeContext("test", "actor", 0, "actor-0", "ray")):
        client = VariableClient(source, networks, ActsOnly())
    assert client.update(wait=True) and value(networks) == 1.0
    new.publish(2, parameters(2.0))
    source.block = new if mapped else None
    source.get_variables = lambda names, newer_than: answered(new.get_variables(names, newer_than))
    assert client.update(wait=True) and (value(networks), client.version) == (2.0, 2)


def test_on_ray_a_wait_keeps_the_block_of_a_node_that_is_not_there():
    source, networks = Source(VariableBlock(parameters(0.0))), Networks()
    source.block.publish(1, parameters(1.0))
    with entered(None, NodeContext("test", "actor", 0, "actor-0", "ray")):
        client = VariableClient(source, networks, ActsOnly(), timeout=0.1)
    assert client.update(wait=True)
    source.variable_block = concurrent.futures.Future
    assert not client.update(wait=True) and (value(networks), client.version) == (1.0, 1)


def test_only_what_the_policy_names_is_copied():
    block, networks = VariableBlock(parameters(2.0)), Networks()
    critic = networks.critic.weight.clone()
    block.publish(0, parameters(2.0))
    VariableClient(block, networks, ActsOnly()).update()
    assert value(networks) == 2.0
    assert torch.equal(networks.critic.weight, critic)
    VariableClient(block, networks).update()
    assert networks.critic.bias.item() == 2.0


def test_it_looks_into_the_block_at_every_period_only_or_when_told_to():
    block, networks = VariableBlock(parameters(0.0)), Networks()
    client = VariableClient(block, networks, update_period=3)
    taken = []
    for version in range(7):
        block.publish(version, parameters(float(version)))
        taken.append(client.update())
    assert taken == [True, False, False, True, False, False, True]
    block.publish(7, parameters(7.0))
    assert client.update(wait=True) and client.version == 7


def test_one_request_is_under_way_at_a_time():
    source, networks, client = make()
    assert not client.update()
    before = value(networks)
    for _ in range(5):
        assert not client.update()
    assert len(source.requests) == 1
    source.requests[0].set_result(answer(3.0, 1))
    assert value(networks) == before  # Copied only inside update().
    assert client.update()
    assert value(networks) == 3.0
    assert client.version == 1
    assert source.asked == [(("policy",), -1), (("policy",), 1)]


def test_an_older_answer_never_overwrites_a_newer_one():
    source, networks, client = make()
    client.update()
    source.requests[0].set_result(answer(5.0, 10))
    client.update()
    source.requests[1].set_result(answer(1.0, 9))
    assert not client.update()
    assert (value(networks), client.version) == (5.0, 10)


def test_waiting_asks_again_even_if_an_old_question_is_open():
    source, networks, client = make()
    client.update()

    class Answering(Source):
        def get_variables(self, names, newer_than):
            future = super().get_variables(names, newer_than)
            future.set_result(answer(8.0, 4))
            return future

    source.requests[0].set_result(answer(2.0, 3))
    client._source = Answering()
    assert client.update(wait=True)
    assert (value(networks), client.version) == (8.0, 4)


def test_an_error_of_the_source_is_raised_and_the_client_goes_on():
    source, networks, client = make()
    client.update()
    source.requests[0].set_exception(RuntimeError("learner is broken"))
    with pytest.raises(RuntimeError, match="learner is broken"):
        client.update()
    client.update()
    source.requests[1].set_result(answer(2.0, 1))
    assert client.update()
    assert value(networks) == 2.0


def test_a_source_that_does_not_answer_is_a_timeout():
    _, _, client = make(timeout=0.01)
    with pytest.raises(TimeoutError, match=r"no answer from the learner's node within 0\.01 s"):
        client.update(wait=True)


@pytest.mark.parametrize(
    "variables, error, message",
    [
        ({}, KeyError, "'policy': not published"),
        ({"policy": {"weight": np.zeros((1, 2))}}, ValueError, r"entries \['bias'\]"),
        (
            {"policy": {"weight": np.zeros((4, 2)), "bias": np.zeros(1)}},
            ValueError,
            r"'weight': got shape \(4, 2\), expected \(1, 2\)",
        ),
    ],
    ids=["missing variable", "missing entry", "wrong shape"],
)
def test_answers_that_do_not_fit_are_named(variables, error, message):
    source, _, client = make()
    client.update()
    source.requests[0].set_result(Variables(1, 0, variables))
    with pytest.raises(error, match=message):
        client.update()


def test_networks_that_do_not_fit_the_block_are_named():
    class Wider(Networks):
        def __init__(self):
            super().__init__()
            self.policy = nn.Linear(5, 1)

    block = VariableBlock(parameters(0.0))
    block.publish(0, parameters(0.0))
    with pytest.raises(ValueError, match=r"'policy', entry 'weight': got shape \(1, 2\), expected \(1, 5\)"):
        VariableClient(block, Wider()).update()


def test_bad_arguments_are_named():
    class ActsWithAnother(ActsOnly):
        variables = ("actor",)

    with pytest.raises(KeyError, match="actor"):
        VariableClient(Source(), Networks(), ActsWithAnother())
    with pytest.raises(ValueError, match="update_period: got 0"):
        VariableClient(Source(), Networks(), update_period=0)


@pytest.mark.parametrize("reachable", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_keep_their_memory_their_dtype_and_need_of_gradients(reachable, dtype):
    """Numpy has no bfloat16: its arrays are copies, which are loaded as those for a GPU are."""
    trained, networks = Networks().to(dtype), Networks().to(dtype)
    with torch.no_grad():
        trained.policy.weight.copy_(torch.tensor([[-3e38, 1e-40]]))
    arrays = NamedArrays(trained).arrays
    block = VariableBlock(arrays)
    block.publish(1, arrays)
    source = Source(block if reachable else None)
    client = VariableClient(source, networks, ActsOnly())
    parameter, pointer = networks.policy.weight, networks.policy.weight.data_ptr()
    client.update()
    if not reachable:
        source.requests[0].set_result(block.get_variables(["policy"]))
        client.update()
    assert networks.policy.weight is parameter and parameter.data_ptr() == pointer
    assert parameter.requires_grad and torch.equal(parameter, trained.policy.weight)
    assert torch.equal(client.copy()["policy.weight"], trained.policy.weight)


def test_a_policy_takes_new_arrays_to_where_it_acts():
    networks, block = parameters(0.0), VariableBlock(parameters(2.0))
    block.publish(3, parameters(2.0), env_steps=70)
    policy = LinearPolicy(networks, evaluation=True)
    assert VariableClient(block, networks, policy).update()
    assert (policy._placed["bias"], policy.progress) == (2.0, core.Progress(3, 70))
    assert networks["critic"]["bias"] == 0.0
