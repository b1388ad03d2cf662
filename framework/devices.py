"""The GPUs that a process sees. Engines decide which those are; every process numbers its own from 0."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from launch.engines.options import Options
from launch.errors import message_of


class NoDeviceError(ValueError):
    """This machine, or this process of it, does not have the device of a setting."""


def device_of_learner(device: str, rank: int, num_learners: int) -> str:
    """Returns `device`; for "cuda" and several learners, a GPU for this learner alone.

    The learner of rank r takes the r-th GPU that its process sees, and starts again at the first one: on
    `processes` all learners see the same GPUs and divide them, and on Ray each sees those that are reserved
    for it.
    """
    if device != "cuda" or num_learners == 1:
        return device
    return f"cuda:{rank % (torch.cuda.device_count() or num_learners)}"


def check_visible(field: str, device: str) -> str:
    """Returns `device`.

    Raises:
      NoDeviceError: This process cannot use `device`. The text names `field`.
    """
    wanted, count = torch.device(device), torch.cuda.device_count()
    if wanted.type not in ("cpu", "cuda"):
        try:
            torch.zeros(
                1, device=wanted
            ).cpu()  # Each kind of device has an error of its own, such as `meta`.
        except Exception as error:
            reason = message_of(error).partition("\n")[0].partition(". ")[0].rstrip(".")
            raise NoDeviceError(
                f"{field}: got {device!r}, expected a device that this process can use: {reason}. Use 'cpu'."
            ) from error
    if wanted.type == "cuda" and (wanted.index or 0) >= count:
        variable = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = f"{count or 'no'} GPU{'s' * (count > 1)}"
        raise NoDeviceError(
            f"{field}: got {device!r}, expected a device of this process, which sees {seen} (torch "
            f"{torch.__version__}, CUDA_VISIBLE_DEVICES {variable!r}). Use 'cpu', or a machine with GPUs; on "
            "engine 'ray' reserve them for the group, such as resources learner.num_gpus=1."
        )
    return device


@dataclass(frozen=True)
class DeviceCheck:
    """Raises NoDeviceError for a device that a node would not find, as far as this process can know.

    Attributes:
      wanted: group of the nodes, name of the field, and device.
    """

    wanted: Sequence[tuple[str, str, str]]

    def __call__(self, engine: str, options: Options) -> None:
        """Only some engines, by their names, have all nodes on this machine."""
        for group, field, device in self.wanted:
            given = options.resources.get(group)
            sees_others = engine == "processes" and given is not None and "CUDA_VISIBLE_DEVICES" in given.env
            if engine in ("serial", "threads", "processes") and not sees_others:
                check_visible(field, device)


def gpu_id(device: torch.device) -> str:
    """The identity of a GPU on its machine, whatever its number in this process; empty for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def restore_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    """Sets the state of `generator`. A GPU's state only seeds a generator on the CPU, and the reverse.

    The two kinds of generators draw different numbers in any case.
    """
    state = state.cpu()
    if state.numel() == generator.get_state().numel():
        generator.set_state(state)
    else:
        generator.manual_seed(zlib.crc32(state.numpy().tobytes()))
