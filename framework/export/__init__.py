"""Policies as files that act without Repertory, and over HTTP; see docs/deploy.md."""

from typing import TYPE_CHECKING

from framework.lazy import exports

if TYPE_CHECKING:
    from framework.export.standalone import ExportedPolicy as ExportedPolicy
    from framework.export.standalone import load as load
    from framework.export.steps import PolicyStep as PolicyStep
    from framework.export.writing import export as export

__getattr__, __dir__ = exports(__name__)
