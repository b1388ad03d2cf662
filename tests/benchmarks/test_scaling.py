"""What scaling calculates, by values worked by hand, and its check with few actors."""

import pytest

from benchmarks.clusters import scaling
from benchmarks.clusters.scaling import SHAPES, Workload

# 100 actors of 8 envs at 50 batched steps a second: 5,000 batched steps, 40,000 env steps.
ATARI = Workload(100, SHAPES["atari"], envs=8, rate=50.0)


def test_calls_of_actors_with_their_own_policy():
    calls = scaling.calls_per_second(ATARI)
    assert calls == {
        "grant": pytest.approx(5_000 / 64 + 40),  # a report with each row too
        "row": 40.0,  # 40,000 / 1,000
        "look": 300.0,  # 5,000 / 10, without the copies
        "copy": 200.0,  # 2 versions for each of 100
        "insert": 2_000.0,  # 20 a second of each: 0.05 s of staging
        "sample": 20.0,
        "act": 0.0,
    }


COSTS = dict.fromkeys(["grant", "row", "look", "copy", "insert", "sample", "act"], 1e-4)


@pytest.mark.parametrize(
    ("actors", "costs", "expected"),
    [
        # Copies of 200 * 6.8 MB/s = 1.36 GB/s over links of 0.875 GB/s; frames of 2,000 * 0.14 MB/s and
        # batches of 20 * 14.5 MB/s; 0.2 cores for inserts.
        (100, COSTS, {"counter": 1, "monitor": 1, "source": 2, "replay": 1, "inference": 0}),
        # 20,000 inserts of 1 ms + 19 rows of 0.1 ms: 58 cores, at 0.7 each.
        (1_000, {**COSTS, "insert": 1e-3, "insert row": 1e-4}, {"replay": 83, "source": 16}),
    ],
    ids=["the network", "the processor"],
)
def test_processes_that_are_needed(actors, costs, expected):
    load = Workload(actors, SHAPES["atari"], envs=8, rate=50.0)
    found = scaling.processes_needed(load, costs)
    assert {service: found[service] for service in expected} == expected


@pytest.mark.release  # Sixteen processes, in eight CPU seconds.
def test_the_check_runs_real_services_with_dummy_actors(capsys):
    found = scaling.check("mujoco", actors=4, rate=16.0, seconds=1.0, alone=0.1)
    assert set(found) == {"counter", "monitor", "source", "replay"}
    assert min(found["replay"]) > 0
    assert "4 actors x 16 steps/s of mujoco: predicted 64 env steps/s" in capsys.readouterr().out
