"""Draw docs/images/noise-shape.svg and .png: what one example can add, and the noise that hides it.

    pip install matplotlib
    python docs/make_images.py

Everything is read off the network that ``dphero demo --seed 0`` trains. Also prints, for that network, the ε that the
paper claims and what is true.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Ellipse

from dphero.accounting import AdaptiveGaussian, Ledger, claimed_by_paper, price
from dphero.experiments import demo
from dphero.experiments.pictures import METHOD_COLOURS
from dphero.guidance import PCA, noise_scales, spectrum
from dphero.guidance.pca import THEOREM_2

IMAGES = Path(__file__).parent / "images"
REACH, NOISE = "#f2d9ae", "#303640"  # what one example can add; the noise
COLOURS = {
    "isotropic": METHOD_COLOURS["dp-sgd"],
    "published": METHOD_COLOURS["dp-hero-published"],
    "default": METHOD_COLOURS["dp-hero"],
}


def ellipses(axes: Axes, title: str, reach: tuple[float, float], noise: tuple[float, float]) -> None:
    """Draw, in the plane of the strongest and the weakest direction, one example's reach and the noise."""
    axes.add_patch(Ellipse((0, 0), 2 * reach[0], 2 * reach[1], facecolor=REACH, label="what one example can add"))
    axes.add_patch(
        Ellipse(
            (0, 0),
            2 * noise[0],
            2 * noise[1],
            fill=False,
            edgecolor=NOISE,
            lw=2,
            label="noise, one standard deviation ÷ σ",
        )
    )
    axes.set(xlim=(-1.7, 1.7), ylim=(-1.7, 1.7), aspect="equal", xticks=(-1, 0, 1), yticks=(-1, 0, 1))
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("strongest direction  [C]")
    axes.grid(color="#e6e6e6", lw=0.6)
    axes.set_axisbelow(True)


def main() -> None:
    """Train, draw, print."""
    plt.rcParams.update({"font.size": 9.5, "svg.fonttype": "path", "svg.hashsalt": "dphero"})
    result = demo.train(seed=0)
    first, last = (spectrum(result.model[index].weight) for index in (0, 3))
    guidance = PCA()
    figure = plt.figure(figsize=(10.6, 6.2), layout="constrained")
    panels = figure.subplot_mosaic("ABCD;EEEE", height_ratios=(1.25, 1))

    published = tuple(noise_scales(last, THEOREM_2)[[0, -1]].tolist())
    default = tuple(noise_scales(last, guidance.exponent, guidance.floor)[[0, -1]].tolist())
    ellipses(panels["A"], "isotropic (DP-SGD):\nsound", (1, 1), (1, 1))
    ellipses(panels["B"], f"as published: UNSOUND,\nweakest only {published[1]:.2f} σ", (1, 1), published)
    ellipses(panels["C"], "the same noise, clipped by its\nown ellipsoid: sound", published, published)
    ellipses(panels["D"], "dphero's default ellipsoid:\nsound", default, default)
    panels["A"].set_ylabel("weakest direction  [C]")
    rows, columns = result.model[3].weight.shape
    handles, labels = panels["A"].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside upper center",
        ncols=2,
        frameon=False,
        title=f"Last layer's weights ({rows} × {columns})",
    )

    bottom, index = panels["E"], np.arange(1, len(first) + 1)
    lines = {
        "isotropic": (np.ones(len(first)), "isotropic"),
        "published": (noise_scales(first, THEOREM_2).numpy(), "noise ∝ eigenvalue: UNSOUND AS PUBLISHED"),
        "default": (
            noise_scales(first, guidance.exponent, guidance.floor).numpy(),
            f"dphero's default: (eigenvalue + {guidance.floor:g} of the mean) to the power {guidance.exponent:g}",
        ),
    }
    for name, (scales, label) in lines.items():
        bottom.plot(index, scales, marker="o", ms=3.5, color=COLOURS[name], label=label)
    silent = int((first == 0).sum())
    bottom.annotate(
        f"{silent} of {len(first)} directions get no noise at all:\nno privacy (ε = ∞) if clipped to a ball",
        (len(first) - silent / 2 + 0.5, 0.0),
        (len(first) - silent / 2 + 0.5, 1.55),
        ha="center",
        color=COLOURS["published"],
        arrowprops={"arrowstyle": "->", "color": COLOURS["published"]},
    )
    bottom.set(xlim=(0.5, len(first) + 0.5), ylim=(-0.12, None))
    bottom.set_xlabel("principal direction of the first layer's weights (32 × 16), strongest first")
    bottom.set_ylabel("noise std  [σC]")
    bottom.grid(color="#e6e6e6", lw=0.6)
    bottom.legend(frameon=False, loc="upper right")
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / "noise-shape.svg", metadata={"Date": None})
    figure.savefig(IMAGES / "noise-shape.png", dpi=110)

    sigma, delta, rate = result.noise_multiplier, result.statement.price.delta, demo.LOT / result.train_images
    weakest = min(float(noise_scales(values, THEOREM_2)[-1]) for values in (first, last))
    ledger = Ledger()
    ledger.record(AdaptiveGaussian(rate, sigma * weakest), result.steps)
    print(f"noise multiplier {sigma:.3f}, sample rate {rate:.3f}, {result.steps} steps, delta {delta:g}")
    print(f"epsilon that the paper claims:              {claimed_by_paper([sigma], delta).epsilon:.2f}")
    print(f"epsilon of isotropic noise, and ellipsoid:  {result.statement.price.epsilon:.2f}")
    print(f"epsilon of the published recipe:            {price(ledger, delta, 'filter').epsilon:.2f}")


if __name__ == "__main__":
    main()
