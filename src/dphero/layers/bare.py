"""Any module that owns parameters and has no rule of its own: its code is followed as it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dphero.pieces import Piece
from dphero.shared import Origin, Shared

if TYPE_CHECKING:
    from dphero.taps import Call

__all__ = ["bare"]


def bare(call: Call, *args: Any, **kwargs: Any) -> Any:
    """Run the module's own ``forward`` with its parameters replaced by shared values."""
    site, taps = call.site, call.taps
    tape = taps.tape
    parameters = site.module._parameters
    before = dict(parameters)
    if tape is not None:
        tape.expect(site.names.values(), several=True)
    for local, parameter in before.items():
        if parameter is None:
            continue
        if local not in site.names:
            parameters[local] = parameter.detach()  # type: ignore[assignment]
            continue

        def sink(piece: Piece, name: str = site.names[local]) -> None:
            assert tape is not None
            tape.deliver(name, piece)

        shared = Shared.wrap(Origin.of_parameter(parameter, sink), taps, site)
        parameters[local] = shared  # type: ignore[assignment]
    try:
        return site.original(*args, **kwargs)
    finally:
        parameters.update(before)
