"""One model in private training: from the loader's lots to the optimizer's gradients."""

from dphero.run.private_gradients import require_free
from dphero.run.run import Run

__all__ = ["Run", "require_free"]
