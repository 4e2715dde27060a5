"""Reports: one page about runs, comparisons and federated runs, and its figures for notebooks.

Reads files alone: of runs, comparisons, federated runs, audits and explanations. Nothing that a directory names is
imported or run, so a stranger's may be looked at.
"""

from dphero.report.page import Report, build, write
from dphero.report.reading.gather import Material, Problem, read
from dphero.report.reading.runs import Run

__all__ = ["Material", "Problem", "Report", "Run", "build", "read", "write"]
