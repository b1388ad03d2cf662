"""Ctrl-C at any moment: `KeyboardInterrupt` wherever Python looks for signals in some files."""

from __future__ import annotations

import dis
import gc
import sys


def interrupt(function, at, *files):
    """Calls `function` and interrupts it at the `at`-th place in these files; returns whether it did."""
    seen, before = 0, {}

    def trace(frame, event, _):
        nonlocal seen
        if not frame.f_code.co_filename.endswith(files):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            # Python looks after a call and a jump back, and at the beginning of a function.
            name = before.get(id(frame), "RESUME")
            before[id(frame)] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if name.startswith(("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")):
                seen += 1
                if seen > at:
                    sys.settrace(None)
                    raise KeyboardInterrupt
        elif event == "return":
            before.pop(id(frame), None)
        return trace

    old = sys.gettrace()
    if not at:
        gc.collect()
    gc.disable()  # An interrupt of what collects garbage goes nowhere.
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(old)
        gc.enable()
    return False
