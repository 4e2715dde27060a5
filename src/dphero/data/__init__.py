"""Real data: public sets with checksums, and data of your own.

The way through the modules: ``catalog`` (what there is, with checksums), ``layouts`` (files in any layout become the
published bytes), ``sources`` (mirror and packages), ``cache`` (where files live, and how they get there whole),
``fetch`` (all of it together: :func:`get`); then ``dataset`` (:class:`Data`), ``own``, ``pictures`` and
``folders`` (arrays, functions, image files) and ``loading`` (:func:`load`). Nothing here knows of noise or of the
engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dphero.data.catalog import BUILT_INS
    from dphero.data.dataset import Data, Split
    from dphero.data.download.cache import directory
    from dphero.data.download.fetch import Got, get
    from dphero.data.files.own import from_arrays
    from dphero.data.loading import load

__all__ = ["BUILT_INS", "Data", "Got", "Split", "directory", "from_arrays", "get", "load"]

_HOMES = {
    "BUILT_INS": "dphero.data.catalog",
    "Data": "dphero.data.dataset",
    "Got": "dphero.data.download.fetch",
    "Split": "dphero.data.dataset",
    "directory": "dphero.data.download.cache",
    "from_arrays": "dphero.data.files.own",
    "get": "dphero.data.download.fetch",
    "load": "dphero.data.loading",
}


def __getattr__(name: str) -> Any:
    """Import public names when they are first used: listing and fetching need no torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dphero.data' has no attribute {name!r}")
