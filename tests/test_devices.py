"""Processes use the GPUs that they see, and say so if they see none."""

import dataclasses

import pytest
import torch

import launch
from agents.a3c import A3C
from agents.dqn import DQN, DQNConfig
from agents.ppo_dqn import PPODQN
from framework import devices
from framework.environments.testing import make_spec
from framework.programs import RunConfig, make_program
from launch.engines.options import make_options


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (1, ["cuda:0", "cuda:0", "cuda:0"]),  # On Ray: one reserved for each.
        (2, ["cuda:0", "cuda:1", "cuda:0"]),  # On Ray, two for each. On processes the group is refused.
        (4, ["cuda:0", "cuda:1", "cuda:2"]),  # On processes: all see all.
    ],
)
def test_learners_divide_the_gpus_that_they_see(seen, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    agent = DQN(DQNConfig(batch_size=6, device="cuda"))
    assert [agent.for_program(1, 3, rank).device for rank in range(3)] == expected
    assert agent.for_program(1).device == "cuda"
    assert devices.device_of_learner("cuda:5", 1, 3) == "cuda:5"
    assert devices.device_of_learner("cpu", 1, 3) == "cpu"


def test_a_gpu_that_the_process_does_not_see_is_an_error(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for device in ("cpu", "cuda", "cuda:0"):
        assert devices.check_visible("device", device) == device
    with pytest.raises(ValueError, match=r"device: got 'cuda:1', .* sees 1 GPU .*DEVICES '3'"):
        devices.check_visible("device", "cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"inference_device: got 'cuda', .* sees no GPU"):
        devices.check_visible("inference_device", "cuda")
    agent = DQN(DQNConfig(device="cuda"))
    with pytest.raises(ValueError, match=r"learner\.num_gpus=1"):
        agent.make_learner(agent.make_networks(make_spec()), make_spec())


def test_a_checkpoint_of_a_gpu_is_restored_on_the_cpu():
    """The state of its generator is of another kind and seeds this one's."""
    agent, spec = DQN(DQNConfig(hidden_sizes=(4,))), make_spec()
    networks = agent.make_networks(spec)
    learner, policy = agent.make_learner(networks, spec), agent.make_policy(networks)
    drawn = []
    for byte in (0, 0, 1):
        of_gpu = torch.full((16,), byte, dtype=torch.uint8)
        learner.restore({**learner.save(), "generator": of_gpu})
        policy.restore({"generator": of_gpu, "left": {}})
        drawn.append([torch.rand(4, generator=each).tolist() for each in (learner._generator, policy.random)])
    assert drawn[0] == drawn[1] and all(one != other for one, other in zip(*drawn[1:], strict=True))


SEEN_BY_OTHERS = {"learner": {"env": {"CUDA_VISIBLE_DEVICES": "0"}}}
AT_THE_START = {
    "learner": ("cuda", {}, "device: got 'cuda', .* sees no GPU"),
    "number": ("cuda:7", {}, "device: got 'cuda:7', .* sees no GPU"),
    "no values": ("meta", {}, "device: got 'meta', expected a device that this process can use"),
    "inference": ("cpu", {"inference": "server", "inference_device": "cuda"}, "inference_device: got 'cuda'"),
    "env of another process": ("cuda", {"resources": SEEN_BY_OTHERS}, None),
}


@pytest.mark.parametrize(("device", "settings", "message"), AT_THE_START.values(), ids=AT_THE_START)
@pytest.mark.parametrize("agent", [DQN(), PPODQN(), A3C()], ids=lambda agent: type(agent).__name__)
def test_a_device_that_is_not_there_is_an_error_before_the_start(
    agent, device, settings, message, monkeypatch, tmp_path
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    if "inference" in settings and not isinstance(agent, DQN):
        pytest.skip("its workers act by themselves")
    agent = type(agent)(dataclasses.replace(agent.config, device=device))
    run = RunConfig(max_env_steps=10, directory=str(tmp_path / "run"), evaluate_period=None, **settings)
    environment = "multi_agent:CartPole" if isinstance(agent, PPODQN) else "gymnasium:CartPole-v1"
    program = make_program(agent, environment, run)
    if message is None:
        for check in program.checks:
            check("processes", make_options(program))
        return
    with pytest.raises(ValueError, match=message):
        launch.start(program, "processes")
    assert not (tmp_path / "run").exists()
