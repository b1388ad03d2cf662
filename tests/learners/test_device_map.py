"""Parts of networks on devices of their own; fake tensors on `cpu` and `meta` are in place of a GPU."""

import functools
import pickle
import sys

import numpy as np
import pytest
import torch
import tree
from agent_batches import CONTINUOUS, as_tensors, batch_of, make_learner
from agent_cases import SMALL, spec_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from agents.dqn import DQN, DQNConfig
from agents.sac import SAC, SACConfig
from framework.devices import NoDeviceError
from framework.learners import Adam, LossOutput, SGDLearner
from framework.learners.device_map import place
from framework.learners.optimizers import by_device
from framework.networks import heads
from framework.programs import RunConfig


class Networks(nn.Module):
    def __init__(self):
        super().__init__()
        self.torso, self.policy = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2), nn.Tanh())

    def forward(self, inputs):
        return self.policy(self.torso(inputs))


def test_bytes_are_counted_to_a_part_and_back_also_for_gradients():
    networks = Networks()
    crossings = place(networks, "cpu", {"torso": "cuda:1", "policy.0": "cuda:1"}, moves=False)
    networks(torch.zeros(5, 3))
    # In: 5 * 3 numbers, then 5 * 4 with gradients. Out: 5 * 4 and 5 * 2 with gradients.
    assert crossings.crossed == 4 * (15 + 2 * (20 + 20 + 10))
    crossings = place(Networks(), "cuda", {"torso": "cuda:0"}, moves=False)
    assert crossings.crossed == 0


def make(device="cpu", **options):
    torch.manual_seed(0)

    def loss(networks, batch, context):
        error = networks(batch) - context.targets["policy"](networks.torso(batch)) - 1.0
        return LossOutput(100.0 * error.square().mean(), {})

    optimizer = functools.partial(Adam, lr=0.1)
    settings = {"max_gradient_norm": 0.5, "target_names": ["policy"], "target_update_rate": 0.1}
    return SGDLearner(Networks(), loss, optimizer, device=device, **settings, **options)


def test_an_optimizer_steps_the_parameters_of_each_device_together():
    here, there, too = torch.zeros(1), torch.zeros(1, device="meta"), torch.zeros(2)
    plain = {"params": [here, too], "lr": 2}
    assert by_device([plain])[0] is plain
    parts = by_device([{"params": [here, there, too], "lr": 2}])
    assert [[id(each) for each in part["params"]] for part in parts] == [[id(here), id(too)], [id(there)]]
    assert [part["lr"] for part in parts] == [2, 2]


GPU = pytest.param("cuda:0", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


@pytest.mark.parametrize("other", ["cpu", GPU])
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_learner_learns_the_same_whatever_the_devices(device, other):
    plain, mapped = make(), make(device, devices={"torso": other})
    batches = [torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    for batch in batches[:2]:
        expected, result = plain.step(batch), mapped.step(batch.to(device))
        for name, value in expected.metrics.items():
            torch.testing.assert_close(result.metrics[name].cpu(), value)
        assert (result.metrics["crossed_bytes"] > 0) == (torch.device(device) != torch.device(other))
    assert expected.metrics["gradient_norm"] > 0.5  # It is clipped.
    # A checkpoint and the gradients of another learner fit both.
    again = make(device, devices={"policy": other})
    again.restore(pickle.loads(pickle.dumps(mapped.save())))
    again.apply(plain.gradients(batches[2]))
    plain.step(batches[2]), plain.step(batches[3]), again.step(batches[3].to(device))
    copy = pickle.loads(pickle.dumps(again.networks))
    torch.testing.assert_close(copy(batches[0].to(device)).cpu(), plain.networks(batches[0]))
    left, right = plain.save(), again.save()
    for part in ("networks", "targets"):
        torch.testing.assert_close(right[part], left[part])
    torch.testing.assert_close(right["optimizer"]["state"], left["optimizer"]["state"])
    tree.map_structure(np.testing.assert_array_equal, again.parameters()["torso"], copied(again)["torso"])


def copied(learner):
    """The parameters of a learner that has loaded another's."""
    made = make()
    made.restore(learner.save())
    return made.parameters()


# Of each kind of networks, one agent.
KINDS = ("a2c", "cql", "d4pg", "dreamer", "impala", "iqn", "mpo", "r2d2", "rainbow", "recurrent_td3", "td7")


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_networks_computes_and_learns_in_parts(name, monkeypatch):
    """A fake tensor knows its device, and raises an error where two meet that are on different ones."""
    agent, spec = SMALL[name].for_program(5), spec_of(name)
    monkeypatch.setattr(heads, "_kept_constant", heads._kept_constant.__wrapped__)  # It would keep fakes.
    monkeypatch.setattr(sys.modules["torch.optim.adam"], "_device_dtype_check_for_fused", lambda *_: None)
    batch, learner = batch_of(agent, spec), make_learner(agent, spec)
    networks, targets = learner.networks, learner.targets
    names = {name for name, _ in networks.named_modules() if name.count(".") == 1} - {"temperature", "duals"}
    devices = dict.fromkeys(sorted(names)[::2], "meta")
    place(networks, "cpu", devices)
    place(targets, "cpu", {name: "meta" for name in devices if name in dict(targets.named_modules())})
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for module in (*networks.modules(), *targets.modules()):
            for held in (module._parameters, module._buffers):
                for key, value in held.items():
                    if value is not None:
                        new = mode.from_tensor(value.detach())
                        held[key] = (
                            nn.Parameter(new, value.requires_grad) if held is module._parameters else new
                        )
        learner._parameters = learner._eager.parameters = [
            p for p in networks.parameters() if p.requires_grad
        ]
        learner.optimizer, learner._eager._device = agent.make_optimizer(networks), learner.device
        data, context = batch._replace(data=as_tensors(batch.data)), learner._context()
        output, gradients, norm = learner._eager(data, context)
        learner.device, learner._crossings = torch.device("meta"), ()  # On the CPU it reads the norm.
        learner._descend(output, gradients, norm.to("meta"))
    found = {p.device.type for p in networks.parameters()}
    assert found == {"cpu", "meta"} and norm.device.type == "cpu"


def test_unknown_names_and_absent_devices_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    agent = DQN(DQNConfig(devices={"q_network": {"encodr": "cpu"}}))
    with pytest.raises(
        ValueError, match=r"devices: got 'q_network.encodr', .*Did you mean 'q_network.encoder'"
    ):
        make_learner(agent)
    with pytest.raises(NoDeviceError, match=r"devices.q_network: got 'cuda:1', .* sees 1 GPU "):
        make_learner(DQN(DQNConfig(devices={"q_network": "cuda:1"})))
    with pytest.raises(
        ValueError, match=r"devices: got 't' for temperature, .* the loss reads its parameters"
    ):
        make_learner(SAC(SACConfig(devices={"t": "cpu"})), CONTINUOUS)


def test_what_a_map_of_devices_excludes_is_refused():
    agent = DQN(DQNConfig(devices={"q_network": "cpu"}, step_mode="compile"))
    with pytest.raises(ValueError, match=r"step_mode: got 'compile' with devices .*expected 'eager'"):
        agent.decided(RunConfig(), {})
    with pytest.raises(ValueError, match=r"devices: got .* with several learners"):
        agent.for_program(1, num_learners=2)
    assert agent.for_worker(1).config.devices == {}
