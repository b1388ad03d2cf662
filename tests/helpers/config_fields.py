"""What is asked of every agent's config: each field changes something, and refuses what makes no sense.

A table holds, for each field but `device`: another value than the default (None: the other of True and
False), a probe (agent and spec to arrays or text) that shows it, and what has to be set for it to matter.
"""

import ast
import contextlib
import dataclasses
import inspect
import io
import math
import textwrap
import tokenize
from unittest import mock

import numpy as np
import torch
import tree
from agent_batches import CONTINUOUS, IMAGES, VECTOR, batch_of, flat, learn, make_learner, make_policy, played

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
    """Whether the learner compiles its loss, and its precision."""
    # Compiling takes half a minute of a slow machine; that it is asked for is what matters here.
    with mock.patch("torch.compile", return_value="compiled") as compiled:
        learner = make_learner(agent, spec)
    return compiled.called, learner._precision is contextlib.nullcontext


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
    return acted(agent, CONTINUOUS)


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
    parts = data.reward, info.priority, *tree.flatten(data.observation)
    return np.concatenate([np.ravel(part) for part in parts])


def fetched(agent, spec):
    """What the dataset is asked to keep ready, and the adder to keep under way."""
    with (
        mock.patch("framework.torch_agents.Dataset") as dataset,
        mock.patch("framework.adders.UnrollAdder") as adder,
    ):
        agent.make_dataset(None), agent.make_adder(None, spec)
    return str((dataset.call_args, adder.call_args))


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
# Fields of all agents. What has to be set is left out where a config has no such field.
FIELDS = {
    "discount": (0.5, learned, {}),
    "learning_rate": (3e-2, learned, {}),
    "learning_rate_decay": (3, learned, {}),
    "learning_rate_end": (0.9, learned, DECAY),
    "adam_epsilon": (1e-1, learned, {}),
    "max_gradient_norm": (1e-9, learned, {}),
    "compile_loss": (None, made, {}),
    "autocast": (None, made, {}),
    "inputs": (("observation=bytes",), described, {}),
    # Replay.
    "max_replay_size": (5000, table, {}),
    "min_replay_size": (17, table, {}),
    "batch_size": (32, table, {}),
    "samples_per_insert": (3, table, {}),
    "insert_burst": (7, table, {}),
    "target_update_period": (2, learned, {}),
    "target_update_rate": (0.5, learned, {"target_update_period": 1}),
    "n_step": (2, written, {}),
    "reward_clip": (0.1, written, {}),
    "prioritized": (None, table, {}),
    "priority_exponent": (0.3, table, PRIORITIZED),
    "importance_sampling_exponent": (0.9, learned, PRIORITIZED),
    "importance_sampling_annealing": (2, learned, PRIORITIZED),
    # Values of discrete actions.
    "huber_delta": (0.01, learned, {"num_atoms": 1}),
    "double": (None, learned, {"learning_rate": 0.5}),
    "munchausen": (0.9, learned, {"num_atoms": 1}),
    "munchausen_temperature": (1.0, learned, MUNCHAUSEN),
    "munchausen_clip": (0.01, learned, MUNCHAUSEN),
    "epsilon_start": (0.2, explored, EPSILON),
    "epsilon_end": (0.9, explored, {"epsilon_decay": 1, **EPSILON}),
    "epsilon_decay": (2, explored, EPSILON),
    "epsilon_ladder": (3.0, explored, {"epsilon_start": 0.5, **EPSILON}),
    "evaluation_epsilon": (0.5, evaluated, {}),
    "num_atoms": (5, network, {}),
    "v_min": (-3.0, learned, ATOMS),
    "v_max": (3.0, learned, ATOMS),
    "num_quantiles": (4, learned, {}),
    "num_target_quantiles": (4, learned, {}),
    "num_policy_quantiles": (8, rated, {}),
    "num_cosines": (8, network, {}),
    "risk": (0.25, rated, {}),
    # Networks.
    "torso": ("deep", image_network, {}),
    "hidden_sizes": ((9,), network, {}),
    "encoder_sizes": ((9,), network, {}),
    "head_sizes": ((9,), network, {}),
    "embedding_hidden_sizes": ((8, 8), network, {}),
    "embedding_size": (5, network, {}),
    "activation": ("elu", network, {}),
    "layer_norm": (None, network, {}),
    "dueling": (None, network, {}),
    "noisy": (None, network, {}),
    "initial_noise": (0.1, learned, {"noisy": True}),
    "shared": (None, network, {}),
    "recurrent": ("gru", network, {}),
    "recurrent_size": (16, network, {"recurrent": "lstm"}),
    "lstm_size": (7, network, {}),
    "initial_std": (0.1, acted_in_numbers, NOISY),
    "tanh_mean": (None, acted_in_numbers, {}),
    # Critics of continuous actions.
    "critic_learning_rate": (3e-2, learned, {}),
    "embedding_learning_rate": (3e-3, learned, {}),
    "num_critics": (3, network, {}),
    "actor_delay": (3, learned, {}),
    "reward_scale": (0.1, learned, {}),
    "temperature": (0.3, learned, {}),
    "initial_temperature": (0.3, learned, {}),
    "temperature_learning_rate": (1e-2, learned, {}),
    "target_entropy": (5.0, learned, {"temperature_learning_rate": 1.0}),
    "smoothing_std": (0.1, learned, {}),
    "smoothing_clip": (0.1, learned, {"smoothing_std": 1.0}),
    "clip_targets": (None, learned, {}),
    "random_start": (None, acted, {}),
    "exploration_std": (0.5, acted, NOISY),
    "exploration_correlation": (0.85, acted, NOISY),
    "exploration_ladder": (2.0, acted, NOISY),
    "num_samples": (5, learned, {}),
    "epsilon": (0.5, learned, {"initial_temperature": 0.1}),
    "epsilon_penalty": (None, learned, {}),
    "epsilon_mean": (1e-6, learned, QUICK),
    "epsilon_std": (1e-2, learned, QUICK),
    "initial_mean_multiplier": (1.0, learned, {}),
    "initial_std_multiplier": (1.0, learned, {}),
    "dual_learning_rate": (1e-1, learned, {}),
    # Sequences and unrolls.
    "unroll_length": (5, written, {}),
    "burn_in": (2, written, {}),
    "period": (2, written, {}),
    "previous_action_and_reward": (None, written, {}),
    "actor_priorities": (None, written, {}),
    "priority_eta": (0.5, learned, PRIORITIZED),
    "targets": ("watkins", learned, {}),
    "trace_lambda": (0.5, learned, {"targets": "peng"}),
    "rescale_values": (None, learned, {}),
    "queue_batches": (5, table, {}),
    "unrolls_in_flight": (2, fetched, {}),
    "prefetch_batches": (3, fetched, {}),
    "vtrace_lambda": (0.5, learned, {}),
    "clip_rho": (0.5, learned, {}),
    "clip_c": (0.1, learned, {}),
    "clip": (0.01, learned, QUICK),
    "clip_target": (0.5, learned, {}),
    "optimizer": ("rmsprop", learned, {}),
    "rmsprop_decay": (0.5, learned, RMSPROP),
    "rmsprop_momentum": (0.5, learned, RMSPROP),
    "actor_autocast": (None, acted, {}),
    "value_coefficient": (5.0, learned, {"max_gradient_norm": None}),
    "entropy_coefficient": (0.7, learned, {}),
    "gae_lambda": (0.5, learned, {}),
    "max_policy_lag": (1, table, {}),
    "episodes_per_batch": (4, table, {}),
    "normalize_observations": (None, learned, {}),
    "normalize_rewards": (None, learned, {}),
    "normalize_advantages": (None, learned, {}),
    "clip_end": (0.01, learned, {**DECAY, "learning_rate_end": 1.0, "learning_rate": 0.01}),
    "target_kl": (0.001, learned, {}),
    "initial_kl_coefficient": (5.0, learned, PENALTY),
    "value_clip": (0.001, learned, {"learning_rate": 0.01}),
    "epochs": (3, learned, {}),
    "minibatch_size": (16, learned, {}),
    "value_learning_rate": (0.1, learned, {}),
}
OF_SEQUENCES = {"n_step": (2, learned, {}), "reward_clip": (0.1, learned, {})}
OF_DELAYED = {"target_update_period": (1, learned, {})}

NAN, INF = math.nan, math.inf
SIZES, COUNT, RATE, SHARE = (64, (0,), (8, 0.5)), (0, 1.5, None), (-1.0, NAN, "1"), (-0.1, 1.1)
# Values that make no sense for a field of any agent. A number of at least 0 or of more than 0 is no share.
WRONG = {
    **dict.fromkeys(("hidden_sizes", "head_sizes", "encoder_sizes", "embedding_hidden_sizes"), SIZES),
    **dict.fromkeys(("n_step", "max_replay_size", "min_replay_size", "batch_size", "insert_burst"), COUNT),
    **dict.fromkeys(
        ("target_update_period", "num_critics", "actor_delay", "num_atoms", "num_cosines"), COUNT
    ),
    **dict.fromkeys(("unroll_length", "period", "queue_batches", "unrolls_in_flight", "epochs"), COUNT),
    **dict.fromkeys(("num_quantiles", "num_target_quantiles", "embedding_size", "epsilon_decay"), COUNT),
    **dict.fromkeys(("importance_sampling_annealing", "recurrent_size", "evaluation_tasks"), COUNT),
    **dict.fromkeys(("tasks_per_worker", "minibatch_tasks", "rollout_length"), COUNT),
    **dict.fromkeys(("normalize_advantages", "double", "shared", "random_start", "autocast"), ("no", 1)),
    **dict.fromkeys(
        ("learning_rate_decay", "episodes_per_batch", "lstm_size", "minibatch_size"), (0, 1.5, "8")
    ),
    **dict.fromkeys(("num_samples", "num_policy_quantiles"), (1, 2.5)),
    **dict.fromkeys(("burn_in", "max_policy_lag", "prefetch_batches", "pretraining_steps"), (-1, 1.5)),
    **dict.fromkeys(("inner_steps", "evaluation_inner_steps"), (-1, 1.5)),
    **dict.fromkeys(("learning_rate", "adam_epsilon", "critic_learning_rate", "value_learning_rate"), RATE),
    **dict.fromkeys(("dual_learning_rate", "temperature_learning_rate", "embedding_learning_rate"), RATE),
    **dict.fromkeys(("inner_learning_rate", "value_coefficient", "entropy_coefficient"), RATE),
    **dict.fromkeys(("priority_exponent", "epsilon_ladder", "initial_kl_coefficient", "clip_rho"), RATE),
    **dict.fromkeys(("clip_c", "rmsprop_momentum", "smoothing_std", "exploration_std"), RATE),
    **dict.fromkeys(("exploration_ladder", "demonstration_priority", "margin"), RATE),
    **dict.fromkeys(
        ("reward_clip", "max_gradient_norm", "huber_delta", "munchausen_temperature"), (0.0, NAN)
    ),
    **dict.fromkeys(("munchausen_clip", "initial_noise", "samples_per_insert", "reward_scale"), (0, NAN)),
    **dict.fromkeys(("temperature", "initial_temperature", "smoothing_clip", "value_clip"), (0.0, INF)),
    **dict.fromkeys(("target_kl", "initial_std", "epsilon_mean", "epsilon_std", "clip_target"), (0.0, INF)),
    **dict.fromkeys(("initial_mean_multiplier", "initial_std_multiplier"), (0.0, INF)),
    **dict.fromkeys(("epsilon", "epsilon_penalty"), (0.0, 3.0)),  # The logarithm of 20 samples is 2.996.
    **dict.fromkeys(("discount", "learning_rate_end", "importance_sampling_exponent", "munchausen"), SHARE),
    **dict.fromkeys(("epsilon_start", "epsilon_end", "evaluation_epsilon", "clip_end"), SHARE),
    **dict.fromkeys(("trace_lambda", "vtrace_lambda", "gae_lambda", "priority_eta", "rmsprop_decay"), SHARE),
    **dict.fromkeys(("target_update_rate", "risk"), (0.0, 1.5)),
    **dict.fromkeys(("clip", "demonstration_fraction"), (0.0, 1.0)),
    **dict.fromkeys(("torso", "activation", "optimizer", "recurrent", "targets"), ("wide", 1)),
    "exploration_correlation": (1.0, 1.5),
    "device": ("gpu", None),
    "inputs": ("observation=pixels", 1),
    "target_entropy": (NAN,),
    "v_min": (NAN,),
    "v_max": (INF,),
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
        before, after = (
            seen[base, probe],
            probe(type(agent)(dataclasses.replace(base, **{field: value})), spec),
        )
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


def fields_table(config):
    """All fields of ``config`` as a table in Markdown, from the sources of the class and of its bases."""
    rows = {}
    for cls in reversed(config.__mro__[:-1]):
        source = textwrap.dedent(inspect.getsource(cls))
        comments = {
            token.start[0]: token.string.lstrip("# ")
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        for node in ast.parse(source).body[0].body:
            if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
                lines = [line for line in range(node.lineno, node.end_lineno + 1) if line in comments]
                first = node.lineno  # of the comment above, where none stands behind the field
                while not lines and source.splitlines()[first - 2].strip().startswith("#"):
                    first -= 1
                effect = " ".join(comments[line] for line in lines or range(first, node.lineno))
                effect = effect.replace("|", "\\|")
                default = ast.unparse(node.value).replace("dataclasses.field(default_factory=dict)", "{}")
                rows[node.target.id] = f"| `{node.target.id}` | `{default}` | {effect} |"
    assert list(rows) == [field.name for field in dataclasses.fields(config)]
    return "\n".join(["| field | default | effect |", "|---|---|---|", *rows.values()])
