"""Atari games of ale-py with the preprocessing of the literature. Each part of it is an option."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import dm_env
import numpy as np

from framework import config_checks, specs

_INTER_AREA = 3  # cv2.INTER_AREA


@dataclasses.dataclass(frozen=True)
class AtariOptions:
    """The preprocessing of Mnih et al. (2015), "Human-level control through deep reinforcement learning",
    with the sticky actions of Machado et al. (2018), "Revisiting the Arcade Learning Environment".

    Rewards are the game's points: clip them in the learner, so that logged returns stay scores.
    """

    #: Probability per frame that the game sees the previous action again; 0 makes the game deterministic.
    sticky_actions: float = 0.25
    #: Each episode starts with 0 ... noop_max no-ops, at random; 0 switches them off.
    noop_max: int = 30
    #: Frames per step with the same action, rewards summed. Higher: faster play, coarser control.
    frame_skip: int = 4
    #: Whether an image is the maximum of the last two frames of a step, against flickering sprites.
    max_pooling: bool = True
    #: One channel instead of three.
    grayscale: bool = True
    #: Height and width of images, in pixels; None keeps the game's 210 x 160.
    size: int | None = 84
    #: How many images are stacked along the first axis, oldest first; zeros before an episode's start.
    stack: int = 4
    #: Whether a lost life ends the episode (discount 0); the game itself goes on in the next episode.
    life_loss_terminates: bool = False
    #: All 18 actions instead of those that the game uses.
    full_action_space: bool = False
    #: Frames after which a game is truncated; 108,000 are 30 minutes.
    max_frames: int = 108_000

    def __post_init__(self) -> None:
        config_checks.types(self)
        config_checks.fraction(self, "sticky_actions")
        config_checks.at_least(self, 0, "noop_max")
        config_checks.at_least(self, 1, "frame_skip", "size", "stack", "max_frames")


class AtariEnvironment(dm_env.Environment):
    """One game: uint8[stack * channels, height, width] observations, one of n actions, points as reward."""

    def __init__(self, game: str, options: AtariOptions | None = None, seed: int | None = None):
        """Loads a game, by the name `Pong` or `pong`.

        Raises:
          ImportError: ale-py is missing, or OpenCV, which resizes frames.
          ValueError: There is no such game.
        """
        self._game = game
        self._options = options or AtariOptions()
        sequence = np.random.SeedSequence(seed)
        self._rng = np.random.default_rng(sequence)
        self._ale_seed = int(sequence.generate_state(1)[0] & 0x7FFFFFFF)
        self._load()
        self._noop = self._previous = self._actions[0]
        height, width = self._ale.getScreenDims()
        self._channels = 1 if self._options.grayscale else 3
        frame_shape = (height, width) if self._channels == 1 else (height, width, 3)
        self._frames = [np.zeros(frame_shape, np.uint8) for _ in range(2)]
        if self._options.size is not None:
            height = width = self._options.size
        self._stack = np.zeros((self._options.stack * self._channels, height, width), np.uint8)
        self._lives = 0
        self._playing = False  # whether the next step continues an episode
        self._game_over = True

    def _load(self) -> None:
        """Loads the game and the packages that it needs."""
        import ale_py
        import ale_py.roms

        if self._options.size is not None:
            import cv2

            # OpenCV's threads cost more than they give on such small frames, and compete with other envs.
            cv2.setNumThreads(0)
            self._resize = cv2.resize
        rom = _find_rom(self._game, ale_py.roms.get_all_rom_ids())
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self._ale = ale = ale_py.ALEInterface()
        # ALE reads these settings when it loads the ROM. `_act` repeats actions at random, not ALE: the saved
        # states of ALE lack the action to repeat.
        ale.setInt("random_seed", self._ale_seed)
        ale.setFloat("repeat_action_probability", 0.0)
        ale.setInt("max_num_frames_per_episode", self._options.max_frames)
        path = ale_py.roms.get_rom_path(rom)
        assert path is not None  # its id is among get_all_rom_ids()
        ale.loadROM(path)
        full = self._options.full_action_space
        self._actions = ale.getLegalActionSet() if full else ale.getMinimalActionSet()

    def __getstate__(self) -> dict[str, Any]:
        """The exact state of the game, for pickle."""
        native = ("_ale", "_resize", "_actions")
        attributes = {key: value for key, value in vars(self).items() if key not in native}
        return {**attributes, "ale_state": self._ale.cloneState(include_rng=True)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ale_state = state.pop("ale_state")
        self.__dict__.update(state)
        self._load()
        self._ale.reset_game()
        self._ale.restoreState(ale_state)

    def observation_spec(self) -> specs.BoundedArray:
        # A stack of colored frames has three channels a frame, which is not what the spec promises.
        stacked = self._channels == 1
        kind = specs.StackedBoundedArray if stacked else specs.BoundedArray
        return kind(self._stack.shape, np.uint8, 0, 255, name="observation")

    def action_spec(self) -> specs.DiscreteArray:
        return specs.DiscreteArray(len(self._actions), dtype=np.int64, name="action")

    def seed(self, seed: int) -> None:
        """Makes the next episode begin as the first one of a game with this seed: with a new game.

        The seed chooses the number of no-ops and the actions that stick. The emulator draws no numbers.
        """
        self._rng = np.random.default_rng(seed)
        self._game_over = True

    def reset(self) -> dm_env.TimeStep:
        if self._game_over or self._playing or not self._options.life_loss_terminates:
            self._start_game()
        else:
            # Only a life was lost: the game goes on, one frame later.
            self._act(self._noop)
            if self._ale.game_over():
                self._start_game()
        self._playing, self._game_over = True, False
        self._lives = self._ale.lives()
        self._grab(0)
        self._stack[:] = 0
        self._push(self._frames[0])
        return dm_env.restart(self._stack)

    def _start_game(self) -> None:
        self._ale.reset_game()
        self._previous = self._noop
        if self._options.noop_max:
            for _ in range(int(self._rng.integers(self._options.noop_max + 1))):
                self._act(self._noop)
                if self._ale.game_over():
                    self._ale.reset_game()

    def _act(self, action: Any) -> float:
        """Plays one frame, with the previous action if it sticks; returns the points."""
        sticky = self._options.sticky_actions
        if not sticky or self._rng.random() >= sticky:
            self._previous = action
        return self._ale.act(self._previous)

    def step(self, action: int) -> dm_env.TimeStep:
        if not self._playing:
            return self.reset()
        ale, skip = self._ale, self._options.frame_skip
        move = self._actions[int(action)]
        reward, grabbed = 0.0, 0
        for frame in range(skip):
            reward += self._act(move)
            over = ale.game_over()
            # Pictures are fetched only where they count: of the last two frames.
            if self._options.max_pooling and frame == skip - 2 and not over:
                self._grab(1)
                grabbed = 1
            if over:
                break
        self._grab(0)
        frame_now = self._frames[0]
        if grabbed:
            np.maximum(frame_now, self._frames[1], out=frame_now)
        self._push(frame_now)
        if over:
            self._playing, self._game_over = False, True
            terminated = ale.game_over(with_truncation=False)
            return (dm_env.termination if terminated else dm_env.truncation)(reward, self._stack)
        if self._options.life_loss_terminates and ale.lives() < self._lives:
            self._playing = False
            return dm_env.termination(reward, self._stack)
        self._lives = ale.lives()
        return dm_env.transition(reward, self._stack)

    def _grab(self, index: int) -> None:
        if self._channels == 1:
            self._ale.getScreenGrayscale(self._frames[index])
        else:
            self._ale.getScreenRGB(self._frames[index])

    def _push(self, frame: np.ndarray) -> None:
        if size := self._options.size:
            frame = self._resize(frame, (size, size), interpolation=_INTER_AREA)
        self._stack[: -self._channels] = self._stack[self._channels :]
        self._stack[-self._channels :] = frame if self._channels == 1 else frame.transpose(2, 0, 1)

    def render(self) -> np.ndarray:
        """The screen in color, uint8[210, 160, 3]."""
        return self._ale.getScreenRGB()


def _find_rom(game: str, known: list[str]) -> str:
    rom = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", game).lower()
    if rom in known:
        return rom
    raise ValueError(
        f"Atari game: got {game!r}, expected one of {', '.join(known)}.{config_checks.nearest(rom, known)}"
    )
