"""Ctrl-C at any moment: `KeyboardInterrupt` wherever Python looks for signals in some files."""

from __future__ import annotations

import dis
import functools
import gc
import sys


@functools.cache
def _handlers(code):
    """The parts of a function with handlers of exceptions, `(start, end, handler)`; none before 3.11."""
    entries = getattr(dis.Bytecode(code), "exception_entries", ())
    return [(each.start, each.end, each.target) for each in entries]


def _handler(code, at):
    return next((handler for start, end, handler in _handlers(code) if start <= at < end), None)


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
            code, now = frame.f_code, frame.f_lasti
            name, last = before.get(id(frame), ("RESUME", now))
            before[id(frame)] = dis.opname[code.co_code[now]], now
            # It raises in the call. What follows may have another handler, as in `with lock: return f()`.
            same = _handler(code, last) == _handler(code, now)
            if same and name.startswith(("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")):
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
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks in `settrace` whether any frame has it.
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(old)
        gc.enable()
    return False
