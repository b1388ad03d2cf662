"""Pictures and videos that a notebook shows."""

from __future__ import annotations

import base64
from pathlib import PosixPath
from typing import Any

_PICTURES = (".png", ".gif", ".svg")
_TYPES = {".png": "image/png", ".gif": "image/gif", ".svg": "image/svg+xml", ".mp4": "video/mp4"}


class Shown(PosixPath):
    """The path of a picture or a video. As the result of a cell, a notebook shows the file itself."""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        text = {"text/plain": repr(self)}
        if self.suffix not in _TYPES or not self.exists():
            return text
        source = f"data:{_TYPES[self.suffix]};base64,{base64.b64encode(self.read_bytes()).decode()}"
        shown = f'<video controls loop muted style="max-width: 100%" src="{source}"></video>'
        if self.suffix in _PICTURES:
            shown = f'<img style="max-width: 100%" src="{source}">'
        return {**text, "text/html": shown}
