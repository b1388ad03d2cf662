"""Whether a process has ended."""

import psutil


def has_ended(pid, patience_s=60.0):
    """Whether a process that was killed ends; perhaps nothing has waited for it yet."""
    try:
        process = psutil.Process(pid)
        process.wait(patience_s)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return process.status() == psutil.STATUS_ZOMBIE
    return True
