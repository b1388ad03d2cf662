"""Episode i of an evaluation begins with the same seed, whatever the number of envs and the way they step."""

import functools
import zlib

import gymnasium
import numpy as np
import pytest
import tree

from framework import core, environments
from framework.actors import EnvironmentLoop, EnvironmentLoopObserver
from framework.environments import FIRST, SeededEpisodes, testing

SEEDS = [environments.EVALUATION_SEED + index for index in range(100)]


def begins(name, num_envs, count=100, **arguments):
    """The first observations of `count` episodes in the order of their numbers."""
    with environments.make(name, num_envs=num_envs, seed=1, wrappers=[SeededEpisodes], **arguments) as batch:
        rows, kept = [], []
        action = testing.draw_action(batch.action_spec(), np.random.default_rng(0), num_envs)
        timestep = batch.reset()
        while len(rows) < count:
            kept = tree.map_structure(np.copy, timestep.observation)
            rows += [tree.map_structure(lambda leaf, env=env: leaf[env], kept) for env in range(num_envs)]
            if len(rows) % (3 * num_envs):  # Now and then by a reset.
                batch.end_episodes(np.ones(num_envs, bool))
                timestep = batch.step(action)
                assert (timestep.step_type == FIRST).all()
            else:
                timestep = batch.reset()
        return rows[:count]


def by_gymnasium(name):
    environment = gymnasium.make(name)
    return [environment.reset(seed=seed)[0] for seed in SEEDS]


def by_dm_control(domain, task):
    from dm_control import suite

    def load(seed):
        return suite.load(domain, task, task_kwargs={"random": seed})

    environment, found = load(SEEDS[0]), []
    for seed in SEEDS[:-1]:
        environment.task.random.seed(seed)
        found.append(dict(environment.reset().observation))
    return [*found, dict(load(SEEDS[-1]).reset().observation)]


def by_minatar(game):
    import minatar

    environment, found = minatar.Environment(game), []
    for seed in SEEDS:
        environment.seed(seed)
        environment.reset()
        found.append(environment.state().transpose(2, 0, 1).astype(np.float32))
    return found


def by_ale(game):
    """The emulator has no seed of its own: a seed is a number of no-ops, each of which may stick."""
    import ale_py
    import ale_py.roms
    import cv2

    ale, found = ale_py.ALEInterface(), []
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(ale_py.roms.get_rom_path(game))
    for seed in SEEDS[:20]:
        ale.reset_game()
        for _ in range(np.random.default_rng(seed).integers(31)):
            ale.act(0)
        frame = cv2.resize(ale.getScreenGrayscale(), (84, 84), interpolation=cv2.INTER_AREA)
        found.append(np.stack([*[np.zeros_like(frame)] * 3, frame]))
    return found


PEERS = {
    "gymnasium:Pendulum-v1": (None, by_gymnasium, "Pendulum-v1"),
    "tensor:CartPole-v1": (None, by_gymnasium, "CartPole-v1"),
    "tensor:Pendulum-v1": (None, by_gymnasium, "Pendulum-v1"),
    "gymnasium:Hopper-v5": ("mujoco", by_gymnasium, "Hopper-v5"),
    "dm_control:walker/walk": ("dm_control", by_dm_control, "walker", "walk"),
    "minatar:Freeway": ("minatar", by_minatar, "freeway"),
    "atari:Freeway": ("ale_py", by_ale, "freeway"),
}


@pytest.mark.filterwarnings("ignore:.*DISPLAY")
@pytest.mark.parametrize("name", PEERS)
def test_two_widths_and_the_loop_of_a_peer_see_the_same_states(name):
    package, by_hand, *arguments = PEERS[name]
    if package is not None:
        pytest.importorskip(package)
    expected = by_hand(*arguments)
    for width in (2, 7):
        tree.map_structure(np.testing.assert_array_equal, begins(name, width, len(expected)), expected)
    assert len({b"".join(leaf.tobytes() for leaf in tree.flatten(each)) for each in expected}) > 5


class Traces(EnvironmentLoopObserver):
    """A checksum of what each env has shown and paid in its episode."""

    def observe_first(self, environment, timestep):
        self.sums = np.zeros(environment.num_envs, np.int64)
        self.observe(environment, timestep, None)

    def observe(self, environment, timestep, action):
        for env, row in enumerate(zip(*tree.flatten((timestep.observation, timestep.reward)), strict=True)):
            before = 0 if timestep.step_type[env] == FIRST else self.sums[env]
            self.sums[env] = zlib.crc32(b"".join(leaf.tobytes() for leaf in row), before)

    def get_metrics(self, envs):
        return {"trace": self.sums[envs]}


class Hashed(core.Actor):
    """Acts by these checksums."""

    def __init__(self, spec, traces):
        self._spec, self._traces = spec, traces

    def select_action(self, observation):
        each = [testing.draw_action(self._spec, np.random.default_rng(seed), 1) for seed in self._traces.sums]
        return tree.map_structure(lambda *parts: np.concatenate(parts), *each)

    def ignore(self, *_, **__):
        pass

    observe_first = observe = update = ignore


def two_agents(seed):
    return environments.make("multi_agent:CartPole", options={"num_agents": 2}, seed=seed)


def sync(num_envs):
    return gymnasium.make_vec("Acrobot-v1", num_envs, vectorization_mode="sync", max_episode_steps=30)


CARTPOLE, LIMIT = "gymnasium:CartPole-v1", functools.partial(environments.StepLimit, limit=9)
REPEAT = functools.partial(environments.ActionRepeat, num_repeats=3)
WAYS = {
    "inline": (CARTPOLE, {"stepping": "inline"}),
    "processes": (CARTPOLE, {"stepping": "processes", "num_processes": 1}),
    "limit": (CARTPOLE, {"wrappers": [LIMIT]}),
    "repeat": (CARTPOLE, {"wrappers": [REPEAT, functools.partial(environments.FrameStack, num_frames=2)]}),
    "hidden": ("testing:CartPoleWithoutVelocities", {}),
    "one by one": ("gymnasium:Acrobot-v1", {"stepping": "vector", "options": {"max_episode_steps": 30}}),
    "a vector": (sync, {}),
    "two agents": (two_agents, {}),
    "four agents": ("multi_agent:CartPole", {}),
    "fake": ("testing:Fake", {}),
    "navigation": ("tasks:Navigation2D", {"options": {"max_steps": 10}}),
    "maze": ("tasks:PointMaze", {"options": {"max_steps": 10}}),
    "road": ("tasks:WindingRoad", {"options": {"max_steps": 10}}),
    "tensor": ("tensor:CartPole-v1", {}),
    "minatar": ("minatar:Freeway", {"options": {"max_steps": 20}}),
}


@pytest.mark.parametrize("way", WAYS)
def test_whole_episodes_do_not_depend_on_the_number_of_envs(way):
    name, arguments = WAYS[way]
    if way == "minatar":
        pytest.importorskip("minatar")
    arguments = {**arguments, "wrappers": [SeededEpisodes, *arguments.get("wrappers", ())]}
    played = []
    for width in (2, 5):
        with environments.make(name, num_envs=width, seed=width, **arguments) as environment:
            traces = Traces()
            loop = EnvironmentLoop(environment, Hashed(environment.action_spec(), traces), observers=[traces])
            played += [loop.run_episodes(12)["trace"].tolist() for _ in range(2)]
    assert played[0] == played[1] == played[2] == played[3]
    assert len(set(played[0])) > 4


def test_what_takes_no_seed_plays_its_own_episodes_and_says_so(caplog):
    class Unseeded(testing.EchoEnvironment):
        seed = None

    with environments.make(Unseeded, num_envs=2, wrappers=[SeededEpisodes]) as environment:
        assert not environment.is_seeded and environment.reset().observation.tolist() == [[0], [0]]
    assert "Unseeded: InlineEnvironment cannot begin an episode with a given seed. It" in caplog.text


class OwnGenerator(gymnasium.Env):
    """Episodes of one step, from a generator other than `np_random`."""

    observation_space, action_space = gymnasium.spaces.Box(0, 1, (1,)), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        return self._rng.random(1, np.float32), {}

    def step(self, action):
        return self._rng.random(1, np.float32), 0.0, True, False, {}


def test_an_env_in_a_vector_is_seeded_by_its_reset():
    def vector(num_envs):
        return gymnasium.vector.SyncVectorEnv([OwnGenerator] * num_envs)

    with environments.make(vector, num_envs=2, seed=1, wrappers=[SeededEpisodes]) as batch:
        rows = [batch.reset().observation, batch.reset().observation]
        for _ in range(2):
            timestep = batch.step(np.zeros(2, np.int64))
        rows.append(timestep.observation)
    expected = [np.random.default_rng(seed).random(1, np.float32) for seed in SEEDS[:6]]
    np.testing.assert_array_equal(np.concatenate(rows), expected)
