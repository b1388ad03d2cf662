"""What scaling calculates, by values worked by hand, and its check with few actors."""

import dataclasses

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


def test_calls_of_actors_whose_parameters_others_have():
    served = scaling.calls_per_second(dataclasses.replace(ATARI, is_served=True))
    assert (served["look"], served["copy"], served["act"]) == (0.0, 0.0, 5_000.0)
    on_hosts = scaling.calls_per_second(dataclasses.replace(ATARI, actors_per_host=64))
    assert (on_hosts["look"], on_hosts["copy"]) == (0.0, 4.0)  # two hosts, two versions a second


@pytest.mark.parametrize(
    ("rate", "inserts", "rows"),
    [(4.0, 400.0, 8.0), (20.0, 2_000.0, 8.0), (50.0, 2_000.0, 20.0)],
    ids=["slower than the delay", "as fast", "faster: several steps in a message"],
)
def test_messages_of_adders(rate, inserts, rows):
    load = Workload(100, SHAPES["mujoco"], 8, rate)
    assert scaling.calls_per_second(load)["insert"] == pytest.approx(inserts)
    assert load.rows_per_insert == pytest.approx(rows)


def test_bytes_of_calls():
    sizes = scaling.bytes_per_call(ATARI)
    assert sizes["insert"] == 20 * (84 * 84 + 4 + 8)  # one frame of a stack, action, reward and discount
    assert sizes["sample"] == 256 * (2 * 4 * 84 * 84 + 4 + 8)
    assert sizes["copy"] == 6_800_000
    mujoco = scaling.bytes_per_call(Workload(1, SHAPES["mujoco"], 1, 10.0))
    assert mujoco["insert"] == 17 * 4 + 6 * 4 + 8


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


def test_the_check_runs_real_services_with_dummy_actors(capsys):
    found = scaling.check("mujoco", actors=4, rate=16.0, seconds=1.0, alone=0.1)
    assert set(found) == {"counter", "monitor", "source", "replay"}
    assert min(found["replay"]) > 0
    assert "4 actors x 16 steps/s of mujoco: predicted 64 env steps/s" in capsys.readouterr().out
