"""The loops that the learners are compared with learn the same."""

import pytest
import torch

from benchmarks.learner import step as learner_step


@pytest.mark.parametrize("name", learner_step.LOOPS)
def test_the_loop_in_plain_torch_learns_as_much_as_the_learner(name):
    loops, networks, (group,) = learner_step.make_loops(name, "cpu", tiny=True)
    before = [parameter.detach().clone() for parameter in networks["torch"].parameters()]
    for step in loops.values():
        torch.manual_seed(0)
        for _ in range(3):
            step()
    group.close()
    after = {way: list(module.parameters()) for way, module in networks.items()}

    def moved(way):
        pairs = zip(after[way], before, strict=True)
        return max(float((now.detach() - then).abs().max()) for now, then in pairs)

    assert moved("torch") > 1e-4
    for way in ("eager", "group"):
        assert moved("torch") / 3 < moved(way) < 3 * moved("torch")
        for one, other in zip(after["torch"], after[way], strict=True):
            if name in ("dqn", "impala"):
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
            else:  # Other noise, and another order of the rows.
                assert float((one - other).detach().abs().max()) < 2 * moved("torch")
