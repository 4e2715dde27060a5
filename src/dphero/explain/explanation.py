"""``explain``: from the directories of runs to numbers and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dphero._files import seal_json, write_atomically
from dphero.experiments.runs.files import to_json, write_text
from dphero.explain.agreement import Key, agreements, reference_group, verdicts, views_of
from dphero.explain.heatmaps import explained_layer
from dphero.explain.images import PRIVATE_STAMP, Images, choose
from dphero.explain.layers import layers_of
from dphero.explain.runs import LAST, ExplainedRun, open_runs
from dphero.explain.scores import TOP_SHARE
from dphero.explain.trajectory import trajectories

_VERSION = 1  # of explain.json


@dataclass(eq=False)
class Explanation:
    """What was found.

    Attributes:
        runs: The runs.
        images: What they looked at.
        targets: The class that is explained, for each image.
        maps: Heat maps, N×H×W, by run and epoch (a number, or ``"last"``).
        numbers: All figures, as ``explain.json`` holds them.
    """

    runs: list[ExplainedRun]
    images: Images
    targets: Tensor
    maps: dict[Key, Tensor]
    numbers: dict[str, Any]

    def figures(self, shown: int = 6) -> dict[str, Any]:
        """Return the pictures as matplotlib figures, by name.

        Args:
            shown: Images in the pictures of heat maps.
        """
        from dphero.explain.figures import all_figures  # matplotlib, which only pictures need

        return all_figures(self, shown)

    def save(self, out: str | PathLike[str], shown: int = 6) -> list[Path]:
        """Write ``explain.json`` and the pictures, for their owner's eyes; return the files.

        Raises:
            OSError: If they cannot be written.
        """
        from dphero.explain.figures import TITLES

        out = Path(out)
        out.mkdir(parents=True, exist_ok=True)
        files, pictures = [], []
        for name, figure in self.figures(shown).items():
            buffer = BytesIO()
            figure.savefig(buffer, format="png", dpi=150)
            write_atomically(out / f"{name}.png", buffer.getvalue(), private=True)
            files.append(out / f"{name}.png")
            pictures.append({"file": f"{name}.png", "title": TITLES[name]})
        numbers = seal_json({**self.numbers, "pictures": pictures})
        write_text(out / "explain.json", to_json(numbers, indent=1) + "\n", private=True)
        return [out / "explain.json", *files]


def explain(
    runs: Sequence[str | PathLike[str]],
    *,
    images: str | None = None,
    per_class: int = 10,
    epochs: Sequence[float] | None = None,
    layer: str | None = None,
    private_images_unprotected: bool = False,
    trust: bool = False,
    note: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Explanation:
    """Explain finished runs by heat maps of the same public images, and by numbers.

    Args:
        runs: Directories of runs, or of comparisons.
        images: What to look at; see :func:`dphero.explain.images.choose`.
        per_class: Images of each class.
        epochs: At which kept epochs to look, besides the end; unless given, at all that every run has kept.
        layer: The layer whose feature maps are explained; unless given, the last convolution.
        private_images_unprotected: Consent to show training images.
        trust: Whether code that recipes name may be imported and run.
        note: Called with what is being done, how much of it is done, and how much there is.

    Raises:
        ImportError: If captum or matplotlib is not installed.
        ValueError: If a run cannot be used, a file is damaged, or images are not known to be public.
    """
    for module in ("captum", "matplotlib"):
        import_module(module)
    if per_class < 1:
        raise ValueError(f"per_class must be at least 1, got {per_class}")
    found = open_runs(runs, trust=trust)
    first = found[0]
    recipe = first.directory.recipe
    chosen = choose(
        images,
        first.predictor,
        recipe.data,
        recipe.channels,
        per_class=per_class,
        private_images_unprotected=private_images_unprotected,
    )
    layers = {run.name: explained_layer(run.predictor.model, chosen.pixels[0], layer) for run in found}
    compared = _compared_epochs(found, epochs)
    targets = _targets(first, chosen)
    views = views_of(found, layers, compared, chosen, targets, note)
    agreement = agreements(found, views)
    gradient_images = None if chosen.private or chosen.labels is None else chosen
    numbers = {
        "version": _VERSION,
        "stamp": PRIVATE_STAMP if chosen.private else None,
        "images": {
            "source": chosen.source,
            "private": chosen.private,
            "count": len(chosen),
            "names": list(chosen.names),
            "classes": list(first.predictor.classes),
            "targets": targets.tolist(),
            "target_is": "the label" if chosen.labels is not None else f"what {first.name} predicts",
        },
        "top_share": TOP_SHARE,
        "reference": reference_group(found),
        "runs": [_facts(run, layers[run.name]) for run in found],
        "maps": views.facts,
        "agreement": agreement,
        "verdicts": verdicts(found, agreement),
        "layers": layers_of(found, gradient_images),
        "trajectory": trajectories(found),
    }
    return Explanation(found, chosen, targets, views.maps, numbers)


def _compared_epochs(runs: Sequence[ExplainedRun], wanted: Sequence[float] | None) -> list[float]:
    """Return the epochs at which all runs have kept weights, the end left out; or those that are wanted."""
    common = sorted(set.intersection(*(set(run.snapshots) for run in runs)))
    if wanted is None:
        ends = {run.epoch_of(run.steps) for run in runs}
        return [epoch for epoch in common if ends != {epoch}]
    for epoch in wanted:
        for run in runs:
            if epoch not in run.snapshots:
                kept = ", ".join(f"{each:g}" for each in run.epochs) or "none"
                raise ValueError(
                    f"{run.path} has kept no weights of epoch {epoch:g} (kept are: {kept}): train with --keep-epochs"
                )
    return sorted(set(wanted))


def _targets(run: ExplainedRun, images: Images) -> Tensor:
    """Return the class to explain for each image: its label, or what the first run takes it for."""
    if images.labels is not None:
        return images.labels
    with torch.no_grad():
        return run.network(LAST)(images.pixels).argmax(1)


def _facts(run: ExplainedRun, layer: str) -> Mapping[str, Any]:
    """What a reader must know of a run. Not its seed, which is secret."""
    return {
        "name": run.name,
        "group": run.group,
        "method": run.method,
        "sound": run.sound,
        "private": run.is_private,
        "epsilon": run.result.get("epsilon"),
        "delta": run.result.get("delta"),
        "accuracy": run.accuracy(),
        "epochs": run.epochs,
        "last_epoch": run.epoch_of(run.steps),
        "layer": layer,
    }
