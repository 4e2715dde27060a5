"""One call of one hooked module: its layer rule computes the output, which is tapped here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dphero.batch_axis.axis import BatchAxis, arrange
from dphero.functional.dispatch import attached
from dphero.functional.unbatched import LayerOrigin, Unbatched, UnbatchedTensor, plain
from dphero.gradients.batch import PieceMaker
from dphero.gradients.piece import Piece
from dphero.hooks.modules import HookedModule
from dphero.numerics.precision import widened

if TYPE_CHECKING:
    from dphero.hooks.taps import Taps


class TappedCall:
    """What a layer rule works with (:class:`~dphero.layers.call.LayerCall`)."""

    def __init__(self, taps: Taps, hooked: HookedModule) -> None:
        self._taps, self._hooked = taps, hooked
        self.module, self.parameters, self.original = hooked.module, hooked.parameters, hooked.original
        self.memory, self.holding, self.paused = hooked.memory, hooked.holding, taps.paused

    @property
    def label(self) -> str:
        """Name and type of the module, for messages."""
        return self._hooked.label

    def __getitem__(self, name: str) -> Tensor:
        parameter = self.parameters.get(name, self.module._parameters.get(name))
        assert parameter is not None, f"{self.label} has no parameter {name!r}"
        return parameter.detach()

    def get(self, name: str) -> Tensor | None:
        """Return the detached parameter, or ``None`` where the module has none of that name."""
        return None if self.module._parameters.get(name) is None else self[name]

    def wants(self, name: str) -> bool:
        """Tell whether the gradient of this parameter is asked for."""
        return name in self._hooked.names

    def tap(
        self, compute: Callable[[], Tensor], make: PieceMaker, *saved: Any, role: str = "", split: bool = False
    ) -> Tensor:
        """See :meth:`dphero.layers.call.LayerCall.tap`."""
        taps, hooked, out = self._taps, self._hooked, compute()
        if not torch.is_grad_enabled():
            return out
        saved = tuple(map(plain, saved))
        inputs = [value for value in saved if isinstance(value, Tensor)]
        layouts = taps.axis_lookup.layouts(taps.key(hooked.path, role), [plain(out)], inputs, taps.rows, hooked.label)
        if layouts[0].unbatched:
            return self._tap_unbatched(out, make, saved, split)
        if taps.tape is None or isinstance(out, UnbatchedTensor):
            return plain(out)
        out = attached(out, inputs)
        taps.watch(out, layouts, make, saved, hooked.label, names=hooked.names, split=split)
        return out

    def _tap_unbatched(self, out: Tensor, make: PieceMaker, saved: tuple[Any, ...], split: bool) -> Tensor:
        """Tap an output that is the same for all examples: its gradient is taken where it joins the batch."""
        taps, hooked = self._taps, self._hooked
        rows = 1 if split or out.dim() < 2 else out.shape[0]  # the layer takes them for a batch
        kept = [value.detach() if isinstance(value, Tensor) else value for value in saved]

        def pieces(gradients: Tensor) -> dict[str, Piece]:
            spread = [BatchAxis(None).split(x, len(gradients)) if isinstance(x, Tensor) else x for x in kept]
            values = [*map(widened, arrange([gradients, *spread], [BatchAxis(0)] * (1 + len(spread))))]
            if not split and out.dim() > 1:
                values = [value.flatten(0, 1) if isinstance(value, Tensor) else value for value in values]
            found = {local: piece.folded(rows) for local, piece in make(*values).items()}
            return {hooked.names[local]: piece for local, piece in found.items() if local in hooked.names}

        origin = LayerOrigin(out, list(hooked.names.values()), pieces, taps, hooked.label)
        return UnbatchedTensor.wrap(Unbatched(origin.leaf, [origin], taps), taps, hooked.path, hooked.label)
