"""`Wake` ends the poll of another thread."""

from __future__ import annotations

import contextlib
import os


class Wake:
    """A pipe that is readable from `set` until `clear`. Any thread may set it, at any time.

    Attributes:
      descriptor: the file descriptor to poll.
      is_set: whether the pipe is readable.
    """

    def __init__(self) -> None:
        self.descriptor, self._write = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._write, False)
        self.is_set = False

    def set(self) -> None:
        """Ends the current poll or, if there is none, the next one."""
        if not self.is_set:
            self.is_set = True
            with contextlib.suppress(BlockingIOError):  # a full pipe is readable anyway
                os.write(self._write, b"!")

    def clear(self) -> None:
        """Makes the next poll wait again. The caller then looks for changes."""
        # The order matters: a `set` in between writes nothing, and this caller then sees its change.
        with contextlib.suppress(BlockingIOError):
            os.read(self.descriptor, 4096)
        self.is_set = False

    def __del__(self) -> None:
        # Not earlier: another thread could write to a descriptor that the process has opened again since.
        with contextlib.suppress(OSError, AttributeError):
            os.close(self.descriptor)
            os.close(self._write)
