"""Guidance by what the network does with synthetic images: knowledge that exists before any private example is seen."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor, nn

from dphero._checks import one_of, whole
from dphero.geometry.factor import Factor
from dphero.geometry.geometry import Geometry
from dphero.guidance import spectra
from dphero.guidance.base import Block, Released, same_settings, settings, share_rows
from dphero.guidance.prior.layer_moments import Loss, drawn_labels, of_batch
from dphero.guidance.prior.processes import PROCESSES


@dataclass(eq=False)
class Prior:
    """Shapes the noise by second moments that the network has on images of a random process.

    A twin of the network, with the weights released so far, runs on synthetic images, with labels drawn from its own
    predictions. Each weight W of a linear layer or convolution then has R = E[a a^T] of the layer's inputs and L =
    E[delta delta^T] of the gradients at its outputs, and its noise is shaped by both:

        A G = L^a G R^a,   eigenvalues of each factor: (lambda / mean lambda + floor)^a, scaled to a mean square of 1

    A bias takes its weight's left factor; all other parameters have isotropic noise. No private example is used:
    weights are released, synthetic images public, so the shape is free of charge, whatever it is.

    Attributes:
        model: the network that is trained, as it is before `make_private`; it is copied.
        inputs: the shape of its images, (channels, height, width), to draw synthetic ones with pixels in [-1, 1]; or
            public inputs of your own, one in each row, such as features of public images. **Never private ones.**
        process: where synthetic images come from: "spectrum" (pink noise), "leaves" (dead leaves) or "network".
        examples: how many synthetic images are drawn for each geometry.
        exponent: a.
        floor: what every direction gets, relative to the mean eigenvalue.
        side: "both", or "left" or "right" alone.
        shapes: "noise"; or the "step" instead: noise is isotropic, and the released gradient g becomes A^-2 g before
            the optimizer uses it, as by a preconditioner; or "both".
        refresh_every: steps between geometries.
        seed: of images and labels. It is public, and need not be the training's own.
        exact_up_to: the longest axis that is decomposed exactly; of longer ones the leading `components` directions
            are resolved, and the others share their mean.
        components: how many directions that is.
        loss: the sum of losses, from outputs and a generator; by default cross-entropy with drawn labels.
    """

    model: InitVar[nn.Module]
    inputs: InitVar[Sequence[int] | Tensor]
    process: str = "spectrum"
    examples: int = 512
    exponent: float = 0.25
    floor: float = 0.1
    side: Literal["left", "right", "both"] = "both"
    shapes: Literal["noise", "step", "both"] = "noise"
    refresh_every: int = 20
    seed: int = 0
    exact_up_to: int = 1024
    components: int = 64
    loss: InitVar[Loss] = drawn_labels
    _twin: nn.Module = field(init=False, repr=False)
    _inputs: Tensor | tuple[int, int, int] = field(init=False, repr=False)
    _loss: Loss = field(init=False, repr=False)
    _latest: dict[str, Geometry] = field(default_factory=dict, init=False, repr=False)

    needs_gradients: ClassVar[bool] = False

    def __post_init__(self, model: nn.Module, inputs: Sequence[int] | Tensor, loss: Loss) -> None:
        one_of("process", self.process, tuple(PROCESSES))
        one_of("side", self.side, ("left", "right", "both"))
        one_of("shapes", self.shapes, ("noise", "step", "both"))
        for name in ("examples", "refresh_every", "components"):
            whole(name, getattr(self, name))
        if not self.floor > 0.0:
            raise ValueError(f"floor={self.floor} must be positive: moments of synthetic images do reach zero")
        self._inputs, self._loss = _checked(inputs), loss
        self._twin = copy.deepcopy(model).requires_grad_(False).eval()

    def observe(self, released: Released) -> None:
        """Ignores the release: the weights say it all."""

    def geometry(self, released: Released) -> dict[str, Geometry]:
        """Returns the geometry for the noise: factors for each weight of the twin's layers, and for its bias."""
        if self.exponent == 0.0:
            return {}
        self._latest = share_rows(released, self._geometries(released))
        return {} if self.shapes == "step" else dict(self._latest)

    def precondition(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns what the optimizer gets instead of released gradients: A^-2 g, unless the noise alone is shaped."""
        shapes = {} if self.shapes == "noise" else self._latest
        return {
            name: shapes[name].whiten(shapes[name].whiten(gradient)) if name in shapes else gradient
            for name, gradient in gradients.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the settings, and the geometry of coming steps; images and labels are drawn anew from the seed."""
        latest = {} if self.shapes == "noise" else {name: each.state() for name, each in self._latest.items()}
        return {"settings": self._settings(), "latest": latest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` returned, from a Prior of the same settings and inputs."""
        same_settings(self._settings(), state.get("settings"))
        self._latest = {name: Geometry.from_state(each) for name, each in state["latest"].items()}

    def _settings(self) -> dict[str, Any]:
        return {**settings(self), "inputs": _digest(self._inputs)}

    def _geometries(self, released: Released) -> dict[str, Geometry]:
        blocks = {block.name: block for block in released.blocks}
        names = self._load(blocks)
        like = next(iter(blocks.values())).value
        random = Generator(like.device).manual_seed(_mixed(self.seed, released.step))
        inputs = self._drawn(random).to(like.device)
        inputs = inputs.to(like.dtype) if inputs.is_floating_point() else inputs
        found = of_batch(self._twin, names, inputs, self._loss, random).found
        geometries = {}
        for name, moments in found.items():
            block, factors = blocks[name], {}
            if self.side != "right" and moments.rows is not None:
                factors["left"] = self._factor(moments.rows, block)
            if self.side != "left" and moments.columns is not None:
                factors["right"] = self._factor(moments.columns, block)
            geometries[name] = Geometry(tuple(block.value.shape), **factors)
        return geometries

    def _load(self, blocks: Mapping[str, Block]) -> dict[int, str]:
        """Gives the twin the released weights, and returns the names of those that have rows and columns."""
        device = next(iter(blocks.values())).value.device
        parameters = dict(self._twin.to(device).named_parameters())
        for name, block in blocks.items():
            if name not in parameters or parameters[name].shape != block.value.shape:
                raise ValueError(f"guidance 'prior' was made for another network: it has no parameter like {name!r}")
            parameters[name].copy_(block.value)
        return {id(parameters[name]): name for name, block in blocks.items() if block.has_matrix}

    def _drawn(self, random: Generator) -> Tensor:
        if isinstance(self._inputs, Tensor):
            return self._inputs
        return PROCESSES[self.process](self.examples, self._inputs, random)

    def _factor(self, moment: Tensor, block: Block) -> Factor:
        wanted = moment.to(torch.promote_types(block.value.dtype, torch.float32))
        if not bool(wanted.isfinite().all()):
            raise ValueError(f"block {block.name!r}: a layer's values are NaN or infinite: the training has diverged")
        if len(wanted) <= max(self.exact_up_to, self.components):
            found = spectra.of_symmetric(wanted, block.name)
        else:
            found = _leading(wanted, block.name, self.components)
        return spectra.factors([found], self.exponent, self.floor)[0]


def _leading(moment: Tensor, name: str, components: int) -> spectra.Spectrum:
    """Returns the leading directions of a large moment: those of its square, M M^T, whose values are squared too."""
    ((squared, _),) = spectra.Search([spectra.Wanted(moment, name, components)]).results()
    values, total = squared.values.sqrt(), float(moment.trace())
    rest = max(total - float(values.sum()), 0.0) / (len(moment) - components)
    return replace(squared, values=values, total=float(values.sum()) + rest * (len(moment) - components), rest=rest)


def _checked(inputs: Sequence[int] | Tensor) -> Tensor | tuple[int, int, int]:
    if isinstance(inputs, Tensor):
        if inputs.dim() < 2 or not len(inputs):
            raise ValueError(f"inputs must have one public example in each row, got shape {tuple(inputs.shape)}")
        return inputs.detach().clone()
    shape = tuple(int(size) for size in inputs)
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(
            f"inputs must be the shape of one image, (channels, height, width), or public inputs, a tensor; got {shape}"
        )
    return shape


def _digest(inputs: Tensor | tuple[int, int, int]) -> Any:
    if isinstance(inputs, Tensor):
        held = inputs.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return hashlib.blake2b(held, digest_size=16).hexdigest()
    return list(inputs)


def _mixed(seed: int, step: int) -> int:
    """Returns another number for each seed and step."""
    return int.from_bytes(hashlib.blake2b(f"prior {seed} {step}".encode(), digest_size=7).digest())
