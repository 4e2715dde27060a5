"""One model in private training: the life of a lot, from the loader to the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from dphero.checkpoint import unchanged_on_failure
from dphero.checks.first_batch import probe
from dphero.checks.loss.check import LossCheck
from dphero.checks.padding import PaddingCheck
from dphero.cuda_graphs.replay import Graphs, can_be_recorded
from dphero.gradients.batch import GradientBatch
from dphero.guidance import preconditioned
from dphero.hooks.taps import Taps
from dphero.mechanism.lot_sum import LotSum
from dphero.mechanism.release import Mechanism
from dphero.run.private_gradients import PrivateGradients
from dphero.run.row_limit import RowLimit
from dphero.run.same_run import filter_of, optimizer_classes, require_same_run
from dphero.sampling import Lots, PhysicalBatch, Sampler


class Run:
    """Ties taps, lots, mechanism and optimizers together.

    A lot comes from the loader in physical batches (:meth:`before_lot`, :meth:`before_batch`, :meth:`handed_out`). The
    model runs tapped, and at the end of each backward pass the per-example gradients arrive (:meth:`_consume`). They
    are clipped and added up, and after the last batch the sum is released, once, and handed to the optimizers.

    Args:
        module: The model.
        optimizers: What steps its parameters.
        parameters: Name to parameter.
        mechanism: Clips, adds noise, and writes the ledger.
        lots: Where training stands.
        sampler: Draws the lots.
        row_limit: The most rows of a physical batch.
        loss_reduction: What the user's loss is over the rows of a batch.
        cuda_graphs: Whether passes are recorded and replayed.
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        optimizers: list[Optimizer],
        parameters: dict[str, nn.Parameter],
        mechanism: Mechanism,
        lots: Lots,
        sampler: Sampler,
        row_limit: RowLimit,
        loss_reduction: Literal["mean", "sum"],
        cuda_graphs: bool | Literal["auto"] = "auto",
    ) -> None:
        self.module, self.optimizers, self.parameters = module, optimizers, parameters
        self.mechanism, self.lots, self.sampler, self.loss_reduction = mechanism, lots, sampler, loss_reduction
        self.row_limit, self.lot_sum = row_limit, LotSum(mechanism.clipping)
        self._loss_check = LossCheck(module, self._rows_in_work, loss_reduction)
        self._padding_check = PaddingCheck()
        self.taps = Taps(
            module,
            parameters,
            geometry=lambda: mechanism.norm_geometry,
            rows=self._rows,
            consume=self._consume,
            entered=self._loss_check.enter,
            returned=lambda out: self._loss_check.watch(self._padding_check.watch(out)),
            called=self._look_at_padding,
            examine=probe,
            replay=self._recorder(cuda_graphs),
        )
        self._gradients = PrivateGradients(parameters, optimizers, lots, lambda: self.taps.is_paused)
        attributes = [value for child in module.modules() for value in vars(child).values()]
        lots.generators.own = [value for value in attributes if isinstance(value, Generator)]

    def _recorder(self, wanted: bool | Literal["auto"]) -> Callable[[Taps], Graphs] | None:
        """Return what makes recordings, if there may be any."""
        if not wanted or (wanted == "auto" and not can_be_recorded(*self.parameters.values())):
            return None
        return partial(Graphs, sizes=self._usual_rows, before=self.lot_sum.settle, required=wanted is True)

    def _usual_rows(self) -> list[int]:
        """Return some sizes that most physical batches come close to; none as long as it is to be found."""
        if not self.row_limit.settled:
            return []
        return [min(size, self.row_limit.rows or size) for size in self.sampler.usual_sizes]

    # -- one lot ------------------------------------------------------------------------------------------

    def before_lot(self) -> None:
        """Called by the loader before it draws a lot; nothing is left of an earlier try."""
        self.before_batch()
        self.lot_sum.clear()
        self.mechanism.before_lot()

    def before_batch(self) -> None:
        """Called by the loader before it hands out a physical batch; forward passes on earlier ones are forgotten.

        Otherwise they could be back-propagated along with this one, and their examples would count twice. And what the
        model left for the sums of the batch before goes, so that never two batches take memory.
        """
        self.taps.clear()
        self.lot_sum.settle()

    def handed_out(self, batch: Any) -> None:
        """Called by the loader with a physical batch that is about to be handed out."""
        self.row_limit.begin()
        self._loss_check.hand_out(batch)

    def _rows(self) -> int:
        """Return the number of rows of the batch in hand: the taps ask when the model is called."""
        batch = self.lots.current
        if batch is None:
            raise RuntimeError(
                "the private model was called in training mode without a batch of the private loader; iterate over the "
                "loader that make_private returned, or use `with engine.paused():` for other data"
            )
        self.lots.generators.hold()
        return batch.rows

    def _rows_in_work(self) -> int | None:
        batch = self.lots.pending
        return None if batch is None or self.taps.is_paused else batch.rows

    def _look_at_padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = self.lots.pending
        if batch is not None and batch.padding is not None and batch.real:
            self._padding_check.look(self.taps, args, kwargs, batch.rows, batch.padding)

    def _consume(self, gradients: GradientBatch) -> None:
        """Take the gradients of a physical batch; autograd calls this when it has finished with all of them."""
        tape = self.taps.tape
        if tape is None or not tape.done:
            raise RuntimeError(
                "this backward pass belongs to an earlier batch; call backward() before the next batch is drawn"
            )
        self._loss_check.back_propagated()
        released = self._add_and_release(gradients, self.lots.capture())
        if released is not None:
            self._gradients.hand_over(preconditioned(self.mechanism.guidance, released))

    def _add_and_release(self, gradients: GradientBatch, batch: PhysicalBatch) -> dict[str, Tensor] | None:
        """Clip the gradients and add them to the lot's sum; after its last batch, return the private gradient."""
        releases, released, added = self.mechanism.releases, None, False
        scale = batch.rows if self.loss_reduction == "mean" else 1
        try:
            self.lot_sum.add(gradients, batch.real, scale, self.mechanism.expected_lot)
            self.row_limit.note(batch.rows, stepped=releases > 0)
            if batch.last:
                if gradients.recorded:  # they lie in memory of their own, and do not go
                    self.mechanism.make_room()
                released = self.mechanism.release(self.lot_sum.finish(self.mechanism.expected_lot))
            added = True
        finally:
            if self.mechanism.releases > releases:  # even if an error followed: nobody may see this lot a second time
                self.lots.release()
                self.lot_sum.clear()
            elif not added:
                self.lots.mark_failed()
        return released

    # -- life ---------------------------------------------------------------------------------------------

    @property
    def notes(self) -> list[str]:
        """What the statement has to say about the losses that were back-propagated."""
        return list(self._loss_check.notes)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the model run untapped; gradients that arise meanwhile are gone afterwards."""
        with self._gradients.set_aside(), self.taps.paused():
            yield

    def detach(self) -> None:
        """Take everything away again."""
        self.lots.close()
        self.taps.detach()
        self._loss_check.close()
        self._gradients.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the coming steps depend on."""
        if self.lots.in_parts:
            raise RuntimeError("a lot is under way; save after its last physical batch, when step() has been called")
        return {
            "loss_reduction": self.loss_reduction,
            "expected_batch_size": self.mechanism.expected_lot,
            "optimizer_classes": optimizer_classes(self.optimizers),
            "filter": filter_of(self.mechanism.budget),
            "module": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "mechanism": self.mechanism.state_dict(),
            "sampler": self.sampler.state_dict(),
            "next_lot": self.lots.next,
            "physical_batch_size": self.row_limit.state_dict(),
            **self._gradients.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            RuntimeError: If releases were made already.
            ValueError: If it is the state of another run; nothing is changed then.
        """
        if self.mechanism.ledger.steps:
            raise RuntimeError(
                f"this engine has made {self.mechanism.ledger.steps} releases; going back would repeat their noise and "
                "forget their price. Load into a fresh engine (to go back to earlier weights, load the model's own "
                "state_dict)."
            )
        require_same_run(self, state)
        with unchanged_on_failure(self.module, *self.optimizers, self.sampler, self.mechanism):
            self.mechanism.load_state_dict(state["mechanism"])
            self.sampler.load_state_dict(state["sampler"])
            self.mechanism.check_ledger()
            self.module.load_state_dict(state["module"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.mechanism.load_noise(state["mechanism"])
        self.lots.restart(int(state["next_lot"]))
        self.lot_sum.clear()
        self.taps.clear()
        self._gradients.load_state_dict(state)
        self.row_limit.load_state_dict(state.get("physical_batch_size"))  # when all else has its memory
