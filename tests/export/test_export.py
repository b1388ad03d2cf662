"""Exported policies act as `load_policy` does, in a process without torch and Repertory too."""

import json
import subprocess
import sys

import agent_cases
import fresh_runs
import numpy as np
import pytest
import torch
import tree

from agents.impala import IMPALA, IMPALAConfig
from agents.ppo import PPO, PPOConfig
from agents.ppo_dqn import PPODQN
from agents.random_actions import RandomActions
from agents.sac import SAC, SACConfig
from framework import specs
from framework.environments.testing import draw, make_spec
from framework.export import PolicyStep, export, load
from framework.networks import as_tensors
from framework.programs import load_policy

NUMBERS = specs.BoundedArray((3,), np.float32, [-2.0, 0.0, -1.0], [2.0, 1.0, 5.0])
MASKED = {
    "vector": specs.Array((4,), np.float32),
    "camera": specs.BoundedArray((6, 6, 2), np.uint8, 0, 255),
    "place": (specs.DiscreteArray(5), specs.Array((), np.float32)),
    "action_mask": specs.Array((3,), bool),
}
NESTED = {"grip": specs.DiscreteArray(3), "arm": specs.BoundedArray((2,), np.float64, -2.0, [1.0, 3.0])}
SMALL = {"hidden_sizes": (8,), "unroll_length": 6}
NORMALIZED = PPO(PPOConfig(**SMALL, normalize_observations=True))
VECTOR = specs.Array((4,), np.float32)
BOTH = make_spec(VECTOR, specs.DiscreteArray(3, np.int64))
OF_AGENTS = specs.EnvironmentSpec(*[dict.fromkeys([f"agent_{i}" for i in range(3)], each) for each in BOTH])
# One for each kind of policy. `python tests/export/test_export.py` checks all agents, in both formats.
FAMILIES = {
    "ppo, masks, pictures and a nest": (NORMALIZED, make_spec(MASKED, specs.DiscreteArray(3))),
    "ppo, a GRU": (
        PPO(PPOConfig(**SMALL, recurrent="gru", recurrent_size=5)),
        make_spec(MASKED, specs.DiscreteArray(3)),
    ),
    "impala, an LSTM and nested actions": (
        IMPALA(IMPALAConfig(**agent_cases.UNROLLS, lstm_size=4)),
        make_spec(VECTOR, NESTED),
    ),
    "two policies of three agents": (PPODQN(), OF_AGENTS),
    **{name: (agent_cases.SMALL[name], make_spec(VECTOR, NUMBERS)) for name in ("td7", "recurrent_td3")},
    "sac, statistics of observations": (
        SAC(SACConfig(**agent_cases.ITEMS, normalize_observations=True)),
        make_spec(VECTOR, NUMBERS),
    ),
    **{
        name: (agent_cases.SMALL[name], agent_cases.spec_of(name))
        for name in ("dreamer", "rainbow", "iqn", "r2d2")
    },
}


WITH_MEMORY = ("ppo, a GRU", "impala, an LSTM and nested actions", "recurrent_td3", "r2d2", "dreamer")


def observations(spec, rows, seed=0):
    rng = np.random.default_rng(seed)
    return tree.map_structure(lambda leaf: draw(leaf, rng, (rows,)), spec.observations)


def run_of(tmp_path, agent, spec):
    """A fresh policy; normalizers have seen some observations."""
    run = fresh_runs.make(tmp_path / "run", agent, spec).path
    policy = load_policy(run, allow=("agent_cases",))  # RLPD names its data.
    if getattr(agent.config, "normalize_observations", False):
        seen = as_tensors(tree.map_structure(lambda leaf: 3 * leaf[None], observations(spec, 50)))
        policy.networks.normalizer.update(seen, torch.ones((1, 50), dtype=torch.bool))
    return policy


def largest_difference(policy, exported, rows=50, steps=20):
    """Of the actions for ``rows * steps`` observations, where some episodes begin in between."""
    worst, state, rng = 0.0, None, np.random.default_rng(1)
    for step in range(steps):
        given, begins = observations(policy.spec, rows, step), rng.random(rows) < (0.1 if step else 1.0)
        flags = begins
        if specs.agents(policy.spec):
            groups = policy.networks.groups.items()
            flags = {name: np.repeat(begins[:, None], len(group.agents), 1) for name, group in groups}
        expected = policy(given, flags)
        for old, new in zip(state or (), exported.initial_state(rows), strict=False):
            old[begins] = new[begins]
        actions, state = exported.step(given, state)
        tree.assert_same_structure(policy.spec.actions, actions)
        for got, want in zip(tree.flatten(actions), tree.flatten(expected), strict=True):
            assert got.dtype == want.dtype and got.shape == want.shape
            worst = max(worst, float(np.abs(got.astype(np.float64) - want).max()))
    return worst


@pytest.mark.parametrize("name", FAMILIES)
def test_an_exported_policy_acts_as_the_loaded_one(tmp_path, name):
    policy = run_of(tmp_path, *FAMILIES[name])
    exported = load(export(policy, tmp_path / "policy.pt2"))
    assert largest_difference(policy, exported) <= 1e-5
    assert bool(exported.initial_state(1)) == (name in WITH_MEMORY)
    assert len(tree.flatten(exported(observations(policy.spec, 1)))) >= 1


def in_onnx(tmp_path, policy, greedy=True):
    pytest.importorskip("onnxscript", reason="needs the extra export")
    pytest.importorskip("onnxruntime", reason="needs the extra export")
    return load(export(policy, tmp_path, format="onnx", greedy=greedy), seed=3)


def test_a_policy_in_onnx_takes_names_masks_and_a_memory(tmp_path):
    policy = run_of(tmp_path, *FAMILIES["ppo, a GRU"])
    exported = in_onnx(tmp_path, policy)
    assert exported.metadata["inputs"] == [
        "observation/action_mask", "observation/camera", "observation/place/0", "observation/place/1",
        "observation/vector", "state/0",
    ]  # fmt: skip
    assert exported.metadata["outputs"] == ["action", "next_state/0"]
    assert largest_difference(policy, exported, steps=5) <= 1e-5


def test_an_onnx_file_acts_without_torch_and_repertory(tmp_path):
    policy = run_of(tmp_path, *SAMPLING["ppo"])
    exported = in_onnx(tmp_path, policy, greedy=False)
    given = observations(policy.spec, 7)
    noise = np.random.default_rng(0).random((7, exported.metadata["noise"]), np.float32)
    np.savez(tmp_path / "given.npz", noise=noise, observation=given)
    code = """if True:
        import sys, numpy as np
        from policy import load
        actions = load("policy.onnx")(**np.load("given.npz"))
        print([(name, array.tolist()) for name, array in actions.items()])
        print({"torch", "framework", "tree"} & set(sys.modules))
    """
    options = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", code], **options)
    expected = [(name, array.tolist()) for name, array in exported(given, noise=noise).items()]
    assert done.stdout == f"{expected}\nset()\n", done.stderr


def test_the_file_says_where_the_policy_comes_from(tmp_path):
    policy = run_of(tmp_path, *FAMILIES["r2d2"])
    rows = [{"label": "evaluator", "env_steps": step, "episode_return": step / 10} for step in (900, 1100)]
    policy.folder.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = load(export(policy, tmp_path / "p.pt2")).metadata
    recorded = {"agent": "r2d2", "step": 1000, "return": 90.0, "greedy": True, "noise": 0}
    assert {name: found[name] for name in recorded} == recorded
    assert found["observations"]["shape"] == [4] and found["actions"]["num_values"] == 3
    assert found["environment"] == "gymnasium:CartPole-v1" and "torch" in found["versions"]
    assert isinstance(found["commit"], dict)


SAMPLING = {
    "dqn": (agent_cases.SMALL["dqn"], BOTH),
    "ppo": (PPO(PPOConfig(**SMALL)), make_spec(VECTOR, NESTED)),
    "td3": (agent_cases.SMALL["td3"], make_spec(VECTOR, NUMBERS)),
    "rainbow": (agent_cases.SMALL["rainbow"], BOTH),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_noise_samples_what_the_actors_would(tmp_path, name):
    policy, rows = run_of(tmp_path, *SAMPLING[name]), 4000
    step = PolicyStep(policy, greedy=False)
    given = tree.map_structure(lambda leaf: np.repeat(leaf, rows, 0), observations(policy.spec, 1))
    acting = policy.agent.make_policy(policy.networks)
    acting.loaded(acting.progress._replace(version=1, env_steps=policy.step))
    expected, *_ = acting.step(given, acting.initial_state(rows))
    with torch.inference_mode():
        actions = step(*as_tensors(tree.flatten(given)), torch.rand(rows, step.noise_size))
    for got, want in zip(actions, tree.flatten(expected), strict=True):
        got = got.numpy().astype(np.float64)
        spread = max(float(want.std()), 0.05)
        np.testing.assert_allclose(got.mean(0), want.mean(0), atol=0.1 * spread)
        np.testing.assert_allclose(got.std(0), want.std(0), atol=0.1 * spread)
        assert np.quantile(got, 0.9) == pytest.approx(np.quantile(want, 0.9), abs=0.2 * spread)


def test_noise_is_an_input_and_decides_all(tmp_path):
    policy = run_of(tmp_path, *SAMPLING["td3"])
    sampled = load(export(policy, tmp_path / "p.pt2", greedy=False))
    given = observations(policy.spec, 5)
    noise = np.random.default_rng(0).random((5, sampled.metadata["noise"]), np.float32)
    np.testing.assert_array_equal(sampled(given, noise=noise), sampled(given, noise=noise))
    alone = [sampled({} or given[i : i + 1], noise=noise[i : i + 1])[0] for i in range(5)]
    np.testing.assert_allclose(alone, sampled(given, noise=noise), atol=1e-5)
    assert np.abs(sampled(given) - sampled(given)).max() > 1e-3
    with pytest.raises(ValueError, match=r"noise: got shape \(5, 1\), expected \(5, 6\)"):
        sampled(given, noise=noise[:, :1])


def test_what_does_not_fit_is_named(tmp_path):
    policy = run_of(tmp_path, *FAMILIES["ppo, a GRU"])
    exported, given = load(export(policy, tmp_path / "p.pt2")), observations(policy.spec, 2)
    wrong = [
        ({"vector": given["vector"]}, None, "expected an entry observation/action_mask"),
        ({**given, "vector": given["vector"][0]}, None, r"vector: got shape \(4,\), expected \(2, 4\)"),
        ({**given, "camera": given["camera"] * 0.5}, None, "camera: got dtype float64, expected uint8"),
        (given, [np.zeros((3, 5))], r"state: got shapes \[\(3, 5\)\], expected \[\(2, 5\)\]"),
    ]
    for observation, state, text in wrong:
        with pytest.raises(ValueError, match=text):
            exported.step(observation, state)
    with pytest.raises(ValueError, match="noise: got some, expected None"):
        exported.step(given, None, np.zeros((2, 1)))


def test_what_cannot_be_exported(tmp_path, monkeypatch):
    policy = run_of(tmp_path, PPO(PPOConfig(**SMALL)), BOTH)
    with pytest.raises(ValueError, match="format: got 'keras', expected torch or onnx"):
        export(policy, tmp_path / "a", format="keras")
    (tmp_path / "mine.py").write_text("print('mine')\n")
    with pytest.raises(FileExistsError, match=r"mine\.py is another file"):
        export(policy, tmp_path / "mine.pt2")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"onnxscript, which is not installed: pip install .*export"):
        export(policy, tmp_path / "a", format="onnx")
    policy.agent.make_policy = lambda networks, evaluation: RandomActions().make_policy(
        RandomActions().make_networks(BOTH)
    )
    with pytest.raises(ValueError, match=r"got RandomPolicy of PPO, which does not act with torch"):
        export(policy, tmp_path / "a")
    (tmp_path / "text").write_text("PK")
    with pytest.raises(ValueError, match="cannot read"):
        load(tmp_path / "text")


if __name__ == "__main__":  # Every agent, in both formats.
    import pathlib
    import tempfile

    for case, (agent, spec) in {
        **{name: (agent, agent_cases.spec_of(name)) for name, agent in agent_cases.SMALL.items()},
        **FAMILIES,
    }.items():
        with tempfile.TemporaryDirectory() as folder:
            made = run_of(pathlib.Path(folder), agent, spec)
            for kind in ("torch", "onnx"):
                path = export(made, pathlib.Path(folder), format=kind)
                print(f"{case:40} {kind:6} {largest_difference(made, load(path)):.1e}", flush=True)
