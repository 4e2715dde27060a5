"""Small models of every kind that users bring, each with a batch.

``CASES`` maps a name to a function that returns a model and its inputs, examples in axis 0 of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

Case = tuple[nn.Module, tuple[Tensor, ...]]
CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


def images(n: int = 5, channels: int = 3, size: int = 8) -> Tensor:
    return torch.randn(n, channels, size, size)


def tokens(n: int = 5, length: int = 6, vocabulary: int = 11) -> Tensor:
    return torch.randint(0, vocabulary, (n, length))


def sequences(n: int = 5, length: int = 6, width: int = 8) -> Tensor:
    return torch.randn(n, length, width)


class Lambda(nn.Module):
    """A module made of a function and some children or parameters."""

    def __init__(self, function: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, nn.Parameter(member) if isinstance(member, Tensor) else member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


# -- convolutional networks ----------------------------------------------------------------------------------------


@case
def lenet() -> Case:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 5, padding=2),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 6, 5),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(6 * 9, 12),
        nn.Tanh(),
        nn.Linear(12, 10),
    )
    return model, (images(channels=1, size=14),)


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(2, outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(2, outside)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.GroupNorm(2, outside))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += self.shortcut(x)
        return self.relu(out)


@case
def resnet() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        Residual(4, 4, 1),
        Residual(4, 8, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )
    return model, (images(),)


class StandardisedConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        weight = weight - weight.mean(dim=(1, 2, 3), keepdim=True)
        weight = weight / (weight.std(dim=(1, 2, 3), keepdim=True) + 1e-3)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class WideBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(1, inside), nn.GroupNorm(2, outside)
        self.conv1 = StandardisedConv(inside, outside, 3, stride, 1)
        self.conv2 = StandardisedConv(outside, outside, 3, 1, 1)
        self.shortcut = StandardisedConv(inside, outside, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(x))
        return self.conv2(F.relu(self.norm2(self.conv1(x)))) + self.shortcut(x)


@case
def wide_resnet_with_standardised_weights() -> Case:
    model = nn.Sequential(
        StandardisedConv(3, 5, 3, padding=1),
        WideBlock(5, 10, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(10, 3),
    )
    return model, (images(size=6),)


# -- transformers --------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(out.transpose(1, 2).reshape(n, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, block: nn.Module, repeat: bool = False) -> None:
        super().__init__()
        self.repeat = repeat
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(0.1 * torch.randn(1, 5, 8))
        self.block, self.norm, self.head = block, nn.LayerNorm(8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        token = self.cls_token.repeat(len(x), 1, 1) if self.repeat else self.cls_token.expand(len(x), -1, -1)
        x = torch.cat([token, x], dim=1)
        x += self.positions
        return self.head(self.norm(self.block(x))[:, 0])


@case
def vit() -> Case:
    return VisionTransformer(Block(8, 2)), (images(),)


@case
def vit_with_torch_encoder() -> Case:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return VisionTransformer(layer, repeat=True), (images(),)


class GPT(nn.Module):
    """Positions looked up over an arange; the output layer is the embedding, tied as a module or used directly."""

    def __init__(self, tie: str = "module", vocabulary: int = 11, longest: int = 12) -> None:
        super().__init__()
        self.tie = tie
        self.tokens, self.positions = nn.Embedding(vocabulary, 8), nn.Embedding(longest, 8)
        self.blocks = nn.ModuleList([Block(8, 2, causal=True) for _ in range(2)])
        self.norm = nn.LayerNorm(8)
        if tie == "module":
            self.head = nn.Linear(8, vocabulary, bias=False)
            self.head.weight = self.tokens.weight

    def forward(self, index: Tensor) -> Tensor:
        x = self.tokens(index) + self.positions(torch.arange(index.shape[1], device=index.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.tie == "module":
            return self.head(x)
        return F.linear(x, self.tokens.weight) if self.tie == "linear" else x @ self.tokens.weight.T


@case
def gpt() -> Case:
    return GPT(), (tokens(),)


@case
def gpt_with_as_many_positions_as_examples() -> Case:
    return GPT(), (tokens(6, 6),)


@case
def gpt_tied_by_linear() -> Case:
    return GPT("linear"), (tokens(),)


@case
def gpt_tied_by_matmul() -> Case:
    return GPT("matmul"), (tokens(),)


class Conv1D(nn.Module):
    """GPT-2's linear layer."""

    def __init__(self, outside: int, inside: int) -> None:
        super().__init__()
        self.nf = outside
        self.weight, self.bias = nn.Parameter(torch.randn(inside, outside) / 3), nn.Parameter(torch.zeros(outside))

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


@case
def huggingface_conv1d() -> Case:
    return nn.Sequential(Conv1D(7, 8), nn.GELU(), Conv1D(4, 7)), (sequences(),)


class Relative(nn.Module):
    """A bias for each head and distance (Swin), RMS norm by hand, a gate for each block."""

    def __init__(self, length: int = 6, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.table = nn.Parameter(torch.randn(2 * length - 1, heads))
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :] + length - 1
        self.register_buffer("distance", distance)
        self.qkv, self.gate = nn.Linear(width, 3 * width), nn.Parameter(torch.randn(width))
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.scale
        q, k, v = (part.view(n, length, self.heads, -1).transpose(1, 2) for part in self.qkv(h).chunk(3, -1))
        bias = self.table[self.distance.view(-1)].view(length, length, -1).permute(2, 0, 1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(width) + bias.unsqueeze(0)
        return x + torch.sigmoid(self.gate) * (scores.softmax(-1) @ v).transpose(1, 2).reshape(n, length, width)


@case
def relative_positions() -> Case:
    return Relative(), (sequences(),)


# -- recurrent networks --------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.Module], seq_first: bool = False, **options: Any) -> None:
        super().__init__()
        self.seq_first = seq_first
        self.embedding = nn.Embedding(11, 5, padding_idx=0)
        self.recurrent = kind(5, 4, batch_first=not seq_first, **options)
        width = (options.get("proj_size") or 4) * (2 if options.get("bidirectional") else 1)
        self.head = nn.Linear(width, 3)

    def forward(self, index: Tensor) -> Tensor:
        x = self.embedding(index.T if self.seq_first else index)
        out = self.head(self.recurrent(x)[0])
        return out.transpose(0, 1) if self.seq_first else out


RECURRENT = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "rnn": (nn.RNN, {"nonlinearity": "relu"}),
    "lstm_bidirectional_projected": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "proj_size": 3}),
    "gru_without_bias": (nn.GRU, {"num_layers": 2, "bias": False}),
    "lstm_sequence_first": (nn.LSTM, {"seq_first": True, "bidirectional": True}),
}
for name, (kind, options) in RECURRENT.items():
    CASES[name] = lambda kind=kind, options=options: (Tagger(kind, **options), (tokens(),))
CASES["lstm_sequence_first_square"] = lambda: (Tagger(nn.LSTM, seq_first=True), (tokens(6, 6),))


@case
def cells() -> Case:
    def run(self: Any, x: Tensor) -> Tensor:
        state, hidden, other, outs = None, None, None, []
        for time in range(x.shape[1]):
            state = self.lstm(x[:, time], state)
            hidden, other = self.gru(state[0], hidden), self.rnn(state[1], other)
            outs.append(hidden + other)
        return torch.stack(outs, 1)

    return Lambda(run, lstm=nn.LSTMCell(8, 4), gru=nn.GRUCell(4, 4), rnn=nn.RNNCell(4, 4)), (sequences(),)


@case
def recurrence_by_hand() -> Case:
    def run(self: Any, x: Tensor) -> Tensor:
        state = self.start.expand(len(x), -1)
        for time in range(x.shape[1]):
            state = torch.tanh(x[:, time] @ self.inward.t() + state @ self.across + self.bias)
        return state

    members = {
        "start": torch.randn(4),
        "inward": torch.randn(4, 8),
        "across": torch.randn(4, 4),
        "bias": torch.randn(4),
    }
    return Lambda(run, **members), (sequences(),)


# -- bare parameters ------------------------------------------------------------------------------------------------


@case
def bare_parameters() -> Case:
    def run(self: Any, x: Tensor) -> Tensor:
        x = self.conv(x * self.channels.view(1, -1, 1, 1)) + self.bias.view(-1, 1, 1)
        x = torch.where(x > 0, x, x * self.slope)
        return x.mean((2, 3)) / self.temperature.exp()

    members = {"channels": torch.randn(3), "bias": torch.randn(4), "slope": torch.randn(4, 1, 1)}
    return Lambda(run, conv=nn.Conv2d(3, 4, 3), temperature=torch.tensor(0.3), **members), (images(),)


class LoRA(nn.Module):
    """A frozen linear layer and a low-rank correction, added to the weight or to the output."""

    def __init__(self, inside: int, outside: int, merged: bool) -> None:
        super().__init__()
        self.base, self.merged = nn.Linear(inside, outside), merged
        self.base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, inside)), nn.Parameter(torch.randn(outside, 2))

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return F.linear(x, self.base.weight + 0.5 * self.b @ self.a, self.base.bias)
        return self.base(x) + 0.5 * F.linear(F.linear(x, self.a), self.b)


@case
def lora() -> Case:
    return nn.Sequential(LoRA(8, 6, True), nn.Tanh(), LoRA(6, 4, False)), (sequences(),)


@case
def parameter_lists() -> Case:
    def run(self: Any, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x * self.scales["out"]

    weights = nn.ParameterList([nn.Parameter(torch.randn(8, 8) / 3) for _ in range(2)])
    scales = nn.ParameterDict({"out": nn.Parameter(torch.randn(8))})
    return Lambda(run, weights=weights, scales=scales), (sequences(),)


@case
def operations_without_a_rule() -> Case:
    """Each is differentiated example by example."""

    def run(self: Any, x: Tensor, index: Tensor) -> Tensor:
        h = torch.einsum("ntd,de->nte", x, self.square) + torch.bmm(x, self.square.expand(len(x), -1, -1))
        h = h + F.normalize(self.square, dim=0)[index] + self.cube[0][index]
        attention = (h @ self.query).softmax(1)
        front, back = self.square.chunk(2, dim=1)
        pooled = (h * attention.unsqueeze(-1)).sum(1) @ torch.cat([front + back, front], 1)
        return pooled + torch.cdist(pooled.unsqueeze(1), self.square.unsqueeze(0).expand(len(x), -1, -1)).squeeze(1)

    members = {"square": torch.randn(8, 8), "query": torch.randn(8), "cube": torch.randn(2, 11, 8)}
    return Lambda(run, **members), (sequences(), tokens(vocabulary=8))


@case
def written_in_place() -> Case:
    """A matrix filled in place cannot be followed: the module is recomputed example by example."""

    def run(self: Any, x: Tensor) -> Tensor:
        matrix = torch.zeros(8, 8, dtype=x.dtype)
        rows, columns = torch.tril_indices(8, 8)
        matrix[rows, columns] = self.triangle
        return x @ matrix

    return nn.Sequential(nn.Linear(8, 8), Lambda(run, triangle=torch.randn(36))), (sequences(),)


# -- how parameters and modules are used ----------------------------------------------------------------------------


@case
def called_several_times() -> Case:
    def run(self: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.conv(self.norm(x)))
        return self.linear(self.linear(x.mean((2, 3))))

    model = Lambda(run, conv=nn.Conv2d(3, 3, 3, padding=1), norm=nn.GroupNorm(1, 3), linear=nn.Linear(3, 3))
    return model, (images(),)


@case
def tied_linear_layers() -> Case:
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    model[4].weight, model[4].bias = model[0].weight, model[0].bias
    return model, (sequences(),)


@case
def tied_across_a_followed_module() -> Case:
    def run(self: Any, x: Tensor) -> Tensor:
        matrix = torch.zeros_like(self.matrix)
        matrix[:] = self.matrix
        return self.linear(x @ matrix)

    model = Lambda(run, matrix=torch.randn(8, 8), linear=nn.Linear(8, 8))
    model.linear.weight = model.matrix
    return model, (sequences(),)


@case
def unused_and_frozen() -> Case:
    def run(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.second(self.first(x))
        return self.second(torch.tanh(self.first(x))) - target

    model = Lambda(run, first=nn.Linear(8, 6), second=nn.Linear(6, 4), spare=nn.Linear(3, 3), loose=torch.randn(2))
    model.first.weight.requires_grad_(False)
    model.second.bias.requires_grad_(False)
    return model, (sequences(),)


@case
def folded_into_the_batch() -> Case:
    def run(self: Any, x: Tensor) -> Tensor:
        n, frames, channels, *size = x.shape
        x = self.group(self.conv(x.view(n * frames, channels, *size))).flatten(1)
        x = self.layer(self.linear(x)) * self.scale + self.shift.repeat(n * frames, 1)
        return x.view(n, frames, -1).mean(1)

    model = Lambda(
        run,
        conv=nn.Conv2d(3, 4, 3),
        group=nn.GroupNorm(2, 4),
        linear=nn.Linear(64, 6),
        layer=nn.LayerNorm(6),
        scale=torch.randn(6),
        shift=torch.randn(1, 6),
    )
    return model, (torch.randn(4, 3, 3, 6, 6),)


@case
def layers_on_shared_values() -> Case:
    """Learned queries, prompts and constants pass through layers before they meet the batch."""

    def run(self: Any, x: Tensor) -> Tensor:
        queries = self.norm(self.linear(self.queries))
        picture = self.group(self.conv(self.picture)).flatten(2).mean(2)
        scores = torch.einsum("qd,ntd->nqt", queries, x)
        return (scores.softmax(-1) @ x).sum(1) * picture + self.linear(x[:, 0])

    model = Lambda(
        run,
        queries=torch.randn(3, 8),
        linear=nn.Linear(8, 8),
        norm=nn.LayerNorm(8),
        picture=torch.randn(1, 3, 5, 5),
        conv=nn.Conv2d(3, 8, 3),
        group=nn.GroupNorm(2, 8),
    )
    return model, (sequences(),)


# -- attention layers -----------------------------------------------------------------------------------------------


def attention(run: Callable[..., Tensor], length: int = 6, n: int = 5, **options: Any) -> Callable[[], Case]:
    return lambda: (Lambda(run, attention=nn.MultiheadAttention(8, 2, **options)), (sequences(n, length),))


def attend_sequence_first(self: Any, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return self.attention(x, x, x)[0].transpose(0, 1)


def attend_across(self: Any, x: Tensor) -> Tensor:
    return self.attention(x[:, :2], x, x.flip(1))[0]


def attend_with_masks(self: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    padding = torch.arange(length) >= length - 1 - (x[:, 0, :1] > 0).long()
    causal = torch.ones(length, length, dtype=torch.bool).triu(1)
    out, weights = self.attention(x, x, x, key_padding_mask=padding, attn_mask=causal, average_attn_weights=False)
    plain = self.attention(x, x, x, need_weights=False, attn_mask=causal, is_causal=True)[0]
    return out + plain + weights.sum((1, 3), keepdim=False).unsqueeze(-1)


def attend_by_float_mask(self: Any, x: Tensor) -> Tensor:
    n, length, _ = x.shape
    mask = x.new_zeros(n * 2, length, length)
    return self.attention(
        x, x, x, attn_mask=mask + x.mean((1, 2)).repeat_interleave(2)[:, None, None], need_weights=False
    )[0]


def attend_to_other_widths(self: Any, x: Tensor) -> Tensor:
    return self.attention(x, x[..., :5], x[..., :3])[0]


CASES |= {
    "attention_sequence_first": attention(attend_sequence_first),
    "attention_sequence_first_square": attention(attend_sequence_first, length=5),
    "attention_across": attention(attend_across, batch_first=True),
    "attention_with_masks": attention(attend_with_masks, batch_first=True, bias=False),
    "attention_by_float_mask": attention(attend_by_float_mask, batch_first=True),
    "attention_to_other_widths": attention(attend_to_other_widths, batch_first=True, kdim=5, vdim=3),
}


@case
def attention_pooling() -> Case:
    """CLIP's: attention as a function, on the parameters of layers that are never called."""

    def run(self: Any, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        x = torch.cat([x.mean(0, keepdim=True), x]) + self.positions[:, None]
        return F.multi_head_attention_forward(
            x[:1], x, x, 8, 2, None, torch.cat([self.q.bias, self.k.bias, self.v.bias]), None, None, False, 0.0,
            self.out.weight, self.out.bias, use_separate_proj_weight=True, need_weights=False,
            q_proj_weight=self.q.weight, k_proj_weight=self.k.weight, v_proj_weight=self.v.weight,
        )[0][0]  # fmt: skip

    layers = {name: nn.Linear(8, 8) for name in ("q", "k", "v", "out")}
    return Lambda(run, positions=torch.randn(7, 8), **layers), (sequences(),)


@case
def transformer() -> Case:
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    return model, (sequences(), sequences(length=4))


# -- single layers --------------------------------------------------------------------------------------------------


def layer(module: Callable[[], nn.Module], *inputs: Callable[[], Tensor]) -> Callable[[], Case]:
    return lambda: (module(), tuple(make() for make in inputs))


def signals(*size: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(5, *size)


def padded_embedding() -> nn.Module:
    return nn.Embedding(11, 4, padding_idx=-2)


def bag(mode: str) -> nn.Module:
    return nn.EmbeddingBag(11, 4, mode=mode, padding_idx=1)


CASES |= {
    "conv1d": layer(lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2), signals(4, 12)),
    "conv1d_reflect": layer(lambda: nn.Conv1d(2, 3, 4, padding=2, padding_mode="reflect", bias=False), signals(2, 9)),
    "conv2d": layer(lambda: nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 2), (1, 2), 2), signals(4, 7, 8)),
    "conv2d_same": layer(lambda: nn.Conv2d(3, 2, (4, 3), padding="same", dilation=(1, 2)), signals(3, 6, 7)),
    "conv2d_circular": layer(lambda: nn.Conv2d(3, 2, 3, padding=1, padding_mode="circular"), signals(3, 5, 6)),
    "conv2d_depthwise": layer(lambda: nn.Conv2d(4, 8, 3, groups=4), signals(4, 6, 6)),
    "conv2d_wide_on_few_pixels": layer(lambda: nn.Conv2d(12, 16, 3), signals(12, 4, 4)),
    "conv3d": layer(lambda: nn.Conv3d(2, 3, (2, 3, 1), (1, 2, 1), (1, 0, 0)), signals(2, 4, 5, 3)),
    "conv_transpose1d": layer(lambda: nn.ConvTranspose1d(4, 6, 3, 2, 1, 1, groups=2), signals(4, 5)),
    "conv_transpose2d": layer(lambda: nn.ConvTranspose2d(3, 2, 3, 2, 1, output_padding=1), signals(3, 4, 5)),
    "linear_vector": layer(lambda: nn.Linear(7, 4), signals(7)),
    "linear_grid": layer(lambda: nn.Linear(4, 6, bias=False), signals(2, 3, 4)),
    "linear_wide": layer(lambda: nn.Linear(20, 18), signals(3, 20)),
    "bilinear": layer(lambda: nn.Bilinear(4, 3, 2), signals(4), signals(3)),
    "prelu": layer(lambda: nn.PReLU(3), signals(3, 4)),
    "prelu_single": layer(lambda: nn.PReLU(), signals(3, 4)),
    "layer_norm": layer(lambda: nn.LayerNorm((3, 4)), signals(2, 3, 4)),
    "layer_norm_without_bias": layer(lambda: nn.LayerNorm(4, bias=False), signals(4)),
    "group_norm": layer(lambda: nn.GroupNorm(2, 6), signals(6, 4, 3)),
    "group_norm_vector": layer(lambda: nn.GroupNorm(3, 6), signals(6)),
    "instance_norm1d": layer(lambda: nn.InstanceNorm1d(3, affine=True), signals(3, 7)),
    "instance_norm2d": layer(lambda: nn.InstanceNorm2d(3, affine=True), signals(3, 4, 5)),
    "rms_norm": layer(lambda: nn.RMSNorm(6), signals(3, 6)),
    "embedding": layer(padded_embedding, tokens),
    "embedding_sparse": layer(lambda: nn.Embedding(11, 4, sparse=True), tokens),
    "embedding_bag_sum": layer(lambda: bag("sum"), tokens),
    "embedding_bag_mean": layer(lambda: bag("mean"), tokens),
    "embedding_bag_max": layer(lambda: bag("max"), tokens),
    "weight_norm": layer(lambda: parametrizations.weight_norm(nn.Linear(6, 4)), signals(3, 6)),
    "weight_norm_conv": layer(lambda: parametrizations.weight_norm(nn.Conv2d(3, 4, 3, bias=False)), signals(3, 5, 5)),
    "weight_norm_by_hook": layer(lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 4))), signals(3, 6)),
    "spectral_norm": layer(lambda: parametrizations.spectral_norm(nn.Linear(6, 4)), signals(3, 6)),
    "orthogonal": layer(lambda: parametrizations.orthogonal(nn.Linear(6, 4)), signals(3, 6)),
    "pruned": layer(lambda: nn.Sequential(prune.l1_unstructured(nn.Linear(6, 4), "weight", 0.5)), signals(3, 6)),
}
