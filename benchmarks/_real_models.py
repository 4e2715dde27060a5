"""Models of real size, as people train them: those of transformers and torchvision, and the networks of the field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from _models import cifar_cnn, lenet, wrn_16_4
from torch import Tensor, nn

__all__ = ["REAL_MODELS", "RealModel"]


@dataclass(frozen=True)
class RealModel:
    """A model, what it is fed, and its loss.

    Attributes:
        make: Returns the model; its argument asks for one that is small enough to try the script out.
        inputs: Returns inputs and labels for so many rows.
        loss: The mean loss of a batch, from the model's output and labels.
        rows: Examples in a lot.
        random: Whether it has dropout: two passes differ, and gradients cannot be compared.
    """

    make: Callable[[bool], nn.Module]
    inputs: Callable[[int, bool], tuple[Tensor, Tensor]]
    loss: Callable[[Any, Tensor], Tensor]
    rows: int
    random: bool = False


_LENGTH, _VOCABULARY = 512, 32000


def _gpt2(tiny: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 500, "n_positions": 64} if tiny else {}
    return GPT2LMHeadModel(GPT2Config(**size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))


def _llama(tiny: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = (64, 128, 2, 4, 500) if tiny else (768, 2048, 14, 12, _VOCABULARY)
    width, inner, depth, heads, vocabulary = size
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=_LENGTH,
            use_cache=False,
        )
    )


def _vit(tiny: bool) -> nn.Module:
    from torchvision.models import VisionTransformer, vit_b_16

    return VisionTransformer(32, 8, 2, 4, 64, 128) if tiny else vit_b_16()


def _resnet18(tiny: bool) -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(norm_layer=lambda channels: nn.GroupNorm(16, channels))


def _distilbert(tiny: bool) -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    size = {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4, "vocab_size": 500} if tiny else {}
    return DistilBertForSequenceClassification(DistilBertConfig(**size))  # with its dropout


def _nf_resnet26(_tiny: bool) -> nn.Module:
    from timm import create_model

    return create_model("nf_resnet26", num_classes=1000)


class StandardisedConvolution(nn.Conv2d):
    """What a user writes who reads of weight standardisation: the library has no rule for it and follows the code."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        mean = weight.mean(dim=(1, 2, 3), keepdim=True)
        variance = weight.var(dim=(1, 2, 3), keepdim=True, unbiased=False)
        scale = torch.rsqrt(variance * weight[0].numel() + 1e-5)
        return F.conv2d(x, (weight - mean) * scale, self.bias, self.stride, self.padding)


def _standardised_wrn(_tiny: bool) -> nn.Module:
    model = wrn_16_4()
    for child in list(model.modules()):
        for name, layer in list(child.named_children()):
            if isinstance(layer, nn.Conv2d):
                own = StandardisedConvolution(
                    layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding, bias=False
                )
                setattr(child, name, own)
    return model


def _tokens(vocabulary: int) -> Callable[[int, bool], tuple[Tensor, Tensor]]:
    def make(rows: int, tiny: bool) -> tuple[Tensor, Tensor]:
        ids = torch.randint(500 if tiny else vocabulary, (rows, 32 if tiny else _LENGTH))
        return ids, ids

    return make


def _texts(rows: int, tiny: bool) -> tuple[Tensor, Tensor]:
    return torch.randint(500 if tiny else 30522, (rows, 32 if tiny else 128)), torch.randint(2, (rows,))


def _images(size: int, classes: int, channels: int = 3) -> Callable[[int, bool], tuple[Tensor, Tensor]]:
    def make(rows: int, tiny: bool) -> tuple[Tensor, Tensor]:
        side = min(size, 32) if tiny else size
        return torch.randn(rows, channels, side, side), torch.randint(classes, (rows,))

    return make


def _next_token(out: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _class(out: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(out.logits, labels)


REAL_MODELS = {
    "gpt2": RealModel(_gpt2, _tokens(50257), _next_token, 8),
    "llama-150m": RealModel(_llama, _tokens(_VOCABULARY), _next_token, 8),
    "vit-b-16": RealModel(_vit, _images(224, 1000), F.cross_entropy, 32),
    "resnet18-gn": RealModel(_resnet18, _images(224, 1000), F.cross_entropy, 64),
    "wrn-16-4": RealModel(lambda _: wrn_16_4(), _images(32, 10), F.cross_entropy, 256),
    "wrn-16-4-own-ws": RealModel(_standardised_wrn, _images(32, 10), F.cross_entropy, 256),
    "cifar-cnn": RealModel(lambda _: cifar_cnn(), _images(32, 10), F.cross_entropy, 256),
    "distilbert": RealModel(_distilbert, _texts, _class, 32, random=True),
    "nf-resnet26": RealModel(_nf_resnet26, _images(224, 1000), F.cross_entropy, 32),
    "lenet": RealModel(lambda _: lenet(), _images(28, 10, 1), F.cross_entropy, 256),
}
