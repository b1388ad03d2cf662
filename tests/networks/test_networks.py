"""Encoders, value networks, recurrent cores and conversions."""

import functools

import numpy as np
import pytest
import torch
from dm_env import specs as dm_specs

from framework import environments, networks
from framework.environments.testing import FakeEnvironment, make_spec

VECTOR = dm_specs.Array((5,), np.float32)
SCALAR = dm_specs.Array((), np.float32)
DISCRETE = dm_specs.DiscreteArray(4)
IMAGE = dm_specs.BoundedArray((4, 84, 84), np.uint8, 0, 255)
SMALL = dm_specs.BoundedArray((10, 10, 4), np.float32, 0, 1)


def observation(spec, *leading):
    """A random observation of a nest of specs with leading axes."""
    import tree

    def draw(leaf):
        if np.issubdtype(leaf.dtype, np.integer):
            return torch.randint(0, 4, (*leading, *leaf.shape)).to(torch.uint8)
        return torch.randn((*leading, *leaf.shape))

    return tree.map_structure(draw, spec)


@pytest.mark.parametrize(
    "spec, width",
    [
        (VECTOR, 5),
        (SCALAR, 1),
        (DISCRETE, 4),
        (IMAGE, 512),
        (SMALL, 128),
        ({"a": VECTOR, "b": (DISCRETE, SCALAR)}, 10),
        ({"image": SMALL, "speed": VECTOR}, 133),
    ],
    ids=["vector", "scalar", "discrete", "image", "small image", "nested", "image and vector"],
)
def test_an_encoder_takes_one_observation_of_any_nest(spec, width):
    encoder = networks.ObservationEncoder(spec)
    assert encoder.output_size == width
    assert encoder(observation(spec)).shape == (width,)


@pytest.mark.parametrize("shape", [(48, 40, 3), (3, 48, 40), (7, 7, 3), (20, 7, 7)])
@pytest.mark.parametrize("torso", list(networks.CONVOLUTIONS))
def test_the_frames_of_a_stack_of_images_are_channels(shape, torso):
    last = shape[2] == 3
    make = networks.CONVOLUTIONS[torso]
    encoder = networks.ObservationEncoder(
        stack(dm_specs.BoundedArray(shape, np.uint8, 0, 255)), (), "relu", make
    )
    (image,) = encoder.images.values()
    assert (image.channels, image.height, image.width) == (
        4 * (shape[2] if last else shape[0]), *(shape[:2] if last else shape[1:])
    )  # fmt: skip
    frames = torch.randint(0, 256, (2, 5, 4, *shape), dtype=torch.uint8)
    channels_first = frames.movedim(-1, -3) if last else frames
    with torch.no_grad():
        expected = image.layers(channels_first.flatten(0, 1).flatten(1, 2) / 255)
        torch.testing.assert_close(encoder(frames), expected.reshape(2, 5, -1))


@pytest.mark.parametrize("hidden_sizes", [(), (8,)])
def test_each_integer_of_a_stack_of_discrete_observations_is_one_hot(hidden_sizes):
    encoder = networks.ObservationEncoder(stack(dm_specs.DiscreteArray(3)), hidden_sizes)
    frames = torch.tensor([[[0, 0, 2, 1], [1, 1, 1, 0]]])
    expected = torch.eye(3)[frames].flatten(-2)
    torch.testing.assert_close(encoder(frames), encoder.body(expected))
    assert networks.ObservationEncoder(stack(dm_specs.BoundedArray((2,), np.int64, 0, 9))).output_size == 8


def stack(spec):
    """The spec of a stack of four observations."""
    environment = environments.make(functools.partial(FakeEnvironment, make_spec(observations=spec)))
    return environments.FrameStack(environment, 4).observation_spec()


@pytest.mark.parametrize("spec", [{"action_mask": VECTOR}, dm_specs.Array((0,), np.float32)])
def test_an_encoder_without_inputs_is_refused(spec):
    with pytest.raises(ValueError, match="expected numbers besides an action mask"):
        networks.ObservationEncoder(spec)


def test_an_encoder_uses_every_leaf():
    spec = {"image": SMALL, "speed": VECTOR, "gear": DISCRETE}
    encoder = networks.ObservationEncoder(spec, hidden_sizes=(8,))
    base = observation(spec, 1)
    features = encoder(base)
    for name in spec:
        other = (base[name] + 1) % 4 if name == "gear" else base[name] + 1  # there is no gear 4
        assert not torch.equal(encoder({**base, name: other}), features), name


def test_an_observation_with_other_leaves_than_the_spec_is_an_error():
    encoder = networks.ObservationEncoder({"a": VECTOR, "b": VECTOR})
    with pytest.raises(ValueError, match="got 1 leaves, expected 2"):
        encoder({"a": torch.zeros(1, 5)})


@pytest.mark.parametrize("make", networks.CONVOLUTIONS.values())
def test_images_with_channels_first_and_last_are_the_same(make):
    torch.manual_seed(0)
    first = make((3, 40, 48), hidden_size=16)
    last = make((40, 48, 3), hidden_size=16)
    last.load_state_dict(first.state_dict())
    images = torch.randint(0, 255, (2, 3, 40, 48), dtype=torch.uint8)
    expected = first(images)
    torch.testing.assert_close(last(images.permute(0, 2, 3, 1)), expected)
    torch.testing.assert_close(first(images.float() / 255), expected)


def test_the_network_of_data_efficient_rainbow():
    # Without padding, 84 pixels become 16, then 3: 3 * 3 * 64 = 576 features.
    shapes = [tuple(p.shape) for p in networks.DataEfficientConv((4, 84, 84)).parameters() if p.dim() > 1]
    assert shapes == [(32, 4, 5, 5), (64, 32, 5, 5), (256, 576)]


def test_images_that_are_none_are_errors():
    with pytest.raises(ValueError, match="two to four axes"):
        networks.NatureConv((84,))
    with pytest.raises(ValueError, match="3 x 3"):
        networks.ResidualConv((1, 2, 2))
    with pytest.raises(ValueError, match="softplus"):
        networks.MLP(3, (4,), activation="softplus")


def test_a_duelling_network_has_advantages_of_mean_zero():
    network = networks.QNetwork(VECTOR, 3, (8, 6), dueling=True)
    values = network(torch.randn(7, 5))
    features = network.body(network.encoder(torch.zeros(1, 5)))
    expected = network.value(features)
    assert values.shape == (7, 3)
    torch.testing.assert_close(network(torch.zeros(1, 5)).mean(-1, keepdim=True), expected)


@pytest.mark.parametrize("outputs", [1, 3])
def test_critics_rate_several_actions_of_an_observation_as_one_by_one(outputs):
    critics = networks.Critics({"a": VECTOR}, 2, (8,), count=2, outputs_per_action=outputs)
    observation, actions = {"a": torch.randn(4, 5)}, torch.randn(4, 6, 2)
    together = critics(observation, actions)
    assert together.shape == (2, 4, 6) + (() if outputs == 1 else (3,)) and (together[0] != together[1]).all()
    for i in range(6):
        torch.testing.assert_close(together[:, :, i], critics(observation, actions[:, i]))


def test_a_deterministic_policy_begins_near_0_and_stays_in_its_range():
    policy = networks.PolicyNetwork(VECTOR, (8,), lambda size: networks.DeterministicHead(size, 3))
    assert policy(torch.randn(4, 5)).abs().max() < 0.1
    torch.nn.init.uniform_(policy.head.actions.weight, -9.0, 9.0)
    actions = policy(torch.randn(2, 4, 5))
    assert actions.shape == (2, 4, 3) and 0.5 < actions.abs().max() <= 1.0


def test_gradients_pass_through_a_frozen_module_to_its_inputs():
    module, inputs = torch.nn.Linear(2, 1), torch.ones(1, 2, requires_grad=True)
    module.bias.requires_grad_(False)
    with pytest.raises(ZeroDivisionError), networks.frozen(module):
        module(inputs).sum().backward()
        _ = 1 / 0
    torch.testing.assert_close(inputs.grad, module.weight.detach())
    assert module.weight.grad is None and module.weight.requires_grad
    assert not module.bias.requires_grad  # as before


def test_a_softplus_gaussian_head_begins_at_its_standard_deviation():
    torch.manual_seed(0)
    distribution = networks.SoftplusGaussianHead(5, 3, 0.4)(torch.randn(2, 4, 5))
    assert distribution.mean.shape == distribution.log_std.shape == (2, 4, 3)
    torch.testing.assert_close(distribution.log_std.exp(), torch.full((2, 4, 3), 0.4), rtol=0.1, atol=0)
    assert distribution.mean.abs().max() < 0.1


# --- Recurrent cores ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kind, module", [("lstm", torch.nn.LSTM), ("gru", torch.nn.GRU)])
def test_an_unroll_without_resets_is_torchs_own(kind, module, layers):
    torch.manual_seed(1)
    core = networks.RecurrentCore(3, 4, kind, layers)
    reference = module(3, 4, layers, batch_first=True)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        for index, cell in enumerate(core.cells):
            getattr(reference, f"{name}_l{index}").data.copy_(getattr(cell, name).data)
    inputs = torch.randn(2, 6, 3)
    outputs, state = core.unroll(inputs, core.initial_state(2))
    expected, expected_state = reference(inputs)
    torch.testing.assert_close(outputs, expected)
    parts = expected_state if kind == "lstm" else (expected_state,)
    for number, part in enumerate(parts):
        torch.testing.assert_close(torch.stack(state[number :: len(parts)]), part)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_acting_keeps_the_dtype_of_the_state(kind, monkeypatch):
    """With autocast, cells on a GPU return bfloat16, which numpy does not have."""
    core = networks.RecurrentCore(3, 4, kind)
    forward = type(core.cells[0]).forward

    def in_bfloat16(*args):
        result = forward(*args)
        return result.bfloat16() if kind == "gru" else tuple(part.bfloat16() for part in result)

    monkeypatch.setattr(type(core.cells[0]), "forward", in_bfloat16)
    before = core.initial_state(2)
    with torch.inference_mode():
        _, after = core.step(torch.zeros(2, 3), before)
    assert [part.dtype for part in after] == [part.dtype for part in before]


def test_no_gradient_runs_over_the_start_of_an_episode():
    core = networks.RecurrentCore(3, 4)
    inputs = torch.randn(1, 4, 3, requires_grad=True)
    outputs, _ = core.unroll(inputs, core.initial_state(1), torch.tensor([[1, 0, 1, 0]]))
    outputs[0, 3].sum().backward()
    assert (inputs.grad[0, :2] == 0).all()
    assert (inputs.grad[0, 2:] != 0).any()
    with pytest.raises(ValueError, match="start_of_episode: got shape"):
        core.unroll(inputs, core.initial_state(1), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="'rnn'"):
        networks.RecurrentCore(3, 4, "rnn")


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_what_a_closing_row_holds_does_not_reach_the_next_episode(kind):
    core = networks.RecurrentCore(3, 4, kind)
    inputs, starts = torch.randn(1, 5, 3), torch.tensor([[1, 0, 0, 1, 0]])
    expected, _ = core.unroll(inputs, core.initial_state(1), starts)
    inputs[0, 2] = float("nan")
    outputs, _ = core.unroll(inputs, core.initial_state(1), starts)
    assert torch.equal(outputs[0, [0, 1, 3, 4]], expected[0, [0, 1, 3, 4]])


@pytest.mark.parametrize(
    ("dtype", "middle", "spread"),
    [("float64", 1732873457, 1), ("float64", 45000002, 0.5), ("int64", 1732873457, 60), ("float32", 1e4, 1)],
)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_numbers_far_from_zero_are_normalized(dtype, middle, spread, shape):
    values = (middle + spread * np.random.default_rng(0).standard_normal((50, 100, *shape))).astype(dtype)
    normalizer = networks.ObservationNormalizer(dm_specs.Array(shape, np.dtype(dtype)), True)
    normalizer.update(torch.from_numpy(values), torch.ones(50, 100, dtype=torch.bool))
    normalized = normalizer(torch.from_numpy(values))
    exact = values.astype(np.longdouble)
    expected = (exact - exact.mean()) / exact.std()
    assert normalized.dtype == torch.float32
    np.testing.assert_allclose(normalized, expected.astype(float), atol=1e-5)


def test_the_scale_of_rewards_is_that_of_the_returns_that_count():
    scale = networks.RewardScale()
    # Two steps and a closing row, then three steps of the next episode and the last row.
    rewards = torch.tensor([[1.0, 2.0, float("nan"), 4.0, 5.0, 6.0, float("inf")]])
    starts = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0]])
    scale.update(rewards, starts, mask, 0.5)
    returns = [1.0, 2.5, 4.0, 7.0, 9.5]
    assert scale.returns.std().item() == pytest.approx(np.std(returns))
    assert scale(torch.tensor(2.0)).item() == pytest.approx(2.0 / np.std(returns))
    # The next unroll goes on with what it is given, unless an episode begins.
    one, none = torch.ones(1, 1), torch.zeros(1, 1)
    scale.update(one, none, one, 0.5)
    scale.update(one, none, one, 0.5, before=torch.tensor([8.0]))
    scale.update(one, one, one, 0.5, before=torch.tensor([8.0]))
    assert scale.returns.std().item() == pytest.approx(np.std([*returns, 1.0, 5.0, 1.0]))


def test_an_lstm_begins_with_open_forget_gates():
    core = networks.RecurrentCore(3, 64)
    state = (torch.zeros(1, 64), torch.ones(1, 64))
    with torch.no_grad():
        for _ in range(10):
            _, state = core.step(torch.zeros(1, 3), state)
    # sigmoid(1) ** 10 is 0.04, sigmoid(0) ** 10 is 0.001; what goes in meanwhile is about 0 on average.
    assert 0.02 < float(state[1].mean()) < 0.2


def test_conversions_share_memory_where_they_can_and_copy_what_is_read_only():
    array = np.arange(3.0)
    tensor = networks.as_tensors(array)
    array[0] = 7
    assert tensor[0] == 7
    array.flags.writeable = False
    nest = {"a": array, "b": (np.ones(2, np.float32),)}
    tensors = networks.as_tensors(nest)
    tensors["a"][0] = 1
    assert array[0] == 7
    back = networks.as_numpy(tensors)
    assert back["b"][0].dtype == np.float32
    assert back["a"].tolist() == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("learning", [True, False])
def test_pictures_in_mixed_precision_are_those_in_full_precision_rounded_once(learning):
    torch.manual_seed(0)
    network = networks.NatureConv((4, 84, 84), hidden_size=16)
    images = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    with torch.set_grad_enabled(learning), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(network(images), network(images.float() / 255), rtol=0, atol=0)


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("kind", ["values", "quantiles", "implicit quantiles"])
def test_close_values_stay_apart_in_mixed_precision(kind, dueling, noise):
    torch.manual_seed(0)
    if kind == "implicit quantiles":
        network = networks.ImplicitQuantileNetwork(VECTOR, 2, [0.3, 0.7], (8,), dueling, noise=noise)
    else:
        count = 1 if kind == "values" else 2
        network = networks.QNetwork(VECTOR, 2, (8,), dueling, outputs_per_action=count, noise=noise)
    with torch.no_grad():
        for stream in filter(None, (network.head, network.value)):
            *_, last = (layer for layer in stream.modules() if isinstance(layer, torch.nn.Linear))
            last.weight.zero_()
            last.bias.fill_(100.0)
        *_, last = (layer for layer in network.head.modules() if isinstance(layer, torch.nn.Linear))
        last.bias[len(last.bias) // 2 :] += 0.1  # The second action. After 100, bfloat16 has 100.5.
        with torch.autocast("cpu", torch.bfloat16):
            values = network(torch.randn(3, 5)).reshape(3, 2, -1).mean(-1)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values[:, 1] - values[:, 0], torch.full((3,), 0.1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["categorical", "several choices", "gaussian"])
def test_policies_are_float32_in_mixed_precision(kind):
    if kind == "gaussian":
        head, weights, get = networks.GaussianHead(4, 2), "mean", lambda policy: policy.mean
    elif kind == "categorical":
        head, weights, get = networks.CategoricalHead(4, 2), "logits", lambda policy: policy.logits
    else:
        head, weights = networks.MultiCategoricalHead(4, (2, 2)), "logits"
        get = lambda policy: policy.log_prob(torch.zeros(1, 2, dtype=torch.int64))  # noqa: E731
    layer = getattr(head, weights)
    torch.nn.init.zeros_(layer.weight)
    with torch.no_grad():
        layer.bias.copy_(torch.linspace(100.0, 100.1, len(layer.bias)))  # After 100, bfloat16 has 100.5.
    expected = get(head(torch.ones(1, 4)))
    with torch.autocast("cpu", torch.bfloat16):
        got = get(head(torch.ones(1, 4)))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["deterministic", "squashed"])
def test_actions_near_their_bounds_have_gradients_in_mixed_precision(kind):
    if kind == "deterministic":
        head = networks.DeterministicHead(4, 1)
    else:
        head = networks.SquashedGaussianHead(4, 1)
    for name, parameter in head.named_parameters():
        torch.nn.init.constant_(parameter, 4.0 if name.endswith("bias") else 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        action = head(torch.ones(1, 4)) if kind == "deterministic" else head(torch.ones(1, 4)).mode()
    assert action.dtype == torch.float32 and action.item() < 1
    action.sum().backward()  # In bfloat16, tanh(4) is 1.
    assert all(parameter.grad.abs().max() > 0 for parameter in head.parameters())


def test_a_noisy_layer_against_its_equation():
    torch.manual_seed(0)
    layer, inputs = networks.NoisyLinear(6, 5), torch.randn(4, 6)
    np.testing.assert_allclose(layer.weight_noise.detach(), np.full((5, 6), 0.5 / np.sqrt(6)), rtol=1e-6)
    plain = torch.nn.functional.linear(inputs, layer.weight, layer.bias)
    torch.testing.assert_close(layer(inputs), plain)
    for rows in (1, 4):
        networks.redraw_noise(torch.nn.Sequential(layer), torch.Generator().manual_seed(1), rows)
        draws = torch.randn((rows, 11), generator=torch.Generator().manual_seed(1)).expand(4, -1)
        for x, draw, got in zip(inputs, draws, layer(inputs), strict=True):
            scaled = [value.sign() * value.abs().sqrt() for value in draw]
            of_inputs, of_outputs = torch.stack(scaled[:6]), torch.stack(scaled[6:])
            weight = layer.weight + layer.weight_noise * torch.outer(of_outputs, of_inputs)
            torch.testing.assert_close(got, weight @ x + layer.bias + layer.bias_noise * of_outputs)
    networks.redraw_noise(layer, None)
    torch.testing.assert_close(layer(inputs), plain)
    assert set(layer.state_dict()) == {"weight", "bias", "weight_noise", "bias_noise"}


@pytest.mark.parametrize("dueling", [False, True])
def test_a_value_network_with_several_outputs_for_each_action(dueling):
    network = networks.QNetwork(VECTOR, 3, (8,), dueling, outputs_per_action=4, noise=0.1)
    inputs = torch.randn(2, 5)
    outputs = network(inputs)
    assert outputs.shape == (2, 3, 4)
    if dueling:  # The mean over the actions is the value, output by output.
        torch.testing.assert_close(outputs.mean(1), network.value(network.body(inputs)))
    assert all(isinstance(m, networks.NoisyLinear) for m in network.modules() if hasattr(m, "weight"))
