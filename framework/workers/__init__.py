"""What sits in the nodes of a program: workers, and the parts that they are made of."""

from typing import TYPE_CHECKING

from framework.lazy import exports

if TYPE_CHECKING:
    from framework.workers.collector import Collector as Collector
    from framework.workers.collector import Steps as Steps
    from framework.workers.gates import Budget as Budget
    from framework.workers.gates import Gate as Gate
    from framework.workers.report import Report as Report

__getattr__, __dir__ = exports(__name__)
