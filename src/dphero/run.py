"""One model in private training: from the loader's lots to the optimizer's gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from dphero.checkpoint import unchanged_on_failure
from dphero.checks.first_batch import probe
from dphero.checks.loss.check import LossCheck
from dphero.checks.optimizers import with_closure_evaluated
from dphero.checks.padding import PaddingCheck
from dphero.cuda_graphs.replay import Graphs
from dphero.gradients.batch import GradientBatch
from dphero.hooks.taps import Taps
from dphero.mechanism.lot_sum import LotSum
from dphero.mechanism.release import Mechanism
from dphero.sampling import Lots, Sampler

__all__ = ["Run", "require_free"]


def require_free(module: nn.Module) -> None:
    """Raise ``ValueError`` if a parameter of the module is being trained privately already."""
    for name, parameter in module.named_parameters():
        if any(isinstance(hook, _Guard) for hook in (parameter._backward_hooks or {}).values()):
            raise ValueError(
                f"this module (parameter {name!r}) is already being trained privately: a second engine would charge "
                "and clip apart from the first. detach() the engine that holds it first."
            )


class Run:
    """Ties taps, lots, mechanism and optimizers together.

    Each lot is released once, at the end of the backward pass of its last physical batch, and written to
    the parameters' ``.grad``. Guards on the parameters and a look before each ``step()`` see to it that no other
    gradient is ever used.
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
        usual_rows: int,
        loss_reduction: Literal["mean", "sum"],
        cuda_graphs: bool = False,
    ) -> None:
        self.module, self.optimizers, self.parameters = module, optimizers, parameters
        self.mechanism, self.lots, self.sampler, self._loss_reduction = mechanism, lots, sampler, loss_reduction
        self.lot_sum = LotSum(mechanism.clipping)
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
            replay=partial(Graphs, rows=usual_rows) if cuda_graphs else None,
        )
        attributes = [value for child in module.modules() for value in vars(child).values()]
        lots.generators.own = [value for value in attributes if isinstance(value, Generator)]
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        # the private gradients, as they were put into .grad; they live no longer than the user keeps them there
        self._handed: dict[str, weakref.ref[Tensor]] = {}
        self._waiting: set[Optimizer] = set()  # those that have not stepped since the latest release
        self._hooks: list[Any] = []
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        for name, parameter in parameters.items():
            self._hooks.append(parameter.register_hook(_Guard(self.taps, name)))

    # -- one lot ------------------------------------------------------------------------------------------

    def before_lot(self) -> None:
        """Called by the loader before it draws a lot; nothing is left of an earlier try."""
        self.before_batch()
        self.lot_sum.clear()
        self.mechanism.before_lot()

    def before_batch(self) -> None:
        """Called by the loader before it hands out a physical batch; forward passes on earlier ones are forgotten.

        Otherwise they could be back-propagated along with this one, and their examples would count twice.
        """
        self.taps.clear()

    def handed_out(self, batch: Any) -> None:
        """Called by the loader with a physical batch that is about to be handed out."""
        self._loss_check.hand_out(batch)

    @property
    def notes(self) -> list[str]:
        """What the statement has to say about the losses that were back-propagated."""
        return list(self._loss_check.notes)

    def _rows(self) -> int:
        batch = self.lots.current
        if batch is None:
            raise RuntimeError(
                "the private model was called in training mode without a batch of the private loader; iterate over the "
                "loader that make_private returned, or use `with engine.paused():` for other data"
            )
        self.lots.generators.hold()
        return batch.rows

    def _look_at_padding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = self.lots.pending
        if batch is not None and batch.padding is not None and batch.real:
            self._padding_check.look(self.taps, args, kwargs, batch.rows, batch.padding)

    def _rows_in_work(self) -> int | None:
        batch = self.lots.pending
        return None if batch is None or self.taps.is_paused else batch.rows

    def _consume(self, gradients: GradientBatch) -> None:
        """Take the gradients of a physical batch; autograd calls this when it has finished with all of them."""
        tape = self.taps.tape
        if tape is None or not tape.done:
            raise RuntimeError(
                "this backward pass belongs to an earlier batch; call backward() before the next batch is drawn"
            )
        self._loss_check.back_propagated()
        batch, before, released = self.lots.capture(), self.mechanism.releases, None
        scale = batch.rows if self._loss_reduction == "mean" else 1
        added = False
        try:
            self.lot_sum.add(gradients, batch.real, scale, self.mechanism.expected_lot)
            if batch.last:
                released = self.mechanism.release(self.lot_sum)
            added = True
        finally:
            if self.mechanism.releases > before:  # even if an error followed: nobody may see this lot a second time
                self.lots.release()
                self.lot_sum.clear()
            elif not added:
                self.lots.mark_failed()
        if released is not None:
            self._hand_over(released)

    def _hand_over(self, gradients: dict[str, Tensor]) -> None:
        """Put the private gradient where the optimizers look; several lots add up until ``zero_grad``."""
        self._waiting = set(self.optimizers)
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad:  # frozen since
                parameter.grad = None
            elif self._holds_private(name):
                assert parameter.grad is not None
                parameter.grad.add_(gradients[name])
            else:
                parameter.grad = gradients[name]
                self._handed[name] = weakref.ref(parameter.grad)

    def _holds_private(self, name: str) -> bool:
        """Tell whether a parameter's gradient is the one that was put there."""
        gradient, handed = self.parameters[name].grad, self._handed.get(name)
        return gradient is not None and handed is not None and handed() is gradient

    # -- what reaches the optimizer -------------------------------------------------------------------------

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.taps.is_paused:
            raise RuntimeError("step() inside `with engine.paused():` would train on gradients without noise; leave it")
        arguments = with_closure_evaluated(optimizer, args, kwargs)
        batch = self.lots.pending
        if batch is not None and not self.lots.captured:
            raise RuntimeError(
                "step() was called for a batch that was not back-propagated through the private model; was the model "
                "in training mode (model.train()), and called on the batch of the private loader?"
            )
        if batch is not None and not batch.last:  # more physical batches of this lot to come: a step of nothing
            for parameter in self.parameters.values():
                parameter.grad = None
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._require_private(parameter)
        return arguments

    def _require_private(self, parameter: Tensor) -> None:
        name = self._names.get(id(parameter))
        if name is None:
            raise RuntimeError(
                f"the optimizer holds a gradient for a parameter of shape {tuple(parameter.shape)} that was not there, "
                "or frozen, when the model was made private. detach() the engine, then make the model private anew."
            )
        if not self._holds_private(name):
            raise RuntimeError(
                f"parameter {name!r} holds a gradient that is not the private one. Call zero_grad(); to change the "
                "private gradient, change it in place."
            )

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._waiting.discard(optimizer)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the model run untapped; gradients that arise meanwhile are gone afterwards."""
        before = {name: parameter.grad for name, parameter in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad = None
        try:
            with self.taps.paused():
                yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.grad = before[name]

    # -- life ---------------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Take everything away again."""
        self.lots.close()
        self.taps.detach()
        self._loss_check.close()
        for handle in self._hooks:
            handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the coming steps depend on."""
        if self.lots.in_parts:
            raise RuntimeError("a lot is under way; save after its last physical batch, when step() has been called")
        waiting = {name: self.parameters[name].grad for name in self._handed if self._holds_private(name)}
        return {
            "loss_reduction": self._loss_reduction,
            "expected_batch_size": self.mechanism.expected_lot,
            "optimizer_classes": self._optimizer_classes,
            "filter": self._filter,
            "module": self.module.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "mechanism": self.mechanism.state_dict(),
            "sampler": self.sampler.state_dict(),
            "next_lot": self.lots.next,
            "gradients": waiting if self._waiting else {},
            "waiting": [number for number, optimizer in enumerate(self.optimizers) if optimizer in self._waiting],
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
        self._check(state)
        gradients = {name: state["gradients"][name].to(self.parameters[name]) for name in state["gradients"]}
        waiting = {self.optimizers[number] for number in state["waiting"]}
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
        self._handed.clear()
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)
            if parameter.grad is not None:
                self._handed[name] = weakref.ref(parameter.grad)
        self._waiting = waiting

    @property
    def _optimizer_classes(self) -> list[str]:
        return [type(optimizer).__name__ for optimizer in self.optimizers]

    @property
    def _filter(self) -> list[float] | None:
        """ε, δ and order of the Rényi filter that was fixed before the first release, if there is one."""
        budget = self.mechanism.budget
        if budget is None or budget.accountant != "filter":
            return None
        return [budget.epsilon, budget.delta, budget.filter_order]

    def _check(self, state: Mapping[str, Any]) -> None:
        """Find out what does not fit before anything is changed; older checkpoints lack some of it."""
        states = (state["module"], self.module.state_dict())
        theirs, mine = ({n: getattr(v, "shape", None) for n, v in saved.items()} for saved in states)
        if theirs != mine:
            names = sorted(n for n in theirs.keys() | mine.keys() if theirs.get(n, 0) != mine.get(n, 0))
            raise ValueError(f"the checkpoint is of another model: {', '.join(names[:5])} differ in name or shape")
        saved = [len(group["params"]) for optimizer in state["optimizers"] for group in optimizer["param_groups"]]
        ours = [len(group["params"]) for optimizer in self.optimizers for group in optimizer.param_groups]
        if len(state["optimizers"]) != len(self.optimizers) or saved != ours:
            raise ValueError(
                f"the checkpoint was made with {len(state['optimizers'])} optimizers over groups of {saved} "
                f"parameters, this engine has {len(self.optimizers)} over groups of {ours}"
            )
        here = self._optimizer_classes
        classes = state.get("optimizer_classes", here)
        if classes != here:
            raise ValueError(
                f"the checkpoint was made with {', '.join(classes)}, this engine has {', '.join(here)}: one optimizer "
                "cannot go on with the state of another. Resume with the same class."
            )
        if state["loss_reduction"] != self._loss_reduction:
            raise ValueError(f"the checkpoint was made with loss_reduction={state['loss_reduction']!r}")
        lot = state.get("expected_batch_size", self.mechanism.expected_lot)
        if lot != self.mechanism.expected_lot:
            raise ValueError(
                f"the checkpoint was made with expected_batch_size={lot:g}, this engine has "
                f"{self.mechanism.expected_lot:g}: every gradient would be divided by another number than before"
            )
        self._check_filter(state.get("filter"))
        self._check_values(state)
        self.mechanism.check_state(state["mechanism"], int(state["next_lot"]))

    def _check_values(self, state: Mapping[str, Any]) -> None:
        """Refuse weights that are not numbers, and gradients that are of no parameter."""
        for name in self.parameters:
            if not state["module"][name].isfinite().all():
                raise ValueError(
                    f"parameter {name!r} of the checkpoint is not finite: the training had diverged, or the file is "
                    "damaged. Go back to an earlier checkpoint, with a smaller learning rate"
                )
        for name, gradient in state["gradients"].items():
            if name not in self.parameters or gradient.shape != self.parameters[name].shape:
                raise ValueError(f"the checkpoint holds a gradient of {name!r} that is not one of this model")
        if not all(0 <= number < len(self.optimizers) for number in state["waiting"]):
            raise ValueError(f"the checkpoint speaks of optimizers {state['waiting']}, of {len(self.optimizers)}")

    def _check_filter(self, saved: Sequence[float] | None) -> None:
        """Refuse a filter that was not there from the first release on: its size may follow from what came out."""
        ours = self._filter
        if (saved and list(saved)) != ours:
            theirs, here = (f"limit({each[0]:g}, {each[1]:g})" if each else "no known limit" for each in (saved, ours))
            raise ValueError(
                f'the checkpoint was made with {theirs}, this engine has {here}: with mechanism="published" a limit is '
                "fixed before the first release of a run, and stays. Load into a fresh engine with the limit of the "
                "checkpoint, or without one if it has none."
            )


class _Guard:
    """Watches a parameter: no gradient but the private one may reach it."""

    def __init__(self, taps: Taps, name: str) -> None:
        self._taps, self._name = taps, name

    def __call__(self, gradient: Tensor) -> Tensor:
        if self._taps.is_paused:
            return gradient
        raise RuntimeError(
            f"a gradient that is not private reached parameter {self._name!r}. The model must be in training mode, and "
            "its parameters may enter the loss only through the model's forward (use the optimizer's weight_decay "
            "instead of a penalty)."
        )
