"""Experiments: runs with their files, comparisons, and the paper's table and figures."""

from dphero.experiments.defaults import resolve
from dphero.experiments.runs.preparation import prepare
from dphero.experiments.runs.rundir import RunDirectory
from dphero.experiments.runs.training import Progress, train
from dphero.experiments.stopping import Interrupted

__all__ = ["Interrupted", "Progress", "RunDirectory", "prepare", "resolve", "train"]
