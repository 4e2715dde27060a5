"""One model in private training: from the loader's lots to the optimizer's gradients."""

from dphero.run.private_gradients import require_free
from dphero.run.row_limit import make_row_limit
from dphero.run.run import Run

__all__ = ["Run", "make_row_limit", "require_free"]
