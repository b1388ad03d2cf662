"""The thread that flushes what is late."""

import collections
import gc
import threading
import weakref

import pytest

from framework.replay.writers import LateFlush, end_late_threads


class Owner:
    def __init__(self):
        self.errors = collections.deque()
        self.late = LateFlush(self, self.errors)
        self.calls = []
        self.called = threading.Event()

    def first(self):
        self.calls.append("first")

    def second(self):
        self.calls.append("second")
        self.called.set()

    def fail(self):
        self.called.set()
        raise RuntimeError("no room")


def late_threads():
    return [thread for thread in threading.enumerate() if thread.name == "replay-late-flush"]


def test_each_method_is_called_once_in_the_order_in_which_they_are_due():
    owner = Owner()
    owner.late.call_later(owner.second, 0.05)
    for _ in range(3):
        owner.late.call_later(owner.first, 0.01)
    assert owner.called.wait(10)
    assert owner.calls == ["first", "second"]
    owner.late.close()


def test_an_error_is_kept_for_the_owner_and_the_thread_goes_on():
    owner = Owner()
    owner.late.call_later(owner.fail, 0.0)
    assert owner.called.wait(10)
    owner.called.clear()
    owner.late.call_later(owner.second, 0.0)
    assert owner.called.wait(10)
    assert [str(error) for error in owner.errors] == ["no room"]
    owner.late.close()


@pytest.mark.parametrize("how", ["collected", "closed"])
def test_the_thread_ends_with_its_owner(how):
    before = set(late_threads())
    owner = Owner()
    gone = weakref.ref(owner)
    owner.late.call_later(owner.first, 60.0)
    (thread,) = set(late_threads()) - before
    if how == "closed":
        owner.late.close()
    else:
        del owner
        gc.collect()
        assert gone() is None, "what is scheduled keeps nothing alive"
    thread.join(10)
    assert not thread.is_alive()


def test_the_end_of_the_interpreter_waits_for_the_thread(monkeypatch):
    owner, release = Owner(), threading.Event()
    monkeypatch.setattr(LateFlush, "over", False)
    monkeypatch.setattr(
        Owner, "second", lambda self: (self.called.set(), release.wait(10), self.calls.append("second"))
    )
    owner.late.call_later(owner.second, 0.0)
    assert owner.called.wait(10)
    threading.Timer(0.1, release.set).start()
    end_late_threads()
    assert owner.calls == ["second"] and not late_threads()
    owner.late.call_later(owner.fail, 0.0)
    assert not late_threads()
