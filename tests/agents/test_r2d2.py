"""R2D2: every field of its config changes something; stored states, burn-in and the ends of episodes."""

import collections
import dataclasses
import math

import agent_probes
import config_fields
import numpy as np
import pytest
import torch
from batches import learn
from dm_env import specs as dm_specs

import launch
from agents.r2d2 import R2D2, R2D2Config, R2D2Networks
from framework import environments, losses, networks, replay, specs
from framework.actors import EnvironmentLoop, PolicyActor
from framework.environments.testing import EchoEnvironment, FakeEnvironment
from framework.networks import as_tensors
from framework.programs import RunConfig, make_program
from framework.types import Step

Info = collections.namedtuple("Info", "key probability table_size")
Sample = collections.namedtuple("Sample", "info data")

SPEC = specs.EnvironmentSpec(
    dm_specs.Array((4,), np.float32),
    dm_specs.DiscreteArray(3, np.int64),
    dm_specs.Array((), np.float32),
    dm_specs.BoundedArray((), np.float32, 0, 1),
)
IMAGES = SPEC._replace(observations=dm_specs.BoundedArray((4, 44, 44), np.uint8, 0, 255))
SMALL = R2D2Config(
    unroll_length=6,
    burn_in=3,
    period=3,
    n_step=3,
    batch_size=4,
    hidden_sizes=(8,),
    lstm_size=6,
    head_sizes=(8,),
)


def make_batch(config=SMALL, seed=0, spec=SPEC):
    """Rows of random numbers, with the ends of truncated and of terminated episodes among them."""
    random = np.random.default_rng(seed)
    shape = (config.batch_size, config.burn_in + config.unroll_length + 1)
    mask, start = np.ones(shape, np.float32), np.zeros(shape, np.bool_)
    discount = np.ones(shape, np.float32)
    for n, t, last in ((0, 5, 1.0), (1, 1, 1.0), (1, 4, 0.0), (2, shape[1] - 1, 0.0)):
        mask[n, t], discount[n, t - 1] = 0, last
        if t + 1 < shape[1]:
            start[n, t + 1] = True
    extras = {}
    if config.lstm_size:
        size = (config.batch_size, config.lstm_size)
        extras["state"] = tuple(random.normal(size=size).astype(np.float32) for _ in range(2))
    observation = random.normal(size=(*shape, *spec.observations.shape))
    if spec.observations.dtype == np.uint8:
        observation = random.integers(0, 255, observation.shape)
    data = Step(
        observation.astype(spec.observations.dtype),
        random.integers(0, 3, shape),
        (3 * random.normal(size=shape)).astype(np.float32),
        discount,
        start,
        extras,
        mask,
    )
    count = config.batch_size
    info = Info(np.arange(count, dtype=np.uint64), random.dirichlet(np.ones(count)), np.full(count, count))
    return Sample(info, data)


def make_learner(config=SMALL, spec=SPEC):
    torch.manual_seed(0)
    agent = R2D2(config)
    return agent.make_learner(agent.make_networks(spec), spec)


# --- fields ---


def learned(config):
    return agent_probes.after_three_steps(make_learner(config), lambda seed: make_batch(config, seed))


def explored(config):
    return agent_probes.explored(R2D2(config), make_learner(config).networks, SPEC)


def evaluated(config):
    return agent_probes.evaluated(R2D2(config), R2D2(config).make_networks(SPEC), SPEC)


def table(config):
    return agent_probes.table(R2D2(config), SPEC)


def network(config):
    return agent_probes.network(R2D2(config), SPEC)


def written(config):
    """Observations of the items."""
    return played(config, steps=90)[0].data.observation


def seen(config):
    """What observations look like."""
    environment = environments.make(EchoEnvironment, wrappers=R2D2(config).environment_wrappers())
    environment.reset()
    return str(environment.step(np.array([2])).observation)


def initial(config):
    """Priorities of new sequences."""
    return played(config, steps=90)[0].info.priority


# See helpers/config_fields.py.
FIELDS = {
    **config_fields.of_gradients(learned, make_learner),
    **config_fields.of_replay(learned, table),
    "unroll_length": (5, written, {}),
    "burn_in": (2, written, {}),
    "period": (2, written, {}),
    "previous_action_and_reward": (True, seen, {}),
    "n_step": (2, learned, {}),
    "targets": ("watkins", learned, {}),
    "trace_lambda": (0.5, learned, {"targets": "peng"}),
    "double": (False, learned, {"learning_rate": 0.1}),
    "rescale_values": (False, learned, {}),
    "reward_clip": (0.1, learned, {}),
    "priority_exponent": (0.5, table, {}),
    "actor_priorities": (True, initial, {}),
    "priority_eta": (0.5, learned, {}),
    "importance_sampling_exponent": (0.9, learned, {}),
    "epsilon_start": (0.2, explored, {}),
    "epsilon_end": (0.9, explored, {"epsilon_decay": 1}),
    "epsilon_decay": (2, explored, {}),
    "epsilon_ladder": (0.0, explored, {"epsilon_start": 0.5}),
    "evaluation_epsilon": (0.5, evaluated, {}),
    "hidden_sizes": ((9,), network, {}),
    "lstm_size": (7, network, {}),
    "head_sizes": ((9,), network, {}),
    "dueling": (False, network, {}),
}


def test_every_field_is_in_the_table():
    config_fields.assert_complete(FIELDS, R2D2Config)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_changes_something(field):
    config_fields.assert_changes_something(FIELDS, field, SMALL)


WRONG = [
    ("unroll_length", 0),
    ("burn_in", -1),
    ("period", 0),
    ("period", 41),
    ("targets", "retrace"),
    ("trace_lambda", 1.1),
    ("priority_eta", -0.1),
    ("priority_exponent", -0.5),
    ("importance_sampling_exponent", 1.5),
    ("reward_clip", 0.0),
    ("epsilon_start", 1.1),
    ("epsilon_end", -0.1),
    ("epsilon_decay", 0),
    ("epsilon_ladder", -1.0),
    ("evaluation_epsilon", 2.0),
    ("hidden_sizes", (0,)),
    ("head_sizes", 64),
    ("lstm_size", 0),
    ("rescale_values", "no"),
    ("learning_rate", math.inf),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_value_that_makes_no_sense_is_refused(field, value):
    config_fields.assert_refuses(R2D2Config, field, value)


def test_the_learner_goes_to_the_configured_device():
    config_fields.assert_learns_on_the_device(make_learner, SMALL, make_batch(SMALL))


def test_actions_of_real_numbers_are_refused():
    with pytest.raises(ValueError, match="expected one discrete action"):
        R2D2().make_networks(SPEC._replace(actions=dm_specs.BoundedArray((2,), np.float32, -1, 1)))


# --- the priorities of new sequences ---

VALUES = ((1, 3), (2, 2), (5, 7), (4, 4), (6, 8), (0, 1))  # of the action and of the greedy one, by row


def sequence(discounts, mask):
    values = np.array(VALUES, np.float32) * np.array(mask, np.float32)[:, None]  # None in closing rows
    return Step(
        observation=(),
        action=(),
        reward=np.float32([[9, 1, 2, 3, 4, 5]]),
        discount=np.float32([discounts]),
        start_of_episode=(),
        extras={"values": values[None]},
        mask=np.float32([mask]),
    )


PRIORITIES = {
    # name: (discounts, mask, changes; absolute errors of rows 1 to 4, without those that do not count)
    # Row 1: 1 + 2/2 + 4/4 - 2. Row 2: 2 + 3/2 + 8/4 - 5. Row 3: 3 + 4/2 + 1/4 - 4. Row 4: 4 + 1/2 - 6.
    "an episode that goes on": ((1,) * 6, (1,) * 6, {}, (1, 0.5, 1.25, 1.5)),
    # Rows 3 and 4 are the last of an episode and its closing row. Row 2: 2 + 3/2 - 5. Row 3: 3 - 4.
    "terminated": ((1, 1, 1, 0, 0, 1), (1, 1, 1, 1, 0, 1), {}, (1, 1.5, 1)),
    # The closing row has the value of row 3. Row 2: 2 + 3/2 + 4/4 - 5. Row 3: 3 + 4/2 - 4.
    "truncated": ((1, 1, 1, 1, 0, 1), (1, 1, 1, 1, 0, 1), {}, (1, 0.5, 1)),
    # Row 1: 1 + 2/2 + 4/4 - 2. Row 2: 2 + 2/2 + 8/4 - 5. Row 3: 2 + 2/2 + 1/4 - 4. Row 4: 2 + 1/2 - 6.
    "clipped rewards": ((1,) * 6, (1,) * 6, {"reward_clip": 2.0}, (1, 0, 0.75, 3.5)),
}


@pytest.mark.parametrize("name", PRIORITIES)
def test_actors_compute_priorities_by_hand(name):
    discounts, mask, changes, errors = PRIORITIES[name]
    settings = {"burn_in": 1, "unroll_length": 4, "n_step": 2, "discount": 0.5, "rescale_values": False}
    agent = R2D2(dataclasses.replace(SMALL, actor_priorities=True, **settings, **changes))
    expected = 0.9 * max(errors) + 0.1 * np.mean(errors)
    np.testing.assert_allclose(agent.initial_priorities(sequence(discounts, mask)), [expected], rtol=1e-5)


@pytest.mark.parametrize("targets", ["n_step", "watkins", "peng"])
def test_actors_compute_the_priorities_of_a_learner_with_their_parameters(targets):
    config = dataclasses.replace(SMALL, actor_priorities=True, targets=targets, epsilon_start=0.3)
    sample, nets = played(config)
    data = as_tensors(sample.data)
    errors, counted, _ = R2D2(config).errors(nets.q_network, nets.q_network, data)
    expected = networks.as_numpy(losses.sequence_priorities(errors, counted, config.priority_eta)) + 1e-6
    assert len(set(expected.tolist())) > 5
    np.testing.assert_allclose(sample.info.priority, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inference", ["alternating", "server"])
def test_actors_compute_priorities_in_a_program(inference):
    config = dataclasses.replace(SMALL, actor_priorities=True, min_replay_size=8, insert_burst=8)
    run = RunConfig(
        num_actors=2, envs_per_actor=2, max_env_steps=600, evaluate_period=None, inference=inference
    )
    result = launch.launch(make_program(R2D2(config), FakeEnvironment, run), engine="processes")
    assert result["env_steps"] == 600 and result["learner_steps"] > 10


# --- what is stored, and where it is learned from ---


def played(config, steps=300, envs=3, networks_fn=None, episode_length=7, truncate=False):
    """All that an actor of three envs wrote, as one batch, and the networks that acted."""
    torch.manual_seed(0)
    agent = R2D2(config, networks_fn)
    environment = environments.make(
        EchoEnvironment,
        num_envs=envs,
        options={"episode_length": episode_length, "truncate": truncate},
        wrappers=agent.environment_wrappers(),
    )
    spec = specs.make_environment_spec(environment)
    nets = agent.make_networks(spec)
    tables = [replay.Table.queue("replay", 1000)]
    client = replay.EmbeddedClient(tables, concurrent=False)
    adder = agent.make_adder(client, spec)
    loop = EnvironmentLoop(environment, PolicyActor(agent.make_policy(nets), adder, num_envs=envs, seed=0))
    for _ in range(steps // envs):
        loop.step()
    adder.flush()
    return client.sample_batch("replay", tables[0].info.current_size), nets


class CountingCore(networks.RecurrentCore):
    """Its state and its output are the number of rows since the episode began."""

    def step(self, inputs, state):
        count = state[0] + 1.0
        return count, (count, state[1])


def counting(config, spec):
    nets = R2D2Networks(config, spec)
    nets.q_network.core = CountingCore(nets.q_network.torso.output_size, config.lstm_size)
    nets.q_network.head = torch.nn.Identity()
    return nets


@pytest.mark.parametrize("burn_in", [0, 3, 9])
def test_the_stored_state_is_that_before_the_first_row_and_counts_on_through_burn_in_and_episodes(burn_in):
    config = dataclasses.replace(SMALL, burn_in=burn_in, lstm_size=4)  # As many counts as actions.
    sample, nets = played(config, networks_fn=counting)
    data = sample.data
    # Observations count the rows of an env, from 0. An episode has seven steps, thus eight rows.
    time = data.observation[..., 0] % 8
    stored = data.extras["state"][0]
    assert stored.shape == (len(time), config.lstm_size) and len(time) > 20
    # The state at a closing row is not kept: nothing that is learned depends on it.
    np.testing.assert_array_equal(stored[:, 0], time[:, 0] % 7)
    rows = as_tensors((data.observation, data.extras["state"], data.start_of_episode))
    counts = nets.q_network.unroll(*rows, burn_in)
    assert counts.shape[1] == config.unroll_length + 1
    counts, expected = counts[..., 0].detach().numpy(), time[:, burn_in:] + 1
    if burn_in == 0:
        counts, expected = counts[time[:, 0] < 7], expected[time[:, 0] < 7]
    np.testing.assert_array_equal(counts, expected)
    # The closing row is the eighth; no other has a mask of 0.
    np.testing.assert_array_equal(data.mask == 0, time == 7)


@pytest.mark.parametrize("period", [3, 6])
def test_each_step_is_learned_from_equally_often(period):
    config = dataclasses.replace(SMALL, period=period)
    data = played(config)[0].data
    counted = data.mask[:, config.burn_in : -1] == 1
    learned = data.observation[:, config.burn_in : -1, 0][counted].astype(int)
    times = np.bincount(learned)
    # All envs have the same observations. The first rows of a run, and its last, are seen less often.
    inside = np.arange(len(times)) % 8 != 7
    inside[: config.burn_in + 6] = inside[-2 * config.unroll_length :] = False
    assert set(times[inside]) == {3 * config.unroll_length // period}


@pytest.mark.parametrize("truncate", [False, True], ids=["terminated", "truncated"])
def test_rewards_tell_the_observation_and_action_of_their_row(truncate):
    config = dataclasses.replace(SMALL, previous_action_and_reward=True)
    data = played(config, truncate=truncate)[0].data
    real, observation = data.mask == 1, data.observation
    np.testing.assert_array_equal(
        data.reward[real], (100 * observation["observation"][..., 0] + data.action)[real]
    )
    follows = real[:, :-1]
    np.testing.assert_array_equal(observation["action"][:, 1:][follows], data.action[:, :-1][follows])
    np.testing.assert_array_equal(observation["reward"][:, 1:][follows], data.reward[:, :-1][follows])
    ends = real[:, :-1] & ~real[:, 1:]
    assert ends.any() and (data.discount[:, :-1][ends] == float(truncate)).all()


# --- the loss ---


def h(x):
    return math.copysign(1.0, x) * (math.sqrt(abs(x) + 1.0) - 1.0) + 1e-3 * x


def h_inverse(x):
    root = (math.sqrt(1.0 + 4e-3 * (abs(x) + 1.0 + 1e-3)) - 1.0) / 2e-3
    return math.copysign(1.0, x) * (root**2 - 1.0)


def unrolled(network, data, n, burn_in):
    """Values `[T, A]` of all rows of sequence `n`, one step at a time."""
    state = tuple(torch.as_tensor(part[n : n + 1]) for part in data.extras.get("state", ()))
    rows = []
    for t in range(data.mask.shape[1]):
        if data.start_of_episode[n, t]:
            state = network.initial_state(1)
        with torch.set_grad_enabled(t >= burn_in):
            values, state = network.step(torch.as_tensor(data.observation[n : n + 1, t]), state)
        rows.append(values[0])
    return torch.stack(rows)


VARIANTS = {
    "defaults": {},
    "no memory": {"lstm_size": None},
    "no burn-in": {"burn_in": 0, "n_step": 1, "unroll_length": 8},
    "plain": {"double": False, "dueling": False, "rescale_values": False, "n_step": 50},
    "traces": {"targets": "watkins", "trace_lambda": 0.8},
    "traces, not double": {"targets": "watkins", "trace_lambda": 0.8, "double": False},
}


def traced(config, data, n, values, rated, back):
    """Retrace's targets of sequence `n`: the trace is cut where the action is not greedy."""
    last = data.mask.shape[1] - 1
    targets = [0.0] * (last + 1)
    for t in reversed(range(config.burn_in, last)):
        row = t + 1
        best = int((values if config.double else rated)[row].argmax())
        expected = back(float(rated[row, best]))
        if row < last and data.mask[n, row] and best == data.action[n, row]:
            expected += config.trace_lambda * (targets[row] - back(float(rated[row, best])))
        discount = 0.9 * float(data.discount[n, t])
        targets[t] = float(np.clip(data.reward[n, t], -2, 2)) + (discount * expected if discount else 0.0)
    return targets


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_the_loss_against_a_loop(changes):
    config = dataclasses.replace(SMALL, **changes, discount=0.9, reward_clip=2.0)
    learner, batch = make_learner(config), make_batch(config)
    data, online, target = batch.data, learner.networks.q_network, learner.targets["q_network"]
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    there, back = (h, h_inverse) if config.rescale_values else (float, float)
    weights = (config.batch_size * batch.info.probability) ** -config.importance_sampling_exponent
    weights /= weights.max()
    total, count, priorities = torch.zeros(()), 0, []
    for n in range(config.batch_size):
        values = unrolled(online, data, n, config.burn_in)
        rated = unrolled(target, data, n, config.burn_in).detach()
        sizes, last = [], data.mask.shape[1] - 1
        for t in range(config.burn_in, last):
            if not data.mask[n, t]:
                continue
            expected, factor, row = 0.0, 1.0, t
            while row < last and data.mask[n, row] and row - t < config.n_step:
                expected += factor * float(np.clip(data.reward[n, row], -2, 2))
                factor *= 0.9 * float(data.discount[n, row])
                row += 1
            chooser = values if config.double else rated
            expected += factor * back(float(rated[row, chooser[row].argmax()]))
            if config.targets == "watkins":
                expected = traced(config, data, n, values.detach(), rated, back)[t]
            error = there(expected) - values[t, data.action[n, t]]
            total = total + 0.5 * weights[n] * error**2
            count += 1
            sizes.append(abs(error.item()))
        priorities.append(0.9 * max(sizes) + 0.1 * float(np.mean(sizes)))
    (total / count).backward()
    expected = [None if p.grad is None else p.grad.clone() for p in online.parameters()]
    learner.optimizer.step = lambda: None
    learner._max_gradient_norm = None
    result = learn(learner, batch)
    assert result.metrics["loss"].item() == pytest.approx((total / count).item(), rel=1e-4)
    assert result.metrics["transitions"] == count
    np.testing.assert_allclose(result.priorities, priorities, rtol=1e-4)
    for parameter, gradient in zip(online.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)


def test_what_does_not_count_may_be_anything():
    batch = make_batch()
    expected = learn(make_learner(), batch)
    data = batch.data
    beyond = data.mask == 0
    for array in (data.reward, data.discount):
        array[beyond] = np.nan
    data.action[beyond] = 0
    data.reward[:, -1] = data.discount[:, -1] = np.nan  # the row to bootstrap from
    data.reward[:, : SMALL.burn_in] = np.nan
    result = learn(make_learner(), batch)
    assert result.metrics["loss"] == expected.metrics["loss"]
    torch.testing.assert_close(result.priorities, expected.priorities, rtol=0, atol=0)


@pytest.mark.parametrize("autocast", [False, True])
def test_images_are_learned_from(autocast):
    config = dataclasses.replace(SMALL, autocast=autocast, batch_size=3, unroll_length=4)
    learner, batch = make_learner(config, IMAGES), make_batch(config, spec=IMAGES)
    before = [p.detach().clone() for p in learner.networks.parameters()]
    assert np.isfinite(learn(learner, batch).metrics["loss"].item())
    after = list(learner.networks.parameters())
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


# --- acting ---


def test_choices_repeat_from_the_seed_and_from_the_saved_state():
    agent = R2D2(SMALL)
    nets = agent.make_networks(SPEC)
    observation = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)

    def act(policy, times=3):
        state, actions = policy.initial_state(64), []
        for _ in range(times):
            action, _, state = policy.step(observation, state)
            actions.append(action.tolist())
        return actions

    first, second = agent.make_policy(nets), agent.make_policy(nets)
    first.seed(3)
    second.seed(3)
    assert act(first) == act(second)
    second.restore(first.save())
    assert act(first) == act(second)
    second.seed(4)
    assert act(first) != act(second)
    greedy = agent.make_policy(nets, evaluation=True)
    assert act(greedy) == act(greedy)
