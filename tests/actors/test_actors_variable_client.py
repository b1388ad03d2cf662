"""The variable client: one request at a time, never older over newer, errors raised, wrong shapes named."""

import concurrent.futures

import numpy as np
import pytest
import torch
from torch import nn

from framework.actors import VariableClient


class Networks(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = nn.Linear(2, 1)
        self.critic = nn.Linear(3, 1)


class Source:
    """Answers when told to. ``requests`` holds the futures that were asked for, with what was asked."""

    def __init__(self):
        self.requests = []
        self.asked = []
        self.futures = self

    def get_variables(self, names, newer_than):
        future = concurrent.futures.Future()
        self.requests.append(future)
        self.asked.append((names, newer_than))
        return future


def answer(value, version, names=("policy",)):
    networks = Networks()
    return version, {
        name: {
            k: np.full(t.shape, value, np.float32) for k, t in getattr(networks, name).state_dict().items()
        }
        for name in names
    }


def make(**kwargs):
    source, networks = Source(), Networks()
    return source, networks, VariableClient(source, networks, names=("policy",), **kwargs)


def value(networks):
    return networks.policy.weight[0, 0].item()


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


def test_it_asks_at_every_period_only():
    source, _, client = make(update_period=3)
    asked = []
    for _ in range(7):
        client.update()
        if len(source.requests) > len(asked):
            source.requests[-1].set_result(None)
        asked = list(source.requests)
    assert len(asked) == 3  # At updates 1, 4 and 7.


def test_an_older_answer_never_overwrites_a_newer_one():
    source, networks, client = make()
    client.update()
    source.requests[0].set_result(answer(5.0, 10))
    client.update()
    source.requests[1].set_result(answer(1.0, 9))
    assert not client.update()
    assert (value(networks), client.version) == (5.0, 10)


def test_waiting_asks_anew_even_if_an_old_question_is_open():
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
    with pytest.raises(TimeoutError, match=r"did not answer within 0\.01 s"):
        client.update(wait=True)


def test_a_source_in_the_same_thread_is_called_directly():
    class Direct:
        def get_variables(self, names, newer_than):
            return answer(6.0, 2, names) if newer_than < 2 else None

    networks = Networks()
    client = VariableClient(Direct(), networks)
    assert client.update()
    assert not client.update()
    assert value(networks) == networks.critic.bias.item() == 6.0


@pytest.mark.parametrize(
    "variables, error, message",
    [
        ({}, KeyError, "'policy' was asked for"),
        ({"policy": {"weight": np.zeros((1, 2))}}, ValueError, r"entries \['bias'\]"),
        (
            {"policy": {"weight": np.zeros((4, 2)), "bias": np.zeros(1)}},
            ValueError,
            r"'weight': shape \(4, 2\) came, the network here has \(1, 2\)",
        ),
    ],
    ids=["missing variable", "missing entry", "wrong shape"],
)
def test_answers_that_do_not_fit_are_named(variables, error, message):
    source, _, client = make()
    client.update()
    source.requests[0].set_result((1, variables))
    with pytest.raises(error, match=message):
        client.update()


def test_bad_arguments_are_named():
    with pytest.raises(KeyError, match="actor"):
        VariableClient(Source(), Networks(), names=("actor",))
    with pytest.raises(ValueError, match="update_period is 0"):
        VariableClient(Source(), Networks(), update_period=0)


def test_parameters_keep_their_memory_and_need_of_gradients():
    source, networks, client = make()
    parameter, pointer = networks.policy.weight, networks.policy.weight.data_ptr()
    client.update()
    source.requests[0].set_result(answer(1.5, 1))
    client.update()
    assert networks.policy.weight is parameter and parameter.data_ptr() == pointer
    assert parameter.requires_grad and torch.isfinite(parameter).all()
