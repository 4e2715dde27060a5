"""A recipe: everything that decides what a training run does, under the names of the command line.

Recipes are plain values: they are written to and read from TOML, laid over one another (defaults, a file, the
command line), and kept beside every run.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from typing import Any, Literal, get_args

from dphero._checks import closest, one_of, positive, whole, whole_or_auto
from dphero._files import read_bytes
from dphero._imports import names_code

Optimizer = Literal["sgd", "adam"]
_LEAST, _MOST = 1e-12, 1e12  # beyond, float32 has no digits left for what is computed with them


@dataclass(frozen=True)
class Recipe:
    """What a training run does.

    Attributes:
        data: A built-in data set, ``package:function``, a folder of class-named folders, or an ``.npz`` file.
        channels: Of the images in a folder: 3 (RGB) or 1 (grey), a public number; ``None`` is 3.
        model: A built-in network or ``package:function``.
        method: One of ``dphero methods``.
        epsilon: The privacy loss allowed; or
        noise_multiplier: the noise, whose price then follows.
        delta: δ.
        lot: B, the expected number of examples in a step.
        epochs: Length of the training, in passes over the data.
        lr: Learning rate.
        momentum: Of the optimizer ``sgd``.
        optimizer: ``sgd`` or ``adam``.
        clip: C, the clip norm.
        clipping: How gradients are clipped; ``None`` leaves it to the method.
        guidance: What shapes the noise; ``None`` leaves it to the method.
        mechanism: ``ellipsoid`` or ``ball``; ``None`` leaves it to the method.
        accountant: How the ledger is priced.
        dataset_size: A public number of records, or ``"public"``: the number of records is no secret.
        physical_batch: The most examples per forward pass; ``"auto"`` for as many as fit, ``None`` for whole lots.
        evaluate_every: Steps between evaluations; ``None`` for one after every pass over the data.
        keep_epochs: Passes over the data after which the weights are kept for ``dphero explain``; 0 for those at the
            beginning, parts of a pass such as 0.1 are allowed.
        seed: Makes the run repeatable, and must stay secret for the guarantee to hold; ``None`` draws fresh
            randomness.
        secure: Draw noise and lots from a cryptographic generator.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:1``.
        cuda_graphs: Record the network's passes on the GPU once and replay them; ``None``: where it pays.
        views: How many views of each image there are in a step, whose gradients are averaged before clipping; ``None``
            for the image as it is.
        augment: How views differ: ``crop``, ``flip`` or ``crop-flip``; ``None`` is ``crop`` for one channel and
            ``crop-flip`` for more.
        averaging: Release a mean of the weights over the steps, ``late`` or ``ema``; ``None`` for the last ones.
        options: Settings of the method alone, by name.
    """

    data: str
    model: str
    method: str = "dp-hero"
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    lot: int = 256
    epochs: float = 10.0
    lr: float = 0.1
    momentum: float = 0.0
    optimizer: Optimizer = "sgd"
    clip: float = 1.0
    clipping: str | None = None
    guidance: str | None = None
    mechanism: str | None = None
    accountant: str = "pld"
    dataset_size: int | Literal["public"] | None = None
    physical_batch: int | Literal["auto"] | None = None
    evaluate_every: int | None = None
    keep_epochs: tuple[float, ...] | None = None
    seed: int | None = None
    secure: bool = False
    device: str = "auto"
    cuda_graphs: bool | None = None
    channels: int | None = None
    views: int | None = None
    augment: str | None = None
    averaging: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("epsilon", "noise_multiplier"):
            if getattr(self, name) is not None:
                positive(name, getattr(self, name))
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise ValueError(
                f"epsilon {self.epsilon:g} and noise_multiplier {self.noise_multiplier:g} are both given: one follows "
                "from the other, leave one out"
            )
        for name in ("epochs", "lr", "clip"):
            if not _LEAST <= positive(name, getattr(self, name)) <= _MOST:
                raise ValueError(f"{name} must lie between {_LEAST:g} and {_MOST:g}, got {getattr(self, name):g}")
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must lie between 0 and 1, got {self.delta:g}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, got {self.momentum:g}")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be a whole number from 0 to 2**64 - 1, got {self.seed}")
        whole("lot", self.lot)
        one_of("optimizer", self.optimizer, get_args(Optimizer))
        whole_or_auto("physical_batch", self.physical_batch)
        for name in ("evaluate_every", "views"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name))
        if self.mechanism == "published":
            raise ValueError(
                "mechanism 'published' is UNSOUND AS PUBLISHED, and is a method of its own: to study it, use "
                "--method dp-hero-published --noise-multiplier 1; to train, leave --mechanism out"
            )
        if self.channels is not None:
            one_of("channels", self.channels, (1, 3))
        if self.augment is not None:
            one_of("augment", self.augment, ("crop", "crop-flip", "flip"))
            if self.views is None:
                raise ValueError(f"augment {self.augment!r} says how views differ: give --views K with it")
        if self.averaging is not None:
            one_of("averaging", self.averaging, ("late", "ema"))
        for epoch in self.keep_epochs or ():
            if not 0 <= epoch <= self.epochs:
                raise ValueError(
                    f"keep_epochs: {epoch:g} is not within the training, which takes {self.epochs:g} epochs"
                )

    def with_(self, **changes: Any) -> Recipe:
        """Return the recipe with some fields changed."""
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields that are set, as plain values."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values["options"] = dict(self.options)
        return {name: value for name, value in values.items() if value is not None and value != {}}

    def to_toml(self) -> str:
        """Return the recipe as TOML; :func:`load` reads it."""
        values = self.as_dict()
        options = values.pop("options", {})
        lines = [f"{name} = {_toml(value)}" for name, value in values.items()]
        if options:
            lines += ["", "[options]", *(f"{name} = {_toml(value)}" for name, value in options.items())]
        return "\n".join(lines) + "\n"


def load(path: str | PathLike[str]) -> dict[str, Any]:
    """Read the fields that a TOML file sets.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is not TOML, or names a field that recipes do not have.
    """
    return parse(read_bytes(path), path)


def parse(contents: bytes, path: str | PathLike[str]) -> dict[str, Any]:
    """Return the fields that the contents of a TOML file set; errors as :func:`load`, which name the file."""
    try:
        values = tomllib.loads(contents.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    _require_known(values, str(path))
    return values


def require_trust(
    settings: Mapping[str, Any], where: str | PathLike[str], trust: bool, *, instead: Mapping[str, Any] | None = None
) -> None:
    """Refuse settings that name code, ``package.module:function``, and come from a file that nobody vouched for.

    Whoever writes such a name on the command line, or in a program, knows what he runs. A file may come from a
    stranger: the module that it names, looked for in the working directory too, would be imported and run.

    Args:
        settings: Of a recipe.
        where: The file.
        trust: Whether the user vouches for it.
        instead: Settings that are laid over those of the file, and do not come from one.

    Raises:
        ValueError: If code is named and not trusted.
    """
    hidden = instead or {}
    left = {name: value for name, value in settings.items() if name == "options" or name not in hidden}
    if not trust and (named := code_named(left)):
        raise ValueError(
            f"{where} names code, which would be imported and run: {', '.join(named)}. If you trust whoever wrote that "
            "file and the code, say so with --trust (in Python: trust=True)"
        )


def code_named(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that name code, each as ``name 'package.module:function'``."""
    flat = [(name, value) for name, value in settings.items() if name != "options"]
    options = settings.get("options", {})
    flat += [(f"option {name}", value) for name, value in options.items()] if isinstance(options, Mapping) else []
    return [
        f"{name} {each!r}"
        for name, value in flat
        for each in (value if isinstance(value, list | tuple) else [value])
        if names_code(each)
    ]


def merge(*layers: Mapping[str, Any]) -> Recipe:
    """Lay settings over one another, later ones on top, and return the recipe.

    Options are merged by name. Whoever sets ``epsilon`` removes a ``noise_multiplier`` from below, and the other way.

    Raises:
        ValueError: If a name is unknown, a value has the wrong type or range, or data or model are missing.
    """
    values: dict[str, Any] = {}
    for layer in layers:
        _require_known(layer, "the recipe")
        if "epsilon" in layer and "noise_multiplier" not in layer:
            values.pop("noise_multiplier", None)
        if "noise_multiplier" in layer and "epsilon" not in layer:
            values.pop("epsilon", None)
        given = _typed("options", layer.get("options", {}))
        options = {**values.get("options", {}), **given}
        values |= layer
        values["options"] = options
    for name in ("data", "model"):
        if name not in values:
            raise ValueError(f'the recipe does not say which {name} to use: give --{name}, or {name} = "…" in its file')
    return Recipe(**{name: _typed(name, value) for name, value in values.items()})


_NUMBERS = ("epsilon", "noise_multiplier", "delta", "epochs", "lr", "momentum", "clip")
_WHOLE = ("lot", "evaluate_every", "seed", "channels", "views")
_TEXTS = (
    "data",
    "model",
    "method",
    "optimizer",
    "clipping",
    "guidance",
    "mechanism",
    "accountant",
    "device",
    "augment",
    "averaging",
)


def _typed(name: str, value: Any) -> Any:
    """Return the value as the field's type, or say what it should be."""
    if value is None or name == "dataset_size":
        if value not in (None, "public") and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f'dataset_size must be a whole number or "public", got {value!r}')
        return value
    if name == "physical_batch":
        whole_or_auto(name, value)
        return value
    if name in _NUMBERS:
        return _number(name, value)
    if name == "keep_epochs":
        if not isinstance(value, list | tuple):
            raise ValueError(f"keep_epochs must be a list of numbers of epochs, got {value!r}")
        return tuple(_number("each of keep_epochs", each) for each in value) or None
    kinds: dict[str, tuple[type, str]] = {
        **dict.fromkeys(_WHOLE, (int, "a whole number")),
        **dict.fromkeys(_TEXTS, (str, "text")),
        **dict.fromkeys(("secure", "cuda_graphs"), (bool, "true or false")),
        "options": (Mapping, "a table"),
    }
    kind, words = kinds[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} must be {words}, got {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def _require_known(values: Mapping[str, Any], where: str) -> None:
    known = [each.name for each in fields(Recipe)]
    for name in values:
        if name not in known:
            hint = closest(name, known, f"a recipe has {', '.join(known)}")
            raise ValueError(f"{where} sets {name!r}, which is unknown; {hint}")


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int | float):
        return repr(value)
    raise ValueError(f"a recipe holds numbers, text and lists of them, got {value!r}")
