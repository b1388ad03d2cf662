"""What is asked of every agent's config: each field changes something, and refuses what makes no sense.

A table holds, for each field but `device` and `devices`: another value than the default (None: the other of
True and False), a probe (agent and spec to arrays or text) that shows it, and what it needs to matter.
"""

import contextlib
import dataclasses
import math
from unittest import mock

import numpy as np
import torch
import tree
from agent_batches import IMAGES, NUMBERS, VECTOR, batch_of, flat, learn, make_learner, make_policy, played

from framework import adders, environments, replay, specs
from framework.environments.testing import FakeEnvironment

# --- probes ---


def learned(agent, spec):
    """Rates, priorities and parameters after three steps, each an env step after the one before."""
    learner, seen = make_learner(agent, spec), []
    for seed in range(3):
        learner.env_steps = seed
        result = learn(learner, batch_of(agent, spec, seed))
        seen += [float(result.metrics.get("learning_rate", 0.0))]
        seen += [] if result.priorities is None else [float(each) for each in result.priorities]
    return np.concatenate([seen, flat(learner.networks).double().numpy()])


def made(agent, spec):
    """How the learner computes gradients, and its precision."""
    learner = make_learner(agent, spec)
    return type(learner._gradient), learner._eager.precision is contextlib.nullcontext


def _actions(policy, times):
    observation, state = np.zeros((2, *VECTOR.shape), np.float32), policy.initial_state(2)
    return np.array([policy.step(observation, state)[0] for _ in range(times)])


def explored(agent, spec):
    """How often each of two envs does what it would not have done greedily, after one env step."""
    policy, greedy = make_policy(agent, spec), make_policy(agent, spec, evaluation=True)
    policy.seed(1)
    return (_actions(policy, 200) != _actions(greedy, 1)).mean(0)


def evaluated(agent, spec):
    """How much the actions of two envs differ in evaluations."""
    return _actions(make_policy(agent, spec, evaluation=True), 100).std(0)


def acted(agent, spec):
    """The second actions of 50 envs before learning begins, and what is stored with them."""
    policy = make_policy(agent, spec, version=0)
    observation = 10 * np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    state = policy.initial_state(50)
    for _ in range(2):
        action, extras, state = policy.step(observation, state)
    return np.concatenate([np.ravel(leaf) for leaf in tree.flatten((action, extras))])


def acted_in_numbers(agent, spec):
    return acted(agent, spec._replace(actions=NUMBERS))


def table(agent, spec):
    """What its table holds, and when it takes and gives."""
    info = agent.for_program(5).make_tables(spec)[0].info
    return str((info.max_size, info.max_times_sampled, info.sampler_options, info.rate_limiter_info))


def described(agent, spec):
    """What it says of its observations."""
    return str(agent.describe_inputs(spec))


def network(agent, spec):
    """The layers of its networks, and their first parameters."""
    torch.manual_seed(0)
    networks = agent.make_networks(spec)
    return str(networks) + str(flat(networks).sum())


def image_network(agent, spec):
    return network(agent, IMAGES)


def written(agent, spec):
    """Items of three envs: shapes, observations, rewards, and priorities."""
    sample, _, _ = played(agent, FakeEnvironment, spec=spec, episode_length=7)
    info, data = sample.info, sample.data
    parts = *tree.flatten(data.reward), info.priority, *tree.flatten(data.observation)
    return np.concatenate([np.ravel(part) for part in parts])


def written_again(agent, spec):
    """The goals in the items of two envs that play one episode of the maze."""
    maze = environments.make("tasks:PointMaze", num_envs=2, seed=0, options={"max_steps": 6})
    client = replay.EmbeddedClient([replay.Table.queue(adders.REPLAY_TABLE, 1000)], concurrent=False)
    adder = agent.make_adder(client, specs.make_environment_spec(maze))
    adder.add_first(maze.reset())
    for action in np.random.default_rng(0).uniform(-1, 1, (6, 2, 2)).astype(np.float32):
        adder.add(action, maze.step(action))
    adder.flush()
    size = client.server_info()[adders.REPLAY_TABLE].current_size
    return client.sample_batch(adders.REPLAY_TABLE, size).data.observation[specs.DESIRED_GOAL]


def fetched(agent, spec):
    """What the dataset is asked to keep ready, and the adder to keep under way."""
    with (
        mock.patch("framework.torch_agents.Dataset") as dataset,
        mock.patch("framework.adders.UnrollAdder") as adder,
    ):
        agent.make_dataset(None), agent.make_adder(None, spec)
    return str((dataset.call_args, adder.call_args))


def mixed(agent, spec):
    """Which tables batches are of, and the episodes that fill one of them."""
    with (
        mock.patch("framework.torch_agents.Dataset") as dataset,
        mock.patch("framework.torch_agents.fill") as fill,
    ):
        agent.make_dataset(None)
    return str((dataset.call_args.args, fill.call_args and fill.call_args.args[1:3]))


def rated(agent, spec):
    """Values by which the policy of IQN chooses."""
    torch.manual_seed(0)
    with torch.no_grad():
        return agent.make_networks(spec).values(torch.ones(2, 4)).numpy()


# --- tables ---

QUICK = {"learning_rate": 0.1}
DECAY = {"learning_rate_decay": 3}
PRIORITIZED, MUNCHAUSEN = {"prioritized": True}, {"munchausen": 0.9, "num_atoms": 1}
EPSILON, NOISY = {"noisy": False}, {"random_start": False}
ATOMS, PENALTY, RMSPROP = {"num_atoms": 11}, {"target_kl": 0.001}, {"optimizer": "rmsprop"}


def by(probe, needs=None, **values):
    """Fields with other values than the defaults, which `probe` shows where what they need is set."""
    return {name: (value, probe, needs or {}) for name, value in values.items()}


# Fields of all agents. What has to be set is left out where a config has no such field.
FIELDS = {
    **by(learned, discount=0.5, learning_rate=3e-2, learning_rate_decay=3, adam_epsilon=1e-1),
    **by(learned, max_gradient_norm=1e-9),
    **by(learned, needs=DECAY, learning_rate_end=0.9),
    **by(made, step_mode="compile", autocast=None),
    **by(described, inputs=("observation=bytes",)),
    # Replay.
    **by(table, max_replay_size=5000, min_replay_size=17, batch_size=32, samples_per_insert=3),
    **by(table, insert_burst=7, prioritized=None),
    **by(mixed, demonstrations="data/of-another-run"),
    **by(mixed, needs={"demonstrations": "data"}, demonstration_fraction=0.3),
    **by(learned, target_update_period=2),
    **by(learned, needs={"target_update_period": 1}, target_update_rate=0.5),
    **by(written, n_step=2, reward_clip=0.1),
    **by(written_again, hindsight_goals=2),
    **by(written_again, needs={"hindsight_goals": 2}, hindsight_strategy="final"),
    **by(table, needs=PRIORITIZED, priority_exponent=0.3),
    **by(learned, needs=PRIORITIZED, importance_sampling_exponent=0.9, importance_sampling_annealing=2),
    # Values of discrete actions.
    **by(learned, needs={"num_atoms": 1}, huber_delta=0.01, munchausen=0.9),
    **by(learned, needs={"learning_rate": 0.5}, double=None),
    **by(learned, needs=MUNCHAUSEN, munchausen_temperature=1.0, munchausen_clip=0.01),
    **by(explored, needs=EPSILON, epsilon_start=0.2, epsilon_decay=2),
    **by(explored, needs={"epsilon_decay": 1, **EPSILON}, epsilon_end=0.9),
    **by(explored, needs={"epsilon_start": 0.5, **EPSILON}, epsilon_ladder=3.0),
    **by(evaluated, evaluation_epsilon=0.5),
    **by(network, num_atoms=5, num_cosines=8),
    **by(learned, largest_return=1.0),
    **by(learned, needs=ATOMS, v_min=-3.0, v_max=3.0),
    **by(learned, num_quantiles=4, num_target_quantiles=4),
    **by(rated, num_policy_quantiles=8, risk=0.25),
    # Networks.
    **by(image_network, torso="deep", torso_size=9),
    **by(network, hidden_sizes=(9,), encoder_sizes=(9,), head_sizes=(9,), embedding_hidden_sizes=(8, 8)),
    **by(network, embedding_size=5, activation="elu", layer_norm=None, dueling=None, noisy=None, shared=None),
    **by(network, recurrent="gru", lstm_size=7),
    **by(learned, needs={"noisy": True}, initial_noise=0.1),
    **by(network, needs={"recurrent": "lstm"}, recurrent_size=16),
    **by(network, needs={"lstm_size": 6}, lstm_layers=2),
    **by(acted_in_numbers, needs=NOISY, initial_std=0.1),
    **by(acted_in_numbers, tanh_mean=None),
    # Critics of continuous actions.
    **by(learned, critic_learning_rate=3e-2, embedding_learning_rate=3e-3, actor_delay=3, reward_scale=0.1),
    **by(learned, temperature=0.3, initial_temperature=0.3, temperature_learning_rate=1e-2),
    **by(learned, smoothing_std=0.1, clip_targets=None, num_samples=5, epsilon_penalty=None),
    **by(learned, initial_mean_multiplier=1.0, initial_std_multiplier=1.0, dual_learning_rate=1e-1),
    **by(network, num_critics=4, critic_hidden_sizes=(9,)),
    **by(network, needs={"dropout": 0.0}, network="simba"),
    **by(learned, target_critics=1, dropout=0.5, dropped_quantiles=3, adam_beta1=0.1),
    **by(learned, needs={"temperature_learning_rate": 1.0}, target_entropy=5.0),
    # Learning from data.
    **by(learned, actor_penalty=1.0, critic_penalty=1.0, conservative_weight=1.0, diversity_weight=5.0),
    **by(learned, expectile=0.9, largest_weight=0.5, value_weight=0.5),
    **by(written, calibrated=False),
    **by(learned, needs={"smoothing_std": 1.0}, smoothing_clip=0.1),
    **by(acted, random_start=None),
    **by(acted, needs=NOISY, exploration_std=0.5, exploration_correlation=0.85, exploration_ladder=2.0),
    **by(learned, needs={"initial_temperature": 0.1}, epsilon=0.5),
    **by(learned, needs=QUICK, epsilon_mean=1e-6, epsilon_std=1e-2),
    # Sequences and unrolls.
    **by(written, unroll_length=5, burn_in=2, period=2, previous_action_and_reward=None),
    **by(written, previous_reward=None),
    **by(written, actor_priorities=None),
    **by(learned, needs=PRIORITIZED, priority_eta=0.5),
    **by(learned, targets="watkins", rescale_values=None, vtrace_lambda=0.5, clip_rho=0.5, clip_c=0.1),
    **by(learned, clip_target=0.5, optimizer="rmsprop", entropy_coefficient=0.7, gae_lambda=0.5),
    **by(learned, normalize_observations=None, normalize_rewards=None, normalize_advantages=None),
    **by(learned, target_kl=0.001, epochs=3, minibatch_size=16, value_learning_rate=0.1),
    **by(learned, needs={"targets": "peng"}, trace_lambda=0.5),
    # World models.
    **by(learned, learning_rate_warmup=2, gradient_clip_ratio=0.01, free_nats=9.0, uniform_mix=0.5),
    **by(learned, dynamics_coefficient=3.0, representation_coefficient=3.0),
    **by(learned, slow_value_coefficient=3.0, replay_value_coefficient=3.0),
    **by(learned, imagination_length=2, imagination_rows=2),
    **by(network, deter_size=10, blocks=1, stoch_size=2, classes=4, hidden_size=3, units=7, num_layers=2),
    **by(network, num_bins=8),
    **by(image_network, depth=2),
    **by(table, queue_batches=5, max_policy_lag=1, episodes_per_batch=4),
    **by(fetched, unrolls_in_flight=2, prefetch_batches=3),
    **by(learned, needs=QUICK, clip=0.01),
    **by(learned, needs=RMSPROP, rmsprop_decay=0.5, rmsprop_momentum=0.5),
    **by(acted, actor_autocast=None),
    **by(learned, needs={"max_gradient_norm": None}, value_coefficient=5.0),
    **by(learned, needs={**DECAY, "learning_rate_end": 1.0, "learning_rate": 0.01}, clip_end=0.01),
    **by(learned, needs={**DECAY, "learning_rate_end": 1.0, "entropy_coefficient": 0.7}, entropy_end=0.01),
    **by(learned, needs=PENALTY, initial_kl_coefficient=5.0),
    **by(learned, needs={"learning_rate": 0.01}, value_clip=0.001),
    # Costs.
    **by(learned, initial_multiplier=1.0),
    **by(
        learned, needs={"initial_multiplier": 9.0}, cost_limit=0.5, proportional_gain=3.0, integral_gain=2.0
    ),
    **by(learned, needs={"initial_multiplier": 9.0}, derivative_gain=1.0),
}
OF_SEQUENCES = {"n_step": (2, learned, {}), "reward_clip": (0.1, learned, {})}
OF_DELAYED = {"target_update_period": (1, learned, {})}

NAN, INF = math.nan, math.inf
SIZES, COUNT, RATE, SHARE = (64, (0,), (8, 0.5)), (0, 1.5, None), (-1.0, NAN, "1"), (-0.1, 1.1)
# Values that make no sense for a field of any agent. A number of at least 0 or of more than 0 is no share.
WRONG = {
    name: values
    for values, names in [
        (SIZES, "hidden_sizes critic_hidden_sizes head_sizes encoder_sizes embedding_hidden_sizes"),
        (SIZES, "model_hidden_sizes"),
        (COUNT, "n_step max_replay_size min_replay_size batch_size insert_burst target_update_period"),
        (COUNT, "num_critics actor_delay num_atoms num_cosines unroll_length period queue_batches"),
        (COUNT, "unrolls_in_flight epochs num_quantiles num_target_quantiles embedding_size epsilon_decay"),
        (COUNT, "importance_sampling_annealing recurrent_size evaluation_tasks tasks_per_worker"),
        (COUNT, "minibatch_tasks rollout_length lstm_layers meta_steps imagined_envs horizon models"),
        (COUNT, "model_batch_size model_epochs"),
        (("no", 1), "normalize_advantages double shared random_start autocast"),
        ((0, 1.5, "8"), "target_critics learning_rate_decay episodes_per_batch lstm_size minibatch_size"),
        ((0, 2.5), "num_samples num_policy_quantiles"),
        ((-1, 1.5), "burn_in max_policy_lag prefetch_batches pretraining_steps inner_steps"),
        (
            (-1, 1.5),
            "learning_rate_warmup evaluation_inner_steps hindsight_goals torso_size dropped_quantiles",
        ),
        (RATE, "learning_rate adam_epsilon critic_learning_rate value_learning_rate dual_learning_rate"),
        (RATE, "temperature_learning_rate embedding_learning_rate inner_learning_rate value_coefficient"),
        (RATE, "entropy_coefficient priority_exponent epsilon_ladder initial_kl_coefficient clip_rho clip_c"),
        (RATE, "rmsprop_momentum smoothing_std exploration_std exploration_ladder demonstration_priority"),
        (RATE, "cost_limit initial_multiplier proportional_gain integral_gain derivative_gain"),
        (RATE, "margin weight_decay free_nats dynamics_coefficient representation_coefficient"),
        (RATE, "slow_value_coefficient replay_value_coefficient model_learning_rate"),
        (COUNT, "imagination_length blocks stoch_size classes hidden_size units num_layers depth"),
        ((1, 2.5), "num_bins"),
        ((0, 1.5, "8"), "imagination_rows"),
        ((0.0, NAN), "gradient_clip_ratio"),
        (SHARE, "return_range_rate uniform_mix model_persistence validation_fraction"),
        ((0.0, NAN), "reward_clip max_gradient_norm huber_delta munchausen_temperature"),
        ((0, NAN), "munchausen_clip initial_noise samples_per_insert reward_scale"),
        ((-1.0, INF), "temperature"),
        ((0.0, INF), "initial_temperature smoothing_clip value_clip target_kl initial_std"),
        ((0.0, INF), "epsilon_mean epsilon_std clip_target initial_mean_multiplier initial_std_multiplier"),
        ((0.0, 3.0), "epsilon epsilon_penalty"),  # The logarithm of 20 samples is 2.996.
        (SHARE, "discount learning_rate_end importance_sampling_exponent munchausen epsilon_start"),
        (SHARE, "epsilon_end evaluation_epsilon clip_end trace_lambda vtrace_lambda gae_lambda priority_eta"),
        (SHARE, "rmsprop_decay entropy_end dropout adam_beta1"),
        ((0.0, 1.5), "target_update_rate risk"),
        ((0.0, 1.0), "clip demonstration_fraction"),
        (("wide", 1), "torso network activation optimizer recurrent targets hindsight_strategy"),
        ((3,), "demonstrations"),
        ((1.0, 1.5), "exploration_correlation"),
        (("gpu", None), "device"),
        (({"torso": "gpu"}, {"torso": 1.5}, "cpu"), "devices"),
        (("observation=pixels", 1), "inputs"),
        ((NAN,), "target_entropy v_min"),
        ((INF,), "v_max"),
    ]
    for name in names.split()
}


def unchanged(agent, spec, table):
    """Names of the fields in `table` that change nothing, or that give two results for the same config."""
    seen, names = {}, []
    for field, (value, probe, others) in table.items():
        others = {name: other for name, other in others.items() if hasattr(agent.config, name)}
        base = dataclasses.replace(agent.config, **others)
        default = getattr(base, field)
        value = not default if value is None and default in (True, False) else value
        assert value != default, field
        if (base, probe) not in seen:
            seen[base, probe] = probe(type(agent)(base), spec)
            np.testing.assert_equal(probe(type(agent)(base), spec), seen[base, probe], field)
        changed = type(agent)(dataclasses.replace(base, **{field: value}))
        before, after = seen[base, probe], probe(changed, spec)
        if np.shape(before) == np.shape(after) and np.all(np.asarray(before) == np.asarray(after)):
            names.append(field)
    return names


def accepted(config, wrong):
    """The fields and values of `wrong` that the config takes, or refuses with another message."""
    found = []
    for field, values in wrong.items():
        for value in values:
            try:
                dataclasses.replace(config, **{field: value})
            except ValueError as error:
                if str(error).startswith(f"{field}: got {value!r}, expected "):
                    continue
            found.append((field, value))
    return found
