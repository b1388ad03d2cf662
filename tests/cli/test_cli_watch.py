"""The live table of nodes, in ``repertory status --watch`` and ``repertory train``."""

import fcntl
import functools
import json
import os
import pty
import re
import struct
import subprocess
import termios

import pytest


@pytest.fixture
def train(start, tmp_path):
    environment = {**os.environ, "TERM": "xterm-256color"}
    for name in ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE"):
        environment.pop(name, None)
    flags = ("train", "random_actions", "--engine", "processes", "--directory", tmp_path / "run")
    return functools.partial(start, *flags, env=environment)


def on_a_terminal(train, *flags):
    """What ``repertory`` writes to a terminal of 50 lines and 160 columns, without the escape codes."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    process = train(*flags, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = b""
    try:
        while piece := os.read(ours, 65536):
            written += piece
    except OSError:  # EIO: the other end has been closed
        pass
    finally:
        os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())
    assert process.wait(60) == 0, text
    return text


def test_training_on_a_terminal_shows_the_nodes(train, tmp_path):
    # Long enough for the display to come round while the nodes run.
    text = on_a_terminal(train, "--max-env-steps", "10000")
    assert "messages/s" in text
    *_, last = text.split(" on processes: ")
    assert last.startswith("finished")
    shown = [[cell.strip() for cell in line.split("│")[1:-1]] for line in last.splitlines() if "│" in line]
    nodes = {row[0]: row for row in shown}
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert set(nodes) == {node["label"] for node in status["nodes"]}
    assert {row[1] for row in nodes.values()} == {"closed"}
    assert all(float(row[4]) > 1 for row in nodes.values()), "no memory"
    assert "env steps/s" in text


def test_training_into_a_pipe_shows_no_table(train):
    process = train("--max-env-steps", "1000", stdout=subprocess.PIPE)
    text = process.communicate(timeout=100)[0]
    assert process.returncode == 0
    assert "env steps" in text
    assert "messages/s" not in text and "│" not in text
