"""Actors and learner that wait for each other because data was lost go on; others are left to wait."""

import logging

import pytest
from helpers.small_programs import small_program

import launch
from agents.ppo import PPO, PPOConfig
from framework.adders import QUEUE_TABLE
from framework.learners import stall_detector
from framework.learners.stall_detector import StallDetector

CASES = {
    # name: (who asks every four seconds, or "moved"; which of these times is a stall, after 20 seconds)
    "all ask": (["ab"] * 8, [5, 6, 7]),
    "one does not": (["a"] * 20, []),
    "one comes later": (["a"] * 4 + ["ab"] * 8, [9, 10, 11]),
    "one went on meanwhile": (["ab"] * 3 + ["a"] * 5 + ["ab"] * 6, [13]),
    "something happened": (["ab"] * 4 + ["moved"] + ["ab"] * 6, [10]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_a_stall_detector(case):
    times, expected = CASES[case]
    now = [0.0]
    still = StallDetector(2, patience=20.0, clock=lambda: now[0])
    found, version = [], 3
    for number, what in enumerate(times):
        now[0] = 4.0 * number
        if what == "moved":
            version += 1
            continue
        answers = [still.asked(actor, version) for actor in what]
        if any(answers):
            found.append(number)
    assert found == expected


@pytest.mark.parametrize("lag", [0, 1])
def test_a_program_that_lost_data_goes_on(monkeypatch, caplog, lag):
    monkeypatch.setattr(stall_detector, "PATIENCE_S", 0.6)
    config = PPOConfig(unroll_length=8, epochs=1, hidden_sizes=(8,), max_policy_lag=lag)
    program = small_program(PPO(config), num_actors=2, envs_per_actor=2, max_env_steps=2000)
    with launch.start(program, engine="threads") as job, caplog.at_level(logging.WARNING):
        client = job.client("replay")
        for _ in range(8):  # as many items as there are in flight at most
            client.sample_batch(QUEUE_TABLE, 1, timeout=30)
        result = job.wait(timeout=100)
    assert result["env_steps"] == 2000
    assert any("are published again" in text for text in caplog.messages)
