"""Measures the CPU seconds of each test, counts the processes that it started, and limits them.

The seconds of a process are known once it has ended and its parent has waited for it. Time limits say little
on a loaded machine; CPU seconds stay within a factor of about two. A test has `BUDGET_S` seconds unless a
mark grants more: `@pytest.mark.cpu_budget(40)`. The ten tests that took most are printed at the end of a run.
"""

from __future__ import annotations

import collections
import os
import resource

import pytest
import warm_python

BUDGET_S = 20.0
SHOWN = 10


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process, its children that have ended, and the templates'."""
    own = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in own) + warm_python.cpu_seconds()


class CpuBudget:
    """Adds a phase's CPU seconds to its report, and fails the test that took more than it may."""

    def __init__(self, enforced: bool):
        self._enforced = enforced
        self._begin = 0.0
        self._taken: collections.Counter[str] = collections.Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        self._begin = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        used, self._begin = cpu_seconds() - self._begin, cpu_seconds()
        report.user_properties.append(("cpu_seconds", used))
        marker = item.get_closest_marker("cpu_budget")
        budget = marker.args[0] if marker else BUDGET_S
        # A fixture of many tests is made in the set-up of the first one.
        if self._enforced and call.when == "call" and report.passed and used > budget:
            report.outcome = "failed"
            report.longrepr = f"cpu_budget: took {used:.1f} CPU seconds, may take {budget:g}."
        return report

    def pytest_runtest_logreport(self, report):
        if "PYTEST_XDIST_WORKER" not in os.environ:
            seconds = [value for name, value in report.user_properties if name == "cpu_seconds"]
            self._taken[report.nodeid] += seconds[-1] if seconds else 0.0

    def pytest_terminal_summary(self, terminalreporter):
        if "PYTEST_XDIST_WORKER" in os.environ or not self._taken:
            return
        total = sum(self._taken.values())
        terminalreporter.write_sep("=", f"{total:,.0f} CPU seconds; the {SHOWN} dearest tests")
        for name, seconds in self._taken.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:7.1f} CPU s  {name}")
        path = os.environ.get("CPU_SECONDS_FILE")
        if path:
            with open(path, "a", encoding="utf-8") as file:
                file.writelines(f"{seconds:.3f} {name}\n" for name, seconds in self._taken.most_common())
