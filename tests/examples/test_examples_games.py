"""The examples of populations and of self-play, in short."""

import numpy as np
import pytest

pytest.importorskip("pettingzoo")

from examples import population, tic_tac_toe
from framework import environments, specs


def test_a_population():
    results = population.main("serial", copies=1, env_steps=200, members=2, rounds=1)
    assert len(results) == 2
    assert all(1e-6 <= result["settings"]["learning_rate"] <= 1e-1 for result in results)


def test_minimax_does_not_lose():
    assert tic_tac_toe.value(0, 0) == 0
    assert tic_tac_toe.value(0o3, 0o30) == 1  # It completes the first row.
    assert tic_tac_toe.minimax(0o20, 0o3) == 2  # It stops the other.


def test_tictactoe_is_learned_and_played():
    results = tic_tac_toe.main(env_steps=4_200, games=4)
    assert {name: sum(counts.values()) for name, counts in results.items()} == {"random": 4, "minimax": 200}
    for counts in results.values():
        assert sum(count for (seat, _), count in counts.items() if seat == "first") == counts.total() // 2
    assert results["minimax"]["first", 1] == results["minimax"]["second", 1] == 0


class TestKuhn:
    @pytest.fixture
    def kuhn(self):
        pytest.importorskip("pyspiel", reason="needs the extra open-spiel")
        from examples import kuhn_poker

        return kuhn_poker

    def test_the_environment_passes_the_checks(self, kuhn):
        assert environments.check_environment(kuhn.SpielEnv, num_steps=60) == []

    def test_the_mean_of_policies(self, kuhn):
        from open_spiel.python.policy import UniformRandomPolicy

        agent = kuhn.SelfPlayPPO(kuhn.config(1_000))
        with environments.make(kuhn.SpielEnv) as environment:
            networks = agent.make_networks(specs.make_environment_spec(environment))
        for parameter in networks.parameters():
            parameter.data.zero_()
        mean = kuhn.mean_policy([kuhn.probabilities(networks)] * 2)
        np.testing.assert_allclose(mean.action_probability_array, 0.5, atol=1e-6)
        assert kuhn.exploitability(kuhn.GAME, mean) == pytest.approx(
            kuhn.exploitability(kuhn.GAME, UniformRandomPolicy(kuhn.GAME))
        )

    @pytest.mark.release
    @pytest.mark.cpu_budget(120)
    @pytest.mark.timeout(600)
    def test_it_is_learned(self, kuhn):
        curve = [distance for _, distance in kuhn.main(seed=1)]
        assert curve[-1] <= 0.1 < curve[0]


@pytest.mark.release
@pytest.mark.cpu_budget(200)
@pytest.mark.timeout(900)
def test_tictactoe_is_won_and_not_lost():
    results = tic_tac_toe.main(seed=1)
    won = sum(count for (_, reward), count in results["random"].items() if reward == 1)
    assert won >= 0.9 * results["random"].total()  # 92 to 95 % on seeds 1 and 2.
    assert results["minimax"]["first", -1] == results["minimax"]["second", -1] == 0
