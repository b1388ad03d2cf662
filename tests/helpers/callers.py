"""A caller with generators and settings of its own, which a program in its process must not change."""

from __future__ import annotations

import contextlib
import random
import threading

import numpy as np
import torch


@contextlib.contextmanager
def unusual_settings():
    """All settings at once that change what torch and NumPy compute, or whether they do."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(3)
    torch.set_default_dtype(torch.float64)
    try:
        with np.errstate(all="raise"), torch.inference_mode(), torch.device("meta"):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


def generators():
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


def settings():
    """Settings of this thread, and the torch threads that a new one has."""
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.get_default_device()
    return *found, torch.get_num_threads(), torch.get_default_dtype(), *modes, np.geterr()
