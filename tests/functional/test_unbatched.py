"""Parameters that the model's own code uses: followed to where they meet the batch, whatever the operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dphero.batch_axis.axis import BatchAxis, compare_shapes
from dphero.functional import dispatch as meetings
from dphero.functional import rules as readings
from dphero.functional import unbatched as shared
from dphero.functional.vmap import vmapped
from tests.oracle.micro_batches import Tapped, check
from tests.oracle.zoo import Lambda, sequences


def loss(module: nn.Module, *inputs: Tensor) -> Tensor:
    out = module(*inputs).flatten(1)
    return torch.sin(out * torch.arange(1.0, out.shape[1] + 1, dtype=out.dtype).cos()).sum(1).mean()


def follow(function: Callable[..., Tensor], x: Tensor, **parameters: Tensor) -> None:
    """Check a model of one layer before, and one operation on parameters."""
    torch.manual_seed(0)

    def forward(self: Any, x: Tensor) -> Tensor:
        return function(self, self.before(x))

    model = Lambda(forward, before=nn.Linear(x.shape[-1], x.shape[-1]), **parameters)
    check(model.double(), (x.double(),), loss, tolerance=1e-8)


A, B, S, M, W = torch.randn(8), torch.rand(8) + 0.5, torch.tensor(0.7), torch.randn(6, 8), torch.randn(8, 8)

ELEMENTWISE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "add": lambda self, x: x + self.a + self.m,
    "radd": lambda self, x: self.a + x,
    "sub": lambda self, x: torch.sub(x, self.a, alpha=2) - self.m,
    "rsub": lambda self, x: self.a - x,
    "mul": lambda self, x: self.s * (x * self.a),
    "div": lambda self, x: x / self.b + self.a / (x.abs() + 1),
    "pow": lambda self, x: (x.abs() + 0.1) ** self.b + self.b ** x.tanh(),
    "maximum": lambda self, x: torch.maximum(x, self.a) + torch.minimum(self.m, x),
    "where": lambda self, x: torch.where(x > 0, x, self.a) + torch.where(x > 1, self.m, x * self.s),
    "lerp": lambda self, x: torch.lerp(x, self.a, self.b),
    "addcmul": lambda self, x: torch.addcmul(self.m, x, self.a) + x.addcdiv(self.a, self.b),
    "clamp": lambda self, x: x.clamp(min=-self.b, max=self.b),
    "in place": lambda self, x: (x * 1).add_(self.a).mul_(self.b),
    "augmented": lambda self, x: augmented(self, x),
    "expand": lambda self, x: torch.cat([self.a.expand(len(x), 1, -1), x, self.m.expand_as(x)], 1),
    "repeat": lambda self, x: torch.cat([self.m.repeat(len(x), 2, 1), self.a.repeat((len(x), 1, 1)), x], 1),
    "broadcast_to": lambda self, x: torch.broadcast_to(self.m, x.shape) * self.s.broadcast_to(x.shape) + x,
}


def augmented(self: Any, x: Tensor) -> Tensor:
    x = x * 1
    x += self.a
    x *= self.m
    x -= self.s
    x /= self.b
    return x


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name: str) -> None:
    follow(ELEMENTWISE[name], sequences(4), a=A, b=B, s=S, m=M)


PRODUCTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linear": lambda self, x: F.linear(x, self.w, self.a),
    "linear, only bias": lambda self, x: F.linear(x, self.w.detach(), self.a),
    "linear by name": lambda self, x: F.linear(x, weight=self.w, bias=self.a),
    "matmul": lambda self, x: x @ self.w + x.matmul(self.w.T) + torch.matmul(x, self.m.T).sum(-1, keepdim=True),
    "from the left": lambda self, x: self.w[:6, :6] @ x + torch.matmul(self.w[0, :6], x).unsqueeze(1),
    "vector": lambda self, x: x @ self.a,
    "folded": lambda self, x: (
        torch.mm(x.reshape(-1, 8), self.w).view(x.shape) + torch.addmm(self.a, x.reshape(-1, 8), self.w).view(x.shape)
    ),
    "addmm with factors": lambda self, x: torch.addmm(self.a, x[:, 0], self.w, beta=0.5, alpha=2.0),
    "columns": lambda self, x: (self.w @ x[:, 0].T).T,
    "einsum": lambda self, x: torch.einsum("ntd,de,e->nte", x, self.w, self.a),
    "bmm": lambda self, x: torch.bmm(x, self.w.expand(len(x), -1, -1)),
    "baddbmm": lambda self, x: torch.baddbmm(self.m, x, self.w.expand(len(x), -1, -1)),
    "tensordot": lambda self, x: torch.tensordot(x, self.w, dims=([2], [1])),
    "attention": lambda self, x: F.scaled_dot_product_attention(self.m.expand(len(x), -1, -1), x @ self.w, x),
    "twice": lambda self, x: torch.tanh(x @ self.w) @ self.w + x @ self.w.T,
    "time in front": lambda self, x: (x.transpose(0, 1) @ self.w + self.a).transpose(0, 1),
    "bilinear": lambda self, x: F.bilinear(x[:, 0], x[:, 1], self.cube, self.a[:2]),
    "distance": lambda self, x: torch.cdist(x, self.m.expand(len(x), -1, -1)),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_products(name: str) -> None:
    follow(PRODUCTS[name], sequences(4), a=A, m=M, w=W, cube=torch.randn(2, 8, 8))


SHARED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "arithmetic": lambda self, x: x * torch.softmax(self.a.exp() / self.b.sum(), 0).sqrt(),
    "pieces": lambda self, x: sum(
        x * part.sum() for part in (*self.m.chunk(2), *self.m.split([4, 2]), *self.m.unbind())
    ),
    "largest": lambda self, x: x * self.m.max(0).values + self.m.topk(3, 0).values.sum(),
    "joined": lambda self, x: x @ torch.cat([self.m, torch.stack([self.a, self.b])]),
    "sliced": lambda self, x: x[..., :4] * self.a[:4] + self.m[1, 4:] + self.m[::2, None].sum((0, 1))[:4],
    "statistics": lambda self, x: x * (self.m - self.m.mean(0)).std() + torch.linalg.norm(self.m),
    "shapes": lambda self, x: (
        x * self.m.new_ones(self.m.shape[1]) * self.m.numel() * float(self.a.dtype.is_floating_point) + self.a
    ),
    "in place on a copy": lambda self, x: x * self.a.clone().mul_(2).clamp_(min=-1),
    "in place with another": lambda self, x: x * self.a.clone().add_(self.b),
    "written into a copy": lambda self, x: x * written(self.a.clone()),
    "detached": lambda self, x: x * self.a.detach() * self.b.data + self.m * self.s.item(),
    "no gradient": lambda self, x: x * unseen(self.a) + self.b,
    "selected": lambda self, x: x * self.a[self.a > 0].sum() + self.b.masked_select(self.a < 0).sum(),
    "ordered": lambda self, x: x * self.a.sort().values + self.b.cumprod(0) + torch.fft.rfft(self.a).abs().sum(),
    "mask": lambda self, x: x * (self.a > 0) * (self.a.abs() + 1),
    "solved": lambda self, x: solved(self, x),
    "type": lambda self, x: x * self.a.float().to(x) + self.b.type_as(x),
}


def solved(self: Any, x: Tensor) -> Tensor:
    square = self.w @ self.w.T + torch.eye(8).to(x)
    singular = torch.linalg.svdvals(self.w)
    return x * torch.linalg.inv(square).sum(0) + torch.linalg.cholesky(square).sum(1) + torch.logdet(square) + singular


def written(copy: Tensor) -> Tensor:
    copy[2:4] = copy[:2]
    return copy


@torch.no_grad()
def unseen(value: Tensor) -> Tensor:
    return value * 2


@pytest.mark.parametrize("name", SHARED)
def test_operations_among_parameters(name: str) -> None:
    follow(SHARED[name], sequences(4), a=A, b=B, s=S, m=M, w=W)


IMAGES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "conv": lambda self, x: F.conv2d(x, self.k / self.k.norm(), self.c, padding=1),
    "conv same": lambda self, x: F.conv2d(x, self.k, padding="same"),
    "conv folded": lambda self, x: F.conv1d(x.flatten(0, 1), self.row, self.c).view(len(x), -1),
    "transposed": lambda self, x: F.conv_transpose2d(x, self.k, stride=2),
    "group norm": lambda self, x: F.group_norm(x, 1, self.c, self.d),
    "instance norm": lambda self, x: F.instance_norm(x, weight=self.c, bias=self.d),
    "layer norm": lambda self, x: F.layer_norm(x, x.shape[-1:], self.e, None) + F.layer_norm(x, (5,), bias=self.e),
    "rms norm": lambda self, x: F.rms_norm(x, (5,), self.e, eps=1e-5),
    "prelu": lambda self, x: F.prelu(x, self.c) + F.prelu(x, self.c[:1]),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images(name: str) -> None:
    parameters = {"k": torch.randn(3, 3, 3, 3), "row": torch.randn(3, 4, 2), "e": torch.randn(5)}
    parameters |= {"c": torch.randn(3), "d": torch.randn(3)}
    follow(IMAGES[name], torch.randn(4, 3, 4, 5), **parameters)


LOOK_UPS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "embedding": lambda self, i: F.embedding(i, self.table, padding_idx=-2),
    "item": lambda self, i: self.table[i - 11],
    "item of three axes": lambda self, i: self.cube[:, i].transpose(0, 1),
    "index_select": lambda self, i: torch.stack([self.table.index_select(0, row) for row in i.unbind(1)], 1),
    "gather": lambda self, i: self.table.gather(0, i),
    "one hot": lambda self, i: F.one_hot(i, 11).to(self.table) @ self.table,
}


@pytest.mark.parametrize("name", LOOK_UPS)
def test_look_ups(name: str) -> None:
    model = Lambda(LOOK_UPS[name], table=torch.randn(11, 8), cube=torch.randn(2, 11, 3)).double()
    check(model, (torch.randint(0, 11, (4, 6)),), loss, tolerance=1e-8)


FAST = {
    "linear": lambda self, x: F.linear(x, self.w, self.a),
    "tied": lambda self, x: F.embedding(x.argmax(-1), self.w, padding_idx=1) @ self.w.T,
    "item": lambda self, x: self.w[x.argmax(-1)],
    "matmul": lambda self, x: x @ self.w + self.w[:6, :6] @ x,
    "addmm": lambda self, x: torch.addmm(self.a, x.view(-1, 8), self.w).view(x.shape),
    "conv": lambda self, x: F.conv1d(x, self.m[None] / self.m.norm(), self.a[:1], padding=2),
    "norms": lambda self, x: F.layer_norm(x, (8,), self.a, self.b) + F.rms_norm(x, (8,), self.b),
}


@pytest.mark.parametrize("name", FAST)
def test_common_operations_need_no_second_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings, "example_gradients", None)
    follow(FAST[name], sequences(4), a=A, b=B, m=M, w=W)


@pytest.mark.parametrize("rows", [2, 3, 5, 7, 10])
@pytest.mark.parametrize("width", [5, 7, 10, 14, 35])
def test_sizes_that_look_like_the_batch(rows: int, width: int) -> None:
    """Widths of 5 and 7 are those at which a model is examined, 10, 14 and 35 their multiples."""

    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.w - self.w.mean(0)
        return F.linear(x + self.embedding(torch.arange(width)).sum(0), weight * self.gain) + self.bias

    model = Lambda(forward, w=torch.randn(width, width), gain=torch.randn(width), bias=torch.randn(width))
    model.embedding = nn.Embedding(width, width)
    check(model.double(), (torch.randn(rows, width),), loss, tolerance=1e-8)


def test_parameters_of_other_modules_and_other_methods() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.linear = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

        def encode(self, x: Tensor) -> Tensor:
            return self.linear(x) @ self.weight

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.inner.encode(x) @ self.inner.linear.weight + self.tables["a"] * self.inner.weight.sum()

    model = Lambda(forward, inner=Inner(), tables=nn.ParameterDict({"a": torch.randn(8)}))
    check(model.double(), (sequences(4).double(),), loss, tolerance=1e-8)


def in_place(self: Any, x: Tensor) -> Tensor:
    """What a layer gives for positions is changed before examples meet it (DeBERTa, Swin v2)."""
    positions = self.layer(torch.linspace(0, 1, 8 * x.shape[1], dtype=x.dtype).reshape(x.shape[1], 8))
    scaled = self.layer(torch.ones(x.shape[1], 8, dtype=x.dtype)).T
    scaled /= 3
    scaled += positions.T
    return x + F.relu(positions, inplace=True) + positions + scaled.T


def masked(self: Any, x: Tensor) -> Tensor:
    x = x * 1
    x[:, 1] = self.a
    x[torch.arange(x.shape[1]).expand(len(x), -1) % 3 == 2] = self.a
    return x


def folded_heads(self: Any, x: Tensor) -> Tensor:
    heads = x.unflatten(2, (2, 4)).transpose(1, 2).flatten(0, 1)  # (examples · heads, positions, width)
    positions = self.m.unflatten(1, (2, 4)).transpose(0, 1)  # (heads, positions, width)
    return torch.bmm(heads, positions.repeat(len(x), 1, 1).transpose(1, 2)).unflatten(0, (len(x), 2)).flatten(1)


def biased_attention(self: Any, x: Tensor) -> Tensor:
    heads = x.unflatten(2, (2, 4)).transpose(1, 2)
    bias = (self.m @ self.m.T).expand(1, 2, 6, 6)
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias)


@pytest.mark.parametrize("function", [in_place, masked, folded_heads, biased_attention])
def test_what_popular_models_do(function: Callable[[Any, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meetings._FollowedCall, "_example_by_example", None)  # it needs no second pass
    follow(function, sequences(), a=A, m=M, layer=nn.Linear(8, 8))


def test_attention_with_dropout_and_a_bias_that_all_examples_share() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=self.bias, dropout_p=0.5 if self.training else 0.0)

    model = Lambda(forward, bias=torch.randn(1, 6, 6))
    with Tapped(model, 5) as found:
        torch.manual_seed(1)
        loss(model, sequences()).backward()
    assert found.found[0].square_norms["bias"].gt(0).all()


def test_a_module_that_cannot_be_followed_is_recomputed() -> None:
    """Seen by its rule, with layers inside it, inputs by name and arguments that carry no example."""

    def forward(self: Any, x: Tensor, *, mask: Tensor, flip: bool) -> Tensor:
        matrix = torch.zeros(8, 8, dtype=x.dtype)
        matrix[:4] = self.upper
        return self.linear(x @ (matrix.T if flip else matrix)) * mask

    inner = Lambda(forward, upper=torch.randn(4, 8), linear=nn.Linear(8, 8))
    mask = torch.rand(6, 8)
    model = Lambda(
        lambda self, x: self.inner(self.before(x), mask=mask.to(x), flip=True), inner=inner, before=nn.Linear(8, 8)
    )
    check(model.double(), (sequences(6).double(),), loss, tolerance=1e-8)  # as many rows as the mask has
    with Tapped(model, 6) as tapped:
        model(sequences(6).double())
        assert [site.rule is vmapped for site in tapped.taps.hooked_modules if site.module is inner] == [True]


@pytest.mark.parametrize("function", [lambda w: w, lambda w: F.normalize(w, dim=0)], ids=["itself", "computed"])
def test_weights_that_were_changed_before_the_backward_pass_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    model = Lambda(lambda self, x: self.before(x) * function(self.scale), before=nn.Linear(8, 8), scale=torch.rand(8))
    with Tapped(model, 5):
        out = loss(model, sequences(5))
        with torch.no_grad():
            model.scale.mul_(2.0)
        with pytest.raises(RuntimeError, match="changed in place after the model had used it"):
            out.backward()


# -- these tests can fail -------------------------------------------------------------------------------------------


MATMUL = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}


def twice_too_large(*args: Any) -> list[Any] | None:
    found = readings._matmul(*args)
    return found and [
        (value, lambda *t, make=make: shared.Explicit(2 * make(*t).instantiate()), x) for value, make, x in found
    ]


@pytest.mark.parametrize("broken", ["a rule", "the copies", "the way back"])
def test_a_broken_rule_is_found_out(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "a rule":
        for func in MATMUL:
            monkeypatch.setitem(readings._RULES, func, twice_too_large)
    elif broken == "the copies":
        monkeypatch.setattr(
            meetings, "_once_per_example", lambda taps, tape, layout, aligned, value: value.plain.detach()
        )
    else:
        monkeypatch.setattr(shared, "_is_transpose", lambda tensor, leaf: tensor.dim() == 2)
    with pytest.raises((ValueError, RuntimeError, AssertionError)):
        follow(lambda self, x: x @ (2 * self.w) * self.a, sequences(4), w=W, a=A)


# -- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "layout"),
    [
        ((5, 3), (7, 3), BatchAxis(0)),
        ((3, 5), (3, 7), BatchAxis(1)),
        ((20, 3), (28, 3), BatchAxis(0, 4)),
        ((2, 10), (2, 14), BatchAxis(1, 2)),
        ((5, 5), (5, 5), BatchAxis(None)),
        ((), (), BatchAxis(None)),
        ((5, 5), (7, 7), None),
        ((6, 3), (8, 3), None),
        ((5, 3), (7,), None),
        ((5,), (14,), None),
    ],
)
def test_layouts_are_read_off_two_shapes(first: tuple, second: tuple, layout: BatchAxis | None) -> None:
    assert compare_shapes(torch.Size(first), torch.Size(second), 5, 7) == layout


@pytest.mark.parametrize("shape", [(6, 3), (3, 6), (2, 6, 4)])
def test_rows_and_examples_of_a_layout(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    layout = BatchAxis(shape.index(6), 2)
    rows = layout.rows(tensor)
    assert len(rows) == 6
    for i, part in enumerate(layout.split(tensor, 3)):
        assert torch.equal(part, tensor.narrow(layout.axis, 2 * i, 2))
        assert torch.equal(layout.rows(part), rows[2 * i : 2 * i + 2])
