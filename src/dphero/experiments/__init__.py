"""Experiments: runs with their files, comparisons, and the paper's table and figures."""

from dphero.experiments.defaults import resolve
from dphero.experiments.rundir import RunDirectory
from dphero.experiments.stopping import Interrupted
from dphero.experiments.training import Progress, prepare, train

__all__ = ["Interrupted", "Progress", "RunDirectory", "prepare", "resolve", "train"]
