"""Evolution strategies (Salimans et al., 2017) on CartPole-v1: two workers, and a plan of three lines.

python examples/evolution.py

It prints the mean return of ten episodes after each update of a linear policy.
"""

import gymnasium
import numpy as np

from framework import flow


class Worker:
    def __init__(self, index):
        self.env, self.mean = gymnasium.make("CartPole-v1"), np.zeros(4)
        self.random = np.random.default_rng(index)

    def play(self, weights, seed):
        observation, total, over = self.env.reset(seed=seed)[0], 0.0, False
        while not over:
            observation, reward, *ends, _ = self.env.step(int(observation @ weights > 0))
            total, over = total + reward, any(ends)
        return total

    def sample(self):
        noise, seed = self.random.normal(size=(8, 4)), int(self.random.integers(1_000_000))
        gains = [self.play(self.mean + each, seed) - self.play(self.mean - each, seed) for each in noise]
        return gains @ noise

    def step(self, gradient):
        self.mean += gradient / max(1e-9, np.linalg.norm(gradient))
        return sum(self.play(self.mean, seed) for seed in range(10)) / 10


def plan(workers):
    for gradient in flow.Par(workers, Worker.sample).sync().map(sum):
        yield next(call.result() for call in [node.call(Worker.step, gradient) for node in workers])


if __name__ == "__main__":
    print(flow.run(Worker, 2, plan, items=10, engine="processes"))
