"""Learners in two processes do what one does with the whole batch."""

import collections
import pathlib
import pickle
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
import warm_python
from background import Background
from shared_batches import AGENTS, BATCH, learn, listening, make_learner

from framework.learners import LearnerGroup, LossContext
from framework.learners.group import Barrier

# The fixture makes the steps of all agents in two processes: minutes on a loaded machine.
pytestmark = pytest.mark.timeout(300)


def peer(rank, folder):
    """One of two processes; all agents in turn, each in a group of its own. Writes what they have learned."""
    results = {}
    for name in AGENTS:
        learner = make_learner(name, rank, 2)
        learner.restore(make_learner(name, 0, 2).save())
        group = LearnerGroup(rank, 2, dist.FileStore(f"{folder}/{name}", 2), timeout_s=60)
        learner.distribute(group)
        results[name, rank] = learn(name, learner, rank, 2)
        results[name, rank]["listening"] = {address for address, _ in listening()}
        if name == "sac":
            break  # The second one ends without a word.
        group.close()
    if rank == 0:
        # The other one has gone, or goes now: no exchange may hang.
        with pytest.raises(RuntimeError):
            for _ in range(1000):
                group.counts(1)
        results["noticed", 0] = True
    pathlib.Path(folder, str(rank)).write_bytes(pickle.dumps(results))


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peers")
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import peer; peer"
    peers = [warm_python.Popen(["-c", f"{code}({rank}, '{folder}')"]) for rank in range(2)]
    try:
        assert [each.wait(240) for each in peers] == [0, 0]
    finally:
        for each in peers:
            each.kill()
    return {
        key: value
        for rank in range(2)
        for key, value in pickle.loads((folder / str(rank)).read_bytes()).items()
    }


def assert_close(first, second, tolerance):
    assert first.keys() == second.keys()
    for key in first:
        np.testing.assert_allclose(first[key], second[key], rtol=0, atol=tolerance, err_msg=key)


@pytest.mark.parametrize("name", AGENTS)
def test_two_learners_match_one_with_the_whole_batch(name, together):
    learner = make_learner(name)
    before = {k: v.numpy().copy() for k, v in learner.networks.state_dict().items()}
    alone = learn(name, learner, 0, 1)
    for rank in range(2):
        assert_close(together[name, rank]["parameters"], alone["parameters"], 1e-5)
        assert_close(together[name, rank]["targets"], alone["targets"], 1e-5)
        assert together[name, rank]["norm"] == pytest.approx(alone["norm"], rel=1e-3)
        assert together[name, rank]["noise"] == alone["noise"]  # As many draws, from the same generator.
    priorities = [*together[name, 0]["priorities"], *together[name, 1]["priorities"]]
    assert priorities == pytest.approx(alone["priorities"], abs=1e-5)
    moved = [np.abs(alone["parameters"][k] - v).max() for k, v in before.items() if v.dtype == np.float32]
    assert max(moved) > 1e-2


@pytest.mark.parametrize("name", AGENTS)
def test_learners_have_the_same_parameters_to_the_last_bit(name, together):
    assert_close(together[name, 0]["parameters"], together[name, 1]["parameters"], 0)


def test_elements_of_several_learners_are_in_the_minibatch_where_one_would_have_them():
    learner = make_learner("ppo")

    def shuffled(data, before):
        learner._generator.manual_seed(3)
        return [part["row"].tolist() for _, part in learner._shuffled(data, 4, 11, before)]

    rows = {"row": torch.arange(11)}
    for sizes in ((6, 5), (10, 1), (0, 11), (4, 0, 7)):
        starts = np.cumsum((0, *sizes[:-1])).tolist()
        parts = zip(rows["row"].split(sizes), starts, strict=True)
        each = [shuffled({"row": part}, start) for part, start in parts]
        for whole, *pieces in zip(shuffled(rows, 0), *each, strict=True):
            for piece, start, size in zip(pieces, starts, sizes, strict=True):
                assert piece == [row for row in whole if start <= row < start + size]


Group = collections.namedtuple("Group", "rank size")


@pytest.mark.parametrize("draw_like", ["normal_like", "uniform_like"])
@pytest.mark.parametrize("shape", [(3, 2), (3, 1), (5, 4, 2)])
def test_several_learners_draw_parts_of_what_one_draws(shape, draw_like):
    def draw(rank, num_learners):
        group = None if num_learners == 1 else Group(rank, num_learners)
        context = LossContext(None, None, None, torch.Generator().manual_seed(1), group=group)
        items = torch.empty(12 // num_learners * shape[0], *shape[1:])
        return torch.stack([getattr(context, draw_like)(items) for _ in range(2)])

    assert torch.equal(torch.cat([draw(rank, 4) for rank in range(4)], 1), draw(0, 1))


def test_a_learner_notices_that_a_peer_has_gone(together):
    assert ("noticed", 0) in together


@pytest.mark.skipif(not pathlib.Path("/proc/self/net/tcp").exists(), reason="needs /proc")
def test_nothing_listens_beyond_this_machine(together):
    for name in AGENTS:
        for rank in range(2):
            assert together[name, rank]["listening"] <= {"127.0.0.1", "::1"}
    assert together["dqn", 0]["listening"]  # gloo's own


def test_a_batch_that_cannot_be_divided_is_refused():
    for name in ("dqn", "ppo"):
        with pytest.raises(ValueError, match=r"num_learners: got 3, expected a divisor of 16"):
            AGENTS[name][0].for_program(BATCH, 3)


def test_a_rank_outside_of_the_group_is_refused():
    with pytest.raises(ValueError, match="rank: got 2, expected 0 to 1"):
        LearnerGroup(2, 2, dist.HashStore())


def test_who_was_let_through_stays_so_when_it_closes_at_once():
    for _ in range(50):
        barrier = Barrier(2)
        other = Background(barrier.arrive, 1, 0)
        mine = barrier.arrive(0, 0)
        barrier.close()
        assert mine is other.result(10) is True
