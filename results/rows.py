"""The rows of ``learning.py``: what is trained where, for how long, and what is required."""

from __future__ import annotations

import dataclasses
import pathlib

RECORDS = pathlib.Path(__file__).with_name("records")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
      agent: what is trained.
      environment: where.
      steps: for how long.
      floor: the return that every seed must reach, at least two thirds of what the worst has reached; None
        for a control.
      ceiling: the return that no seed may pass; None beside None: the row stands beside another one.
      gain: by how much every seed's return must exceed the one before the policy adapted to a task.
      costs: the least and the largest mean cost of an episode of every seed; empty where there are no costs.
      published: a number to hold it against, and after how many steps; empty where none is known. Those of
        the Zoo are single runs in ``benchmark.md`` of rl-baselines3-zoo.
      metric: the metric of episodes that is held against these, such as `is_success`; empty: the return.
      flags: further flags of the command.
      dataset: the data set of ``data.py`` that it learns from, for `steps` learner steps; empty: it acts.
      demonstrations: the data set of ``data.py`` that it learns from, too, while it acts.
      exception: why some seed misses what the row asks, or why the row asks nothing; empty where all meet it.
    """

    agent: str
    environment: str
    steps: int
    floor: float | None = None
    ceiling: float | None = None
    gain: float | None = None
    costs: tuple[float, ...] = ()
    published: str = ""
    metric: str = ""
    flags: tuple[str, ...] = ()
    dataset: str = ""
    demonstrations: str = ""
    exception: str = ""

    @property
    def allow(self) -> tuple[str, ...]:
        """Flags of commands that read a run with objects that have no name of their own."""
        named = [each.partition(":")[0] for each in (self.agent, *self.flags) if ":" in each]
        return tuple(flag for module in named for flag in ("--allow", module))


FIVE_GAMES = ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders")
SPREAD = "pettingzoo:mpe.simple_spread_v3"
HIDDEN_CARTPOLE = "testing:CartPoleWithoutVelocities"
# Masks and tuples of actions: small networks and few steps.
_SMALL = ("--num-actors", "2", "--envs-per-actor", "4", "--hidden-sizes", "32", "--learning-rate", "5e-3")
_SMALL = (*_SMALL, "--learning-rate-decay", "10000", "--discount", "0.9")
_REPLAYED = ("--min-replay-size", "64", "--insert-burst", "32", "--n-step", "1", "--samples-per-insert", "8")
_REPLAYED = (*_SMALL, *_REPLAYED, "--batch-size", "32", "--target-update-rate", "0.05")
_VALUES = (*_REPLAYED, "--epsilon-decay", "1000")
_ATOMS = (*_VALUES, "--v-min", "-0.5", "--v-max", "1", "--num-atoms", "31")
_UNROLLS = (*_SMALL, "--unroll-length", "8", "--entropy-coefficient", "0")
_CHOICES = ("--wrappers", "CombineActions", "--environment-options", "choices=[3,2]", "numbers=[]")
_NUMBERS = ("--environment-options", "choices=[]", "numbers=[1,2]", "--critic-learning-rate", "5e-3")
_COPIES = ("--target-update-rate", "1", "--target-update-period")
_SHOWN = (*_VALUES, "--pretraining-steps", "100", "--demonstrations")
_EPISODES = (*_SMALL, "--entropy-coefficient", "0", "--episodes-per-batch")
_STRONG = (
    "--epsilon",
    "1.5",
    "--epsilon-mean",
    "0.1",
    "--initial-temperature",
    "0.1",
    "--initial-std",
    "0.3",
)
_PLAIN_TD3 = (
    *("--n-step", "1", "--min-replay-size", "10000", "--batch-size", "256", "--samples-per-insert", "256"),
    *("--exploration-std", "0.1", "--exploration-correlation", "0", "--learning-rate-decay", "None"),
    "--no-layer-norm",
)
_COMPILED = ("--step-mode", "compile")
_SEQUENCES = ("--unroll-length", "6", "--burn-in", "2", "--period", "6", "--lstm-size", "16")
_MASKED: dict[str, tuple[str, ...]] = {
    "a2c": _UNROLLS,
    "a3c": _UNROLLS,
    "apex": _VALUES,
    "appo": (*_UNROLLS, "--batch-size", "8"),
    "batch_ppo": (*_EPISODES, "24", "--unroll-length", "6"),
    "c51": _ATOMS,
    # Most boards are in no demonstration.
    "dqfd": (*_SHOWN, "results.demonstrators:board", "--epsilon-start", "1", "--epsilon-end", "0.02"),
    "dqn": _VALUES,
    "flow_dqn": _VALUES,
    "flow_impala": (*_UNROLLS, "--batch-size", "8"),
    "flow_ppo": _UNROLLS,
    "impact": (*_UNROLLS, "--batch-size", "8"),
    "impala": (*_UNROLLS, "--batch-size", "8"),
    "iqn": _VALUES,
    "ppo": _UNROLLS,
    "qr_dqn": _VALUES,
    "r2d2": (*_VALUES, *_SEQUENCES),
    "rainbow": (*_ATOMS, "--initial-noise", "0.02", "--epsilon-start", "1"),
    "sac": (*_REPLAYED, "--critic-learning-rate", "5e-3", "--initial-temperature", "0.1"),
}
_TUPLES: dict[str, tuple[str, ...]] = {
    "a2c": (*_UNROLLS, "--initial-std", "0.5", "--normalize-advantages"),
    "a3c": (*_UNROLLS, "--initial-std", "0.5", "--normalize-advantages"),
    "apex": (*_VALUES, *_CHOICES),
    "appo": (*_UNROLLS, "--batch-size", "1"),
    "batch_ppo": (*_EPISODES, "64", "--unroll-length", "2"),
    "c51": (*_ATOMS, *_CHOICES),
    "d4pg": (*_REPLAYED, *_NUMBERS, "--v-min", "-2", "--v-max", "1", "--num-atoms", "31"),
    "ddpg": (*_REPLAYED, *_NUMBERS),
    "dqfd": (*_SHOWN, "results.demonstrators:pair", *_CHOICES),
    "dqn": (*_VALUES, *_CHOICES),
    "flow_dqn": (*_VALUES, *_CHOICES),
    "flow_impala": (*_UNROLLS, "--envs-per-actor", "1", "--batch-size", "1", "--optimizer", "adam"),
    "flow_ppo": (*_UNROLLS, "--initial-std", "0.5"),
    "impact": (*_UNROLLS, "--batch-size", "1"),
    "impala": (*_UNROLLS, "--batch-size", "1", "--optimizer", "adam"),
    "iqn": (*_VALUES, *_CHOICES),
    "mpo": (*_REPLAYED, *_NUMBERS, *_COPIES, "10", *_STRONG),
    "ppo": (*_UNROLLS, "--initial-std", "0.5"),
    "qr_dqn": (*_VALUES, *_CHOICES),
    "r2d2": (*_VALUES, *_SEQUENCES, *_CHOICES),
    "rainbow": (*_ATOMS, "--initial-noise", "0.02", "--epsilon-start", "1", *_CHOICES),
    "recurrent_td3": (*_REPLAYED, *_SEQUENCES, *_NUMBERS, "--samples-per-insert", "48"),
    "sac": (*_REPLAYED, *_NUMBERS, "--initial-temperature", "0.05", "--reward-scale", "5"),
    "td3": (*_REPLAYED, *_NUMBERS),
    "td7": (*_REPLAYED, *_NUMBERS, *_COPIES, "100", "--embedding-size", "16"),
}
_POOR = {
    "full-replay": "The data have 22,016 steps, and a mean of -1,109.8.",
    "medium-replay": "The data have 16,064 steps, a mean of -1,303.9, and no episode above -343.5.",
}
# Critics are narrower than published (2,048 and 512), for a CPU.
_BESIDE_SAC: dict[str, tuple[str, ...]] = {
    "sac": (),
    "crossq": ("--critic-hidden-sizes", "256,256"),
    "simba": ("--critic-hidden-sizes", "128,128"),
}
_DATA_AGENTS = ("iql", "rebrac", "td3_bc")
# Agents that have no name of their own, by the name in their rows.
PLANS = {f"flow_{name.lower()}": f"examples.flows:{name}Plan" for name in ("DQN", "IMPALA", "PPO")}
ROWS = {
    "cartpole-ppo": Row("ppo", "gymnasium:CartPole-v1", 60_000, 475, published="Zoo 500 at 100k"),
    "cartpole-impala": Row("impala", "gymnasium:CartPole-v1", 150_000, 475),
    "cartpole-a2c": Row("a2c", "gymnasium:CartPole-v1", 150_000, 475),
    "cartpole-a3c": Row("a3c", "gymnasium:CartPole-v1", 150_000, 475),
    "cartpole-appo": Row("appo", "gymnasium:CartPole-v1", 150_000, 475),
    "cartpole-impact": Row("impact", "gymnasium:CartPole-v1", 150_000, 475),
    "cartpole-apex": Row("apex", "gymnasium:CartPole-v1", 50_000, 475),
    "cartpole-flow-dqn": Row(PLANS["flow_dqn"], "gymnasium:CartPole-v1", 50_000, 475),
    "cartpole-flow-impala": Row(PLANS["flow_impala"], "gymnasium:CartPole-v1", 150_000, 475),
    "cartpole-flow-ppo": Row(PLANS["flow_ppo"], "gymnasium:CartPole-v1", 60_000, 475),
    "acrobot-a2c": Row("a2c", "gymnasium:Acrobot-v1", 200_000, -90),
    "acrobot-a3c": Row("a3c", "gymnasium:Acrobot-v1", 200_000, -90),
    "cartpole-iqn": Row("iqn", "gymnasium:CartPole-v1", 50_000, 475),
    "cartpole-munchausen": Row("dqn", "gymnasium:CartPole-v1", 50_000, 475, flags=("--munchausen", "0.9")),
    "cartpole-dqn": Row("dqn", "gymnasium:CartPole-v1", 50_000, 475, published="Zoo 500 at 50k"),
    "cartpole-c51": Row("c51", "gymnasium:CartPole-v1", 50_000, 475),
    "cartpole-dreamer": Row(
        *("dreamer", "gymnasium:CartPole-v1", 60_000, 475),
        exception="It had 500 after 20,178 steps, and falls back at times: the last step has 474.",
    ),
    "cartpole-pqn": Row("pqn", "gymnasium:CartPole-v1", 100_000, 475),
    "cartpole-qr-dqn": Row("qr_dqn", "gymnasium:CartPole-v1", 50_000, 475),
    "cartpole-rainbow": Row("rainbow", "gymnasium:CartPole-v1", 50_000, 475),
    "four-cartpoles-ppo-dqn": Row("ppo_dqn", "multi_agent:CartPole", 100_000, 450),
    "spread-mappo": Row("mappo", SPREAD, 1_000_000, exception="It stands beside independent PPO's row."),
    # Independent PPO: a critic of each agent's own observation.
    "spread-ppo": Row(
        "mappo",
        SPREAD,
        1_000_000,
        flags=("--no-joint-critic",),
        exception="It stands beside MAPPO's row.",
    ),
    "acrobot-appo": Row("appo", "gymnasium:Acrobot-v1", 200_000, -90),
    "acrobot-impact": Row("impact", "gymnasium:Acrobot-v1", 200_000, -90),
    "acrobot-ppo": Row("ppo", "gymnasium:Acrobot-v1", 200_000, -90, published="Zoo −73.5 at 1M"),
    "pendulum-d4pg": Row("d4pg", "gymnasium:Pendulum-v1", 20_000, -200, published="Zoo −152.1 at 20k (DDPG)"),
    "pendulum-d4pg-prioritized": Row(
        "d4pg",
        "gymnasium:Pendulum-v1",
        20_000,
        -200,
        flags=("--prioritized", "--num-actors", "4", "--exploration-ladder", "1"),
    ),
    "pendulum-ddpg": Row("ddpg", "gymnasium:Pendulum-v1", 20_000, -200, published="Zoo −152.1 at 20k"),
    "pendulum-td3": Row("td3", "gymnasium:Pendulum-v1", 20_000, -200, published="Zoo −151.9 at 20k"),
    "pendulum-sac": Row("sac", "gymnasium:Pendulum-v1", 20_000, -200, published="Zoo −157.0 at 20k"),
    "pendulum-crossq": Row("crossq", "gymnasium:Pendulum-v1", 8_000, -200),
    "pendulum-droq": Row("droq", "gymnasium:Pendulum-v1", 8_000, -200),
    "pendulum-simba": Row("simba", "gymnasium:Pendulum-v1", 8_000, -200),
    "pendulum-simba-v2": Row("simba_v2", "gymnasium:Pendulum-v1", 8_000, -200),
    "pendulum-tqc": Row("tqc", "gymnasium:Pendulum-v1", 8_000, -200, published="Zoo −151.3 at 20k"),
    "pendulum-mbmpo": Row("mbmpo", "gymnasium:Pendulum-v1", 10_000, -200),
    "pendulum-mpo": Row("mpo", "gymnasium:Pendulum-v1", 20_000, -200, published="Zoo −157.0 at 20k (SAC)"),
    "pendulum-ppo": Row("ppo", "gymnasium:Pendulum-v1", 200_000, -250, published="Zoo −172.2 at 100k"),
    # Learner steps on data.
    **{
        f"cartpole-mixed-{agent}": Row(agent, "gymnasium:CartPole-v1", 20_000, 475, dataset="cartpole-mixed")
        for agent in ("bc", "cql", "iql")
    },
    **{
        f"pendulum-{kind}-{agent.replace('_', '-')}": Row(
            *(agent, "gymnasium:Pendulum-v1", 20_000, -200),
            dataset=f"pendulum-{kind}",
            exception="" if agent == "rebrac" else _POOR[kind],
        )
        for kind in ("medium-replay", "full-replay")
        for agent in ("cql", "iql", "rebrac", "td3_bc")
    },
    **{
        f"{task}-{agent.replace('_', '-')}": Row(
            *(agent, environment, steps),
            dataset=task,
            flags=("--batch-size", "256") if agent == "rebrac" else (),  # As the others have.
            exception="The agents stand beside BC.",
        )
        for task, environment, steps, agents in (
            ("halfcheetah-medium", "gymnasium:HalfCheetah-v5", 100_000, ("bc", "cql", *_DATA_AGENTS)),
            ("hopper-medium-replay", "gymnasium:Hopper-v5", 100_000, ("bc", *_DATA_AGENTS)),
            ("breakout-medium-replay", "minatar:Breakout", 100_000, ("bc", "cql")),
        )
        for agent in agents
    },
    # Five learner steps for each env step, and five critics.
    "hopper-rlpd": Row(
        *("rlpd", "gymnasium:Hopper-v5", 20_000),
        demonstrations="hopper-medium-replay",
        flags=("--num-critics", "5", "--samples-per-insert", "640", "--actor-delay", "5"),
        exception="It stands beside SAC's row.",
    ),
    "lunarlander-dqn": Row(
        "dqn",
        "gymnasium:LunarLander-v3",
        200_000,
        155,
        published="Zoo 154 at 100k (v2), SLM-Lab 233 (v2)",
    ),
    "lunarlander-ppo": Row(
        "ppo", "gymnasium:LunarLander-v3", 1_000_000, 200, published="Zoo 242.1 at 1M (v2)"
    ),
    "lunarlander-rainbow": Row("rainbow", "gymnasium:LunarLander-v3", 200_000, 150),
    # The limit is 0.1 a step, in episodes of 100. The best policy with that cost returns 49.5, by dynamic
    # programming with a fixed multiplier on a grid.
    "road-ppo-lagrangian": Row("ppo_lagrangian", "tasks:WindingRoad", 100_000, 44.5, costs=(9.0, 11.0)),
    # BatchPPO's experiment.
    "halfcheetah-batch-ppo": Row("batch_ppo", "gymnasium:HalfCheetah-v5", 1_000_000, 1900),
    "hopper-batch-ppo": Row("batch_ppo", "gymnasium:Hopper-v5", 1_000_000, 1850),
    "walker2d-batch-ppo": Row("batch_ppo", "gymnasium:Walker2d-v5", 1_000_000, 700),
    # PPO with the settings of Stable-Baselines3, beside its own.
    "walker2d-ppo": Row(
        "ppo",
        "gymnasium:Walker2d-v5",
        1_000_000,
        1000,
        flags=(
            *("--num-actors", "1", "--envs-per-actor", "8", "--unroll-length", "256", "--epochs", "10"),
            *("--minibatch-size", "64", "--learning-rate", "3e-4", "--max-gradient-norm", "0.5"),
            *("--value-coefficient", "1.0", "--normalize-observations", "--normalize-rewards"),
            *("--evaluate-period", "50000"),
        ),
    ),
    "reacher-batch-ppo": Row("batch_ppo", "gymnasium:Reacher-v5", 1_000_000, -4),
    "pendulum-batch-ppo": Row("batch_ppo", "gymnasium:Pendulum-v1", 1_000_000, -200),
    "memory-ppo-lstm": Row("ppo", "testing:Memory", 200_000, 0.95),
    "memory-ppo-feedforward": Row(
        "ppo", "testing:Memory", 200_000, ceiling=0.6, flags=("--recurrent", "None")
    ),
    "memory-impala-lstm": Row("impala", "testing:Memory", 200_000, 0.95),
    "memory-r2d2": Row("r2d2", "testing:Memory", 200_000, 0.95),
    "memory-r2d2-feedforward": Row(
        "r2d2", "testing:Memory", 200_000, ceiling=0.6, flags=("--lstm-size", "None")
    ),
    "hidden-cartpole-r2d2": Row("r2d2", HIDDEN_CARTPOLE, 300_000, 400),
    "hidden-cartpole-ppo-lstm": Row("ppo", HIDDEN_CARTPOLE, 300_000, 400),
    "hidden-cartpole-impala-lstm": Row("impala", HIDDEN_CARTPOLE, 300_000, 400),
    "hidden-cartpole-dqn": Row("dqn", HIDDEN_CARTPOLE, 300_000, ceiling=150),
    "hidden-cartpole-ppo": Row("ppo", HIDDEN_CARTPOLE, 300_000, ceiling=150, flags=("--recurrent", "None")),
    "hidden-pendulum-recurrent-td3": Row("recurrent_td3", "testing:PendulumWithoutVelocity", 30_000, -250),
    "hidden-pendulum-td3": Row(
        "recurrent_td3",
        "testing:PendulumWithoutVelocity",
        30_000,
        ceiling=-400,
        flags=("--lstm-size", "None"),
    ),
    # With statistics of observations, and without.
    "badly-scaled-pendulum-sac": Row(
        "sac", "testing:BadlyScaledPendulum", 5_000, -200, flags=("--normalize-observations",)
    ),
    "badly-scaled-pendulum-sac-raw": Row("sac", "testing:BadlyScaledPendulum", 5_000, ceiling=-800),
    "memory-impala-feedforward": Row(
        "impala", "testing:Memory", 200_000, ceiling=0.6, flags=("--lstm-size", "None")
    ),
    "breakout-impala": Row("impala", "minatar:Breakout", 2_000_000, 8),
    "breakout-dqn": Row("dqn", "minatar:Breakout", 1_000_000, 9.5),
    "breakout-c51": Row("c51", "minatar:Breakout", 1_000_000, 26),
    "breakout-iqn": Row("iqn", "minatar:Breakout", 1_000_000, 12.2),
    "breakout-munchausen": Row("dqn", "minatar:Breakout", 1_000_000, 12, flags=("--munchausen", "0.9")),
    "breakout-qr-dqn": Row("qr_dqn", "minatar:Breakout", 1_000_000, 12),
    "breakout-rainbow": Row("rainbow", "minatar:Breakout", 1_000_000, 24),
    "breakout-pqn": Row("pqn", "minatar:Breakout", 2_000_000, 16.7),
    # The games that agents are compared over, after few steps.
    **{
        f"five-games-{game.lower()}-{agent}": Row(
            *(agent, f"minatar:{game}", 300_000), exception="It counts in the mean over five games."
        )
        for game in FIVE_GAMES
        for agent in ("dqn", "rainbow", "ppo")
    },
    "pong-rainbow": Row("rainbow", "atari:Pong", 500_000, 18),
    "pong-impala": Row("impala", "atari:Pong", 10_000_000, 19),
    # Without bfloat16, for which the CPU that ran them has no units.
    "pong-appo": Row(
        "appo",
        "atari:Pong",
        3_000_000,
        flags=("--no-autocast", "--no-actor-autocast"),
        exception="One seed, to hold its curve against IMPALA's, which needs 10 million steps.",
    ),
    "pong-impact": Row(
        "impact",
        "atari:Pong",
        2_000_000,
        flags=("--no-autocast", "--no-actor-autocast"),
        exception="One seed, to hold its curve against IMPALA's, which needs 10 million steps.",
    ),
    # Random actions return 0.42 in Freeway and 0.12 in Seaquest, as means of 100 episodes.
    "freeway-dqn": Row("dqn", "minatar:Freeway", 1_000_000, 41),
    "freeway-rainbow": Row("rainbow", "minatar:Freeway", 1_000_000, 30),
    "seaquest-dqn": Row("dqn", "minatar:Seaquest", 1_000_000, 2.8),
    "seaquest-rainbow": Row("rainbow", "minatar:Seaquest", 1_000_000, 1.4),
    "doorkey-ppo-lstm": Row("ppo", "minigrid:DoorKey-5x5", 500_000, 0.85),
    "mountaincar-dqfd": Row("dqfd", "gymnasium:MountainCar-v0", 60_000, -130),
    # DQfD's n-step returns, priorities and number of learner steps, but no demonstrations and losses for
    # them, and DQN's exploration.
    "mountaincar-dqn": Row(
        "dqn",
        "gymnasium:MountainCar-v0",
        60_000,
        flags=(
            *("--num-actors", "1", "--envs-per-actor", "4", "--learning-rate-decay", "60000"),
            *("--n-step", "10", "--prioritized", "--priority-exponent", "0.4"),
            *("--importance-sampling-exponent", "0.6", "--samples-per-insert", "21.33"),
        ),
        exception="A control: without demonstrations, some seeds find the goal and others do not.",
    ),
    "halfcheetah-sac": Row(
        "sac", "gymnasium:HalfCheetah-v5", 200_000, 5400, published="Zoo 9,535 at 1M (v3)"
    ),
    "halfcheetah-sac-1m": Row(
        "sac",
        "gymnasium:HalfCheetah-v5",
        1_000_000,
        9500,
        published="Zoo 9,535 at 1M (v3), CleanRL 9,635, Tianshou 12,139",
        flags=("--samples-per-insert", "64"),  # A learner step for every two env steps.
    ),
    "halfcheetah-td3": Row(
        "td3",
        "gymnasium:HalfCheetah-v5",
        200_000,
        4000,
        published="Zoo 9,655 at 1M (v3)",
        flags=("--autocast",),
    ),
    "halfcheetah-td7": Row("td7", "gymnasium:HalfCheetah-v5", 200_000, 7800),
    "hopper-td3": Row(
        "td3",
        "gymnasium:Hopper-v5",
        300_000,
        2000,
        published="Zoo 3,606 at 1M (v3)",
        exception="Seed 3 ends at 1,229. Published TD3 is below 2,000 at 300,000 steps, too.",
    ),
    **{
        f"{name}-{agent.replace('_', '-')}": Row(
            agent, f"gymnasium:{task}-v5", 100_000, flags=flags, exception="The agents stand beside SAC."
        )
        for name, task in (("hopper", "Hopper"), ("walker2d", "Walker2d"))
        for agent, flags in _BESIDE_SAC.items()
    },
    "walker2d-td3": Row(
        "td3",
        "gymnasium:Walker2d-v5",
        300_000,
        2000,
        published="Zoo 4,718 at 1M (v3)",
    ),
    # TD3 with the settings of Stable-Baselines3, beside its own.
    "halfcheetah-td3-sb3": Row("td3", "gymnasium:HalfCheetah-v5", 200_000, 4100, flags=_PLAIN_TD3),
    "hopper-td3-sb3": Row("td3", "gymnasium:Hopper-v5", 200_000, 720, flags=_PLAIN_TD3),
    "dm-cartpole-d4pg": Row("d4pg", "dm_control:cartpole/swingup", 200_000, 750),
    "dm-walker-d4pg": Row("d4pg", "dm_control:walker/walk", 200_000, 650),
    "dm-walker-sac": Row(
        *("sac", "dm_control:walker/walk", 100_000),
        flags=_COMPILED,
        exception="They stand beside each other: no gain is shown.",
    ),
    "dm-walker-sac-normalized": Row(
        *("sac", "dm_control:walker/walk", 100_000),
        flags=("--normalize-observations", *_COMPILED),
        exception="They stand beside each other: no gain is shown.",
    ),
    "dm-cartpole-mpo": Row("mpo", "dm_control:cartpole/swingup", 200_000, 750),
    "dm-walker-mpo": Row("mpo", "dm_control:walker/walk", 200_000, 650),
    "fetch-reach-sac": Row("sac", "robotics:FetchReach-v4", 5_000, 0.95, metric="is_success"),
    "fetch-reach-td3": Row("td3", "robotics:FetchReach-v4", 5_000, 0.95, metric="is_success"),
    # Without hindsight, and with half as many learner steps.
    "maze-sac": Row(
        "sac",
        "tasks:PointMaze",
        5_000,
        ceiling=0.2,
        metric="is_success",
        flags=("--hindsight-goals", "0", "--min-replay-size", "500", "--samples-per-insert", "64"),
    ),
    "maze-sac-hindsight": Row("sac", "tasks:PointMaze", 5_000, 0.9, metric="is_success"),
    "navigation-maml": Row("maml", "tasks:Navigation2D", 400_000, -19, gain=10),
    # One policy for all tasks. It then makes the inner step that suits it best of 0.1, 0.3 and 0.5.
    "navigation-no-meta-learning": Row(
        "maml",
        "tasks:Navigation2D",
        400_000,
        ceiling=-17,
        flags=("--inner-steps", "0", "--inner-learning-rate", "0.5"),
    ),
    **{
        f"{kind}-{name}": Row(PLANS.get(name, name), f"testing:{kind.title()}", 10_000, 0.95, flags=flags)
        for kind, rows in (("masked", _MASKED), ("tuple", _TUPLES))
        for name, flags in rows.items()
    },
}
