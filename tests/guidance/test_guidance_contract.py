"""The contract: released things in, geometry out."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
import torch

from dphero.geometry.diagonal import Scalar
from dphero.geometry.geometry import identity
from dphero.guidance import PCA, Block, Guidance, History, Isotropic, Released, resolve
from dphero.guidance.base import share_rows


@pytest.mark.parametrize("name, kind", [("isotropic", Isotropic), ("pca", PCA), ("history", History)])
def test_names_resolve(name: str, kind: type) -> None:
    guidance = resolve(name)
    assert isinstance(guidance, kind) and isinstance(guidance, Guidance)
    assert guidance.refresh_every >= 1
    assert guidance.needs_gradients == (kind is History)
    assert resolve(guidance) is guidance


def test_unknown_guidance_lists_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'pac'.*'isotropic', 'pca', 'history'"):
        resolve("pac")
    with pytest.raises(TypeError, match="Guidance object"):
        resolve(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Guidance object"):
        resolve(PCA)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Isotropic, PCA, History])
def test_a_guidance_can_be_given_nothing_but_released_things(kind: type) -> None:
    for method in ("geometry", "observe"):
        parameters = inspect.signature(getattr(kind, method)).parameters
        assert list(parameters) == ["self", "released"]
    assert {f.name for f in fields(Released)} == {"step", "blocks", "noise_scale"}
    assert {f.name for f in fields(Block)} == {
        "name", "value", "shares", "features", "plain", "gradient", "geometry",
    }  # fmt: skip


def test_blocks_are_cut_from_the_graph_and_checked() -> None:
    value = torch.ones(2, 3, requires_grad=True)
    block = Block("w", value * 2, gradient=value * 3)
    assert not block.value.requires_grad and block.gradient is not None and not block.gradient.requires_grad
    with pytest.raises(ValueError, match=r"'w'.*gradient"):
        Block("w", torch.ones(2, 3), gradient=torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"'w'.*geometry"):
        Block("w", torch.ones(2, 3), geometry=identity((3,)))
    with pytest.raises(ValueError, match="features"):
        Block("w", torch.ones(2, 3), features="depth")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"unique.*'w'"):
        Released(0, (block, block), 1.0)


def test_a_bias_of_another_length_cannot_share() -> None:
    weight, bias = Block("w", torch.ones(4, 3)), Block("b", torch.ones(5), shares="w")
    left = {"w": identity((4, 3)).scaled(2.0)}
    assert isinstance(left["w"].left, Scalar)
    with pytest.raises(ValueError, match=r"'b'.*4 rows"):
        share_rows(Released(0, (weight, bias), 1.0), left)


def test_isotropic_says_nothing_and_keeps_nothing() -> None:
    guidance = Isotropic()
    assert guidance.geometry(Released(0, (Block("w", torch.ones(2, 2)),), 1.0)) == {}
    guidance.load_state_dict(guidance.state_dict())
    with pytest.raises(ValueError, match="another guidance"):
        guidance.load_state_dict({"a": 1})
