"""DQN on CartPole-v1 as a program of several processes, until it is solved.

python examples/train_cartpole.py
"""

import launch
from agents.dqn import DQN, DQNConfig
from framework.programs import RunConfig, make_program


def main() -> None:
    program = make_program(
        DQN(DQNConfig(samples_per_insert=24.0)),
        "gymnasium:CartPole-v1",
        RunConfig(
            num_actors=2, envs_per_actor=4, max_env_steps=100_000, target_return=475.0, evaluate_period=2_000
        ),
    )
    result = launch.launch(program, engine="processes")
    print(f"{result['reason']} after {result['env_steps']:,} steps: {result['episode_return']:.1f}")


if __name__ == "__main__":
    main()
