"""The networks of DreamerV3, against loops, and by what they must not depend on."""

import numpy as np
import pytest
import torch
from dm_env import specs as dm_specs

from framework import losses, networks
from framework.specs import StackedBoundedArray

N, T, E, A = 3, 5, 7, 2
SIZES = {"deter_size": 12, "hidden_size": 4, "stoch_size": 3, "classes": 4, "blocks": 3}


@pytest.fixture
def rssm():
    torch.manual_seed(0)
    made = networks.RSSM(E, A, **SIZES)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return made


def inputs(model, seed=1):
    torch.manual_seed(seed)
    starts = torch.tensor([[0, 0, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]], dtype=torch.bool)
    state = torch.randn(N, 12), torch.nn.functional.one_hot(torch.randint(4, (N, 3)), 4).flatten(1).float()
    actions = 2 * torch.randn(N, T, A)
    noise = losses.race_noise(torch.rand_like(model.samples_like(actions)))
    return torch.randn(N, T, E), actions, starts, state, noise


def norm_silu(values, scale):
    values = values - values.mean()
    normal = values / np.sqrt((values**2).mean() + 1e-4) * scale
    return normal / (1 + np.exp(-normal))


def sigmoid(values):
    return 1 / (1 + np.exp(-values))


def test_the_blocks_of_the_recurrent_layer_against_a_loop(rssm):
    _, actions, _, (deter, stoch), _ = inputs(rssm)
    own = {name: value.detach().double().numpy() for name, value in rssm.named_parameters()}
    expected = []
    for n in range(N):
        parts = []
        vector = np.clip(actions[n, 0].numpy(), -1, 1)
        for name, value in (("deter", deter[n].numpy()), ("stoch", stoch[n].numpy()), ("action", vector)):
            layer = f"from_{name}.layers."
            hidden = own[layer + "0.weight"] @ value + own[layer + "0.bias"]
            parts.append(norm_silu(hidden, own[layer + "1.scale"]))
        shared = own["shared.weight"] @ np.concatenate(parts) + own["shared.bias"]
        old = deter[n].numpy().reshape(3, 4)
        hidden = np.concatenate([shared[4 * g : 4 * g + 4] + old[g] @ own["own"][g] for g in range(3)])
        hidden = norm_silu(hidden, own["hidden.scale"])
        new = []
        for g in range(3):
            gates = hidden[4 * g : 4 * g + 4] @ own["gates"][g] + own["gates_bias"][g, 0]
            reset, candidate, update = gates[:4], gates[4:8], sigmoid(gates[8:] - 1)
            new += list(update * np.tanh(sigmoid(reset) * candidate) + (1 - update) * old[g])
        expected.append(new)
    result = rssm.advance(deter, stoch, rssm.action_vectors(actions[:, 0]))
    np.testing.assert_allclose(result.detach().numpy(), expected, rtol=1e-4, atol=1e-5)


def test_an_episode_begins_as_from_the_initial_state(rssm):
    embedding, actions, starts, state, noise = inputs(rssm)
    results = rssm.observe(embedding, actions, starts, state, noise)
    fresh = rssm.initial_state(1)
    for n, first in ((0, 2), (1, 0), (2, 4)):
        none = torch.zeros(1, T - first, dtype=torch.bool)
        rows = [each[n : n + 1, first:].clone() for each in (embedding, actions, noise)]
        rows[1][:, 0] = 0.0  # No action came before.
        again = rssm.observe(rows[0], rows[1], none, fresh, rows[2])
        for one, other in zip(results, again, strict=True):
            torch.testing.assert_close(one[n : n + 1, first:], other)


def test_the_burn_in_gives_the_same_states_without_gradients(rssm):
    embedding, actions, starts, state, noise = inputs(rssm)
    embedding.requires_grad_()
    given = embedding, actions, torch.zeros_like(starts), state, noise
    plain, burned = rssm.observe(*given), rssm.observe(*given, burn_in=2)
    for one, other in zip(plain, burned, strict=True):
        torch.testing.assert_close(one[:, 2:], other)
    used = torch.autograd.grad(burned[0].sum(), embedding)[0].abs().sum((0, 2)) > 0
    assert used.tolist() == [False, False, True, True, False]  # The last one moves the last sample only.


class Actions:
    vector_size = A

    @staticmethod
    def vectors(drawn):
        return drawn


def test_imagined_states_follow_from_the_action_before_them(rssm):
    _, _, _, state, _ = inputs(rssm)
    features, seen = torch.cat(state, -1), []

    def policy(given):
        seen.append(given)
        return networks.DiagonalGaussian(given[:, :A], torch.zeros(N, A))

    of_actions = torch.randn(N, 4, A)
    noise = losses.race_noise(torch.rand(N, 4, 3, 4))
    states, actions = rssm.imagine(features, policy, Actions, noise, of_actions)
    assert states.shape == (N, 5, 24) and states[:, 0].equal(features) and not states.requires_grad
    for t in range(4):
        assert seen[t].equal(states[:, t])
        torch.testing.assert_close(actions[:, t], states[:, t, :A] + of_actions[:, t])
        deter, stoch = states[:, t].split(rssm.sizes, -1)
        expected = rssm.advance(deter.contiguous(), stoch, rssm.action_vectors(actions[:, t]))
        torch.testing.assert_close(states[:, t + 1, :12], expected.detach())
        prior = rssm.prior(expected)
        torch.testing.assert_close(states[:, t + 1, 12:], rssm.sample(prior, noise[:, t]).detach())
        assert (prior >= 0.01 / 4).all()


PICTURES = {
    "of bytes": dm_specs.BoundedArray((64, 64, 3), np.uint8, 0, 255),
    "of MinAtar": dm_specs.BoundedArray((4, 10, 10), np.float32, 0, 1),
    "with odd sides": dm_specs.BoundedArray((21, 33, 1), np.uint8, 0, 255),
    "without bounds": dm_specs.Array((5, 10, 10), np.float32),
    "stacked": StackedBoundedArray((4, 16, 16), np.uint8, 0, 255),
}


@pytest.mark.parametrize("name", [*PICTURES, "numbers and codes"])
def test_what_is_decoded_has_the_form_of_what_is_encoded(name):
    vector = {"a": dm_specs.Array((2, 3), np.float32), "b": dm_specs.DiscreteArray(4)}
    spec = PICTURES.get(name, vector)
    targets = networks.Targets(spec)
    encoder = networks.Encoder(targets, [8], 2)
    decoder = networks.Decoder(6, targets, [8], 2)
    if name in PICTURES:
        observation = torch.full(
            (N, T, *spec.shape), 51, dtype=torch.from_numpy(np.zeros(0, spec.dtype)).dtype
        )
    else:
        observation = {"a": torch.full((N, T, 2, 3), -3.0), "b": torch.full((N, T), 2)}
    numbers, picture = targets(observation)
    assert encoder(numbers, picture).shape == (N, T, encoder.output_size)
    features = torch.randn(N, T, 6)
    for predicted, target in zip(decoder(features), (numbers, picture), strict=True):
        assert (predicted is None) == (target is None) and (target is None or predicted.shape == target.shape)
    if picture is None:
        assert numbers[0, 0].tolist() == pytest.approx([-np.log(4.0)] * 6 + [0, 0, 1, 0])
    elif name != "of MinAtar":
        value = 0.2 if spec.dtype == np.uint8 else np.log(52.0)
        assert picture.unique().tolist() == pytest.approx([value])
    expected = sum(
        (own - each).square().flatten(2).sum(-1)
        for own, each in zip(decoder(features), (numbers, picture), strict=True)
        if own is not None
    )
    torch.testing.assert_close(decoder.loss(features, numbers, picture), expected)


def test_pictures_of_several_sizes_are_refused():
    with pytest.raises(ValueError, match="pictures of one size"):
        networks.Targets([PICTURES["of bytes"], PICTURES["of MinAtar"]])


def test_initial_weights_have_the_variance_of_the_inputs():
    torch.manual_seed(0)
    weight = networks.Dense(400, [300]).layers[0].weight
    assert weight.var().item() * 400 == pytest.approx(1.0, rel=0.05)
    assert not networks.TwoHotHead(5, [4], 9)(torch.randn(2, 5)).any()


def test_several_choices_are_one_hot_side_by_side_and_drawn_by_given_noise():
    actions = networks.Actions(dm_specs.BoundedArray((2,), np.int64, [1, 0], [3, 1]))
    vectors = actions.vectors(torch.tensor([[[2, 0]], [[0, 1]]]))
    assert vectors.tolist() == [[[0, 0, 1, 1, 0]], [[1, 0, 0, 0, 1]]]
    noise = torch.tensor([[0.0, 9.0, 0.0, 0.0, 9.0], [0.0, 0.0, 9.0, 9.0, 0.0]])
    drawn = networks.MultiCategorical(torch.randn(2, 5, generator=torch.Generator().manual_seed(0)), (3, 2))
    assert drawn.sample(noise=noise).tolist() == [[1, 1], [2, 0]]
