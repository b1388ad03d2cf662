"""`repertory video`: records a video of the policy of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tree

from framework import interrupts
from framework.commands.options import Allow, Checkpoint, CommandError, Run, UsageError, check_at_least, parse
from framework.programs.loading import LoadedPolicy, evaluated_or_latest, load_policy
from framework.types import FIRST, LAST
from launch.texts import rounded

FORMATS = (".mp4", ".gif")
_LINE_S = 10.0  # Seconds between two lines about an episode.


@dataclass(frozen=True)
class VideoOptions:
    """Records episodes played greedily with the policy of a run."""

    run: Run  # Folder of the run.
    output: str | None = None  # An .mp4 or .gif file; by default video.mp4 in the run's folder.
    episodes: int = 1  # Number of episodes.
    max_steps: int = 5_000  # The video ends after this number of steps at the latest.
    fps: int = 30  # Frames per second.
    seed: int = 0  # Episode i begins with seed 10,000 + SEED + i. It seeds the policy, too.
    # best (as evaluated during the run), latest, previous, or a step. By default best, and latest if nothing
    # was evaluated.
    checkpoint: Checkpoint = None
    allow: Allow = ()  # A module whose objects the run may name. Give it once for each module.


def main(arguments: Sequence[str]) -> int:
    options = parse(VideoOptions, arguments, prog="repertory video")
    check_at_least(options, episodes=1, max_steps=1, fps=1, seed=0)
    output = Path(options.output) if options.output else Path(options.run) / "video.mp4"
    _check_format(output)
    which = options.checkpoint or evaluated_or_latest(options.run)
    policy = load_policy(options.run, which, options.allow)
    interrupts.clean_up_first()
    record(policy, output, options.episodes, options.max_steps, options.fps, options.seed)
    return 0


def record(policy: LoadedPolicy, output: Path, episodes: int, max_steps: int, fps: int, seed: int) -> None:
    """Writes a video of whole episodes, and says how long it is."""
    _check_format(output)
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # Pygame draws into memory and needs no display.
    count = write_video(output, frames(policy, episodes, max_steps, seed), fps)
    print(f"{count} pictures in {output}")


def _check_format(output: Path) -> None:
    if output.suffix not in FORMATS:
        raise UsageError(f"--output: got {output}, expected a name that ends in {' or '.join(FORMATS)}.")


def frames(policy: LoadedPolicy, episodes: int, max_steps: int, seed: int) -> Iterator[Any]:
    """Yields the frames uint8 `[height, width, 3]` of whole episodes, including the first and the last.

    Prints the return of each episode when it ends, and how far it is every ten seconds. With several agents,
    it is the mean of theirs.
    """
    environment, actor = policy.make_environment(1, seed, render_mode="rgb_array"), policy.make_actor(1, seed)
    try:
        timestep = environment.reset()
        actor.observe_first(timestep)
        yield environment.render()
        episode, length, total, printed = 1, 0, 0.0, time.monotonic()
        for left in range(max_steps - 1, -1, -1):
            action = actor.select_action(timestep.observation)
            timestep = environment.step(action)
            actor.observe(action, timestep)
            yield environment.render()
            length += int(timestep.step_type[0] != FIRST)
            total += float(np.mean([np.mean(leaf) for leaf in tree.flatten(timestep.reward)]))
            over = timestep.step_type[0] == LAST
            if over or not left or time.monotonic() - printed > _LINE_S:
                printed = time.monotonic()
                so_far = f"return {rounded(total, 1)} after {length:,} steps{'' if over else ' so far'}"
                print(f"episode {episode} of {episodes}: {so_far}")
            if over:
                episode, length, total = episode + 1, 0, 0.0
            if episode > episodes:
                return
    except NotImplementedError as error:
        reason = str(error) or "it has no render() of its own."  # gymnasium's raises without a text.
        raise CommandError(f"This environment cannot be filmed: {reason}") from error
    finally:
        environment.close()


def write_video(output: Path, pictures: Iterator[Any], fps: int) -> int:
    """Writes an mp4 or a gif and returns the number of frames."""
    import imageio.v2 as imageio

    output.parent.mkdir(parents=True, exist_ok=True)
    open(output, "ab").close()  # ffmpeg's error would not say why it cannot write there.
    settings: dict[str, Any] = {"fps": fps, "macro_block_size": 2}
    if output.suffix == ".gif":
        settings = {"duration": 1000 / fps, "loop": 0}
    count = 0
    writer: Any = imageio.get_writer(output, **settings)
    with writer:
        for picture in pictures:
            writer.append_data(picture)
            count += 1
    return count
