"""`check_component` finds what is wrong with a component, and names the inputs that show it."""

import numpy as np
import pytest
import torch
from dm_env import specs as dm_specs
from torch import nn

from framework.testing import ComponentError, check_component

VECTOR = dm_specs.Array((5,), np.float32)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, inputs):
        return self.layer(inputs)


class OfTheBatch(Layer):
    def forward(self, inputs):
        values = super().forward(inputs)
        return values - values.mean(0)


class Unused(Layer):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(5, 3)


class Overflows(Layer):
    def forward(self, inputs):
        return super().forward(inputs).exp()


class Flattens(Layer):
    def forward(self, inputs):
        return super().forward(inputs).flatten()


class Branches(Layer):
    def forward(self, inputs):
        values = super().forward(inputs)
        return values if bool(values.max() < 1e9) else 2.0 * values


class Random(Layer):
    def forward(self, inputs):
        return nn.functional.dropout(super().forward(inputs), 0.5)


class Memory(nn.Module):
    """A running sum of inputs, which should restart where an episode does."""

    def __init__(self, restarts):
        super().__init__()
        self.layer, self._restarts = nn.Linear(5, 3), restarts

    def initial_state(self, batch_size):
        return torch.zeros(batch_size, 3)

    def step(self, inputs, state):
        state = state + self.layer(inputs)
        return state, state

    def unroll(self, inputs, state, start_of_episode):
        outputs = []
        for now, begins in zip(inputs.unbind(1), start_of_episode.unbind(1), strict=True):
            if self._restarts:
                state = state * ~begins.unsqueeze(-1)
            output, state = self.step(now, state)
            outputs.append(output)
        return torch.stack(outputs, 1)


WRONG = {
    OfTheBatch: "differs by .* from that of rows 0 to 1 of random inputs alone",
    Unused: "got no gradient of other.weight. Use it",
    Overflows: "got output that is not finite",
    Flattens: r"got output of shape \(12,\), expected \(4,\) first",
    Random: "of random inputs again. Take out what is random",
}


@pytest.mark.parametrize(("make", "message"), WRONG.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_a_wrong_component_fails_with_its_inputs(make, message):
    with pytest.raises(ComponentError, match=f"{make.__name__}: .*{message}") as error:
        check_component(make, VECTOR, export=False)
    assert error.value.inputs.shape == (4, 5)


def test_a_memory_that_goes_on_in_the_next_episode_is_found():
    check_component(lambda: Memory(True), VECTOR, recurrent=True, export=False)
    with pytest.raises(ComponentError, match="from that of step after step, with episodes that begin at"):
        check_component(lambda: Memory(False), VECTOR, recurrent=True, export=False)


def test_a_branch_on_values_cannot_be_exported():
    with pytest.raises(ComponentError, match=r"Branches: torch\.export failed"):
        check_component(Branches, VECTOR)


@pytest.mark.release  # It compiles.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recurrent", [False, True])
def test_a_right_component_is_the_same_compiled_and_exported(recurrent):
    check_component((lambda: Memory(True)) if recurrent else Layer, VECTOR, recurrent=recurrent)


def test_what_is_no_module_is_refused():
    with pytest.raises(ComponentError, match="make: got 3, expected a torch module"):
        check_component(lambda: 3, VECTOR)
