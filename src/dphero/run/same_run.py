"""What a checkpoint must share with the run that continues it: found out before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

if TYPE_CHECKING:
    from dphero.accounting import Budget
    from dphero.run.run import Run


def optimizer_classes(optimizers: Sequence[Optimizer]) -> list[str]:
    """Return the names of the optimizers' classes."""
    return [type(optimizer).__name__ for optimizer in optimizers]


def filter_of(budget: Budget | None) -> list[float] | None:
    """Return ε, δ and order of the Rényi filter that was fixed before the first release, if there is one."""
    if budget is None or budget.accountant != "filter":
        return None
    return [budget.epsilon, budget.delta, budget.filter_order]


def require_same_run(run: Run, state: Mapping[str, Any]) -> None:
    """Compare a saved state with a run, in all but the data; older checkpoints lack some of it.

    Raises:
        ValueError: Naming what does not fit.
    """
    _require_same_model(run, state)
    _require_same_optimizers(run, state)
    if state["loss_reduction"] != run.loss_reduction:
        raise ValueError(f"the checkpoint was made with loss_reduction={state['loss_reduction']!r}")
    lot = state.get("expected_batch_size", run.mechanism.expected_lot)
    if lot != run.mechanism.expected_lot:
        raise ValueError(
            f"the checkpoint was made with expected_batch_size={lot:g}, this engine has "
            f"{run.mechanism.expected_lot:g}: every gradient would be divided by another number than before"
        )
    _require_same_filter(state.get("filter"), filter_of(run.mechanism.budget))
    _require_usable_values(run, state)
    run.mechanism.check_state(state["mechanism"], int(state["next_lot"]))


def _require_same_model(run: Run, state: Mapping[str, Any]) -> None:
    states = (state["module"], run.module.state_dict())
    theirs, mine = ({n: getattr(v, "shape", None) for n, v in saved.items()} for saved in states)
    if theirs != mine:
        names = sorted(n for n in theirs.keys() | mine.keys() if theirs.get(n, 0) != mine.get(n, 0))
        raise ValueError(f"the checkpoint is of another model: {', '.join(names[:5])} differ in name or shape")


def _require_same_optimizers(run: Run, state: Mapping[str, Any]) -> None:
    saved = [len(group["params"]) for optimizer in state["optimizers"] for group in optimizer["param_groups"]]
    ours = [len(group["params"]) for optimizer in run.optimizers for group in optimizer.param_groups]
    if len(state["optimizers"]) != len(run.optimizers) or saved != ours:
        raise ValueError(
            f"the checkpoint was made with {len(state['optimizers'])} optimizers over groups of {saved} "
            f"parameters, this engine has {len(run.optimizers)} over groups of {ours}"
        )
    here = optimizer_classes(run.optimizers)
    classes = state.get("optimizer_classes", here)
    if classes != here:
        raise ValueError(
            f"the checkpoint was made with {', '.join(classes)}, this engine has {', '.join(here)}: one optimizer "
            "cannot go on with the state of another. Resume with the same class."
        )


def _require_usable_values(run: Run, state: Mapping[str, Any]) -> None:
    """Refuse weights that are not numbers, and gradients that are of no parameter."""
    for name in run.parameters:
        if not state["module"][name].isfinite().all():
            raise ValueError(
                f"parameter {name!r} of the checkpoint is not finite: the training had diverged, or the file is "
                "damaged. Go back to an earlier checkpoint, with a smaller learning rate"
            )
    for name, gradient in state["gradients"].items():
        if name not in run.parameters or gradient.shape != run.parameters[name].shape:
            raise ValueError(f"the checkpoint holds a gradient of {name!r} that is not one of this model")
    if not all(0 <= number < len(run.optimizers) for number in state["waiting"]):
        raise ValueError(f"the checkpoint speaks of optimizers {state['waiting']}, of {len(run.optimizers)}")


def _require_same_filter(saved: Sequence[float] | None, ours: Sequence[float] | None) -> None:
    """Refuse a filter that was not there from the first release on: its size may follow from what came out."""
    if (saved and list(saved)) != ours:
        theirs, here = (f"limit({each[0]:g}, {each[1]:g})" if each else "no known limit" for each in (saved, ours))
        raise ValueError(
            f'the checkpoint was made with {theirs}, this engine has {here}: with mechanism="published" a limit is '
            "fixed before the first release of a run, and stays. Load into a fresh engine with the limit of the "
            "checkpoint, or without one if it has none."
        )
