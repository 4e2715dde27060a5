"""Accounting: what was released (events, ledger), what it costs (accountants), and what follows from it.

Nothing here imports torch.
"""

from dphero.accounting.accountants import ACCOUNTANTS, claimed_by_paper, price
from dphero.accounting.budget import Budget, BudgetExhausted
from dphero.accounting.calibration import (
    CalibrationError,
    calibrate_noise_multiplier,
    calibrate_sample_rate,
    calibrate_steps,
)
from dphero.accounting.events.base import EVENT_KINDS, Event, Relation
from dphero.accounting.events.filters import IndividualFilter, ShuffledFilter
from dphero.accounting.events.gaussian import AdaptiveGaussian, Gaussian, NoNoise, PoissonGaussian, ShuffledGaussian
from dphero.accounting.events.labels import RandomisedLabels
from dphero.accounting.events.line_search import LineSearchStep
from dphero.accounting.events.student_t import PoissonStudentT
from dphero.accounting.ledger import LEDGER_VERSION, Ledger
from dphero.accounting.prices import DEFAULT_FILTER_ORDER, Price, UnpriceableError
from dphero.accounting.privacy_loss import MAX_STEPS
from dphero.accounting.statement import UNSOUND_AS_PUBLISHED, Statement, statement
from dphero.accounting.trade_off import TradeOff, trade_off

__all__ = [
    "ACCOUNTANTS",
    "DEFAULT_FILTER_ORDER",
    "EVENT_KINDS",
    "LEDGER_VERSION",
    "MAX_STEPS",
    "UNSOUND_AS_PUBLISHED",
    "AdaptiveGaussian",
    "Budget",
    "BudgetExhausted",
    "CalibrationError",
    "Event",
    "Gaussian",
    "IndividualFilter",
    "Ledger",
    "LineSearchStep",
    "NoNoise",
    "PoissonGaussian",
    "PoissonStudentT",
    "Price",
    "RandomisedLabels",
    "Relation",
    "ShuffledFilter",
    "ShuffledGaussian",
    "Statement",
    "TradeOff",
    "UnpriceableError",
    "calibrate_noise_multiplier",
    "calibrate_sample_rate",
    "calibrate_steps",
    "claimed_by_paper",
    "price",
    "statement",
    "trade_off",
]
