"""The GPUs that a process sees. Engines decide which those are; every process numbers its own from 0."""

from __future__ import annotations

import os
import zlib

import torch


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
      ValueError: This process does not see the GPU `device`. The text names `field`.
    """
    wanted, count = torch.device(device), torch.cuda.device_count()
    if wanted.type == "cuda" and (wanted.index or 0) >= count:
        variable = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = f"{count or 'no'} GPU{'s' * (count > 1)}"
        raise ValueError(
            f"{field}: got {device!r}, expected a device of this process, which sees {seen} (torch "
            f"{torch.__version__}, CUDA_VISIBLE_DEVICES {variable!r}). Use 'cpu', or a machine with GPUs; on "
            "engine 'ray' reserve them for the group, such as resources learner.num_gpus=1."
        )
    return device


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
