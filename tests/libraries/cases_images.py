"""Networks for images: of transformers, and of timm."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import dphero
from tests.libraries.cases_text import build, tokens
from tests.libraries.timm_alone import import_timm
from tests.libraries.verdict import ROWS, Batch, Model, mean

CASES: dict[str, Callable[[], Model]] = {}

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 3,
}


def images(size: int = 16) -> Batch:
    return {"pixel_values": torch.randn(ROWS, 3, size, size)}


def vision(
    case: str,
    name: str,
    config: str = "",
    *,
    size: int = 16,
    batch: Callable[[], Batch] | None = None,
    loss: Callable[[nn.Module, Batch], Tensor] | None = None,
    fixed: bool = False,
    base: Mapping[str, Any] = SMALL,
    **options: Any,
) -> None:
    config = config or name.split("For")[0].removesuffix("Model") + "Config"

    def make() -> Model:
        module = build(name, config, {**base, "image_size": size, **options})
        module = dphero.fix(module) if fixed else module
        inputs = batch() if batch is not None else images(size)
        return Model(module, inputs) if loss is None else Model(module, inputs, loss)

    CASES[f"transformers/{case}"] = make


vision("ViT", "ViTForImageClassification")
vision("DeiT", "DeiTForImageClassification")
vision("BEiT", "BeitForImageClassification", use_relative_position_bias=True)
vision("Data2Vec vision", "Data2VecVisionForImageClassification", use_shared_relative_position_bias=True)
vision("DINOv2", "Dinov2ForImageClassification")
vision(
    "Swin",
    "SwinForImageClassification",
    base={"patch_size": 4},
    embed_dim=8,
    depths=[2, 1],
    num_heads=[2, 2],
    window_size=2,
)
vision(
    "Swin v2",
    "Swinv2ForImageClassification",
    base={"patch_size": 4},
    embed_dim=8,
    depths=[2, 1],
    num_heads=[2, 2],
    window_size=2,
)
vision("ConvNeXt", "ConvNextForImageClassification", num_stages=2, hidden_sizes=[8, 16], depths=[1, 1])
vision("ConvNeXt v2", "ConvNextV2ForImageClassification", num_stages=2, hidden_sizes=[8, 16], depths=[1, 1])
vision("ResNet", "ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
vision(
    "ResNet, fixed", "ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], fixed=True
)
vision(
    "MobileNetV2, fixed", "MobileNetV2ForImageClassification", size=32, depth_multiplier=0.1, min_depth=8, fixed=True
)
vision(
    "RegNet, fixed",
    "RegNetForImageClassification",
    embedding_size=8,
    hidden_sizes=[8, 8, 8, 8],
    depths=[1, 1, 1, 1],
    groups_width=4,
    base={},
    fixed=True,
)
vision(
    "SegFormer",
    "SegformerForImageClassification",
    num_encoder_blocks=2,
    depths=[1, 1],
    sr_ratios=[2, 1],
    hidden_sizes=[8, 16],
    patch_sizes=[3, 3],
    strides=[2, 2],
    num_attention_heads=[1, 2],
    mlp_ratios=[2, 2],
)
vision(
    "PoolFormer",
    "PoolFormerForImageClassification",
    "PoolFormerConfig",
    hidden_sizes=[8, 8, 16, 16],
    depths=[1, 1, 1, 1],
    base={},
    size=32,
)
vision(
    "PVT",
    "PvtForImageClassification",
    hidden_sizes=[8, 8, 16, 16],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 1, 2, 2],
    size=32,
)
vision(
    "ViT-MAE (random masking)",
    "ViTMAEForPreTraining",
    decoder_hidden_size=16,
    decoder_num_hidden_layers=1,
    decoder_num_attention_heads=2,
    decoder_intermediate_size=24,
    batch=lambda: {**images(), "noise": torch.rand(ROWS, 16)},
)
vision("CLIP vision", "CLIPVisionModel")
vision("SigLIP vision", "SiglipVisionModel")
vision(
    "CLIP (contrast over the batch)",
    "CLIPModel",
    text_config={
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "vocab_size": 40,
    },
    vision_config={
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "image_size": 16,
        "patch_size": 4,
    },
    projection_dim=8,
    batch=lambda: {**images(), "input_ids": tokens()},
    loss=lambda module, batch: mean(module(**batch).logits_per_image),
)


# -- timm ------------------------------------------------------------------------------------------------------------


def timm(case: str, name: str, *, size: int = 32, fixed: bool = False, **options: Any) -> None:
    def make() -> Model:
        timm = import_timm()
        torch.manual_seed(0)
        if "." in name:
            home, _, made = name.rpartition(".")
            source = importlib.import_module(f"timm.{home}")
            found = {key: _named(source, value) for key, value in options.items()}
            module = getattr(source, made)(num_classes=3, **found)
        else:
            module = timm.create_model(name, num_classes=3, **options)
        module = dphero.fix(module) if fixed else module
        return Model(module, {"x": torch.randn(ROWS, 3, size, size)})

    CASES[f"timm/{case}"] = make


def _named(source: Any, value: Any) -> Any:
    """Return the classes of a module that are meant by their names."""
    if isinstance(value, tuple):
        return tuple(_named(source, each) for each in value)
    return getattr(source, value) if isinstance(value, str) else value


_vit = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
timm("ViT", "vit_tiny_patch16_224", **_vit)
timm("ViT, relative positions", "vit_relpos_small_patch16_224", **_vit)
timm("ViT, registers", "vit_small_patch14_reg4_dinov2", **_vit)
timm("DeiT-3", "deit3_small_patch16_224", **_vit)
timm("DeiT, distilled", "deit_tiny_distilled_patch16_224", **_vit)
timm("CaiT", "cait_xxs24_224", **{**_vit, "depth": 2})
timm("EVA-02", "eva02_tiny_patch14_224", **_vit)
timm("BEiT v2", "beitv2_base_patch16_224", **_vit)
timm("XCiT", "xcit_nano_12_p16_224", img_size=32, embed_dim=16, depth=2, num_heads=2)
timm("Swin", "swin_tiny_patch4_window7_224", img_size=32, embed_dim=8, depths=(2, 1), num_heads=(2, 2), window_size=4)
timm("Swin v2", "swinv2_tiny_window8_256", img_size=32, embed_dim=8, depths=(2, 1), num_heads=(2, 2), window_size=4)
_mixer = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "num_blocks": 2}
timm("MLP-Mixer", "models.mlp_mixer.MlpMixer", **_mixer)
timm("ResMLP", "models.mlp_mixer.MlpMixer", **_mixer, mlp_ratio=4, block_layer="ResBlock", norm_layer="Affine")
timm("ConvNeXt", "convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))
timm("ConvNeXt v2", "convnextv2_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))
_metaformer = {"depths": (1, 1, 1, 1), "dims": (8, 8, 32, 32)}
timm("PoolFormer", "models.metaformer.MetaFormer", **_metaformer)
timm("ResNet-18", "resnet18", channels=(8, 8, 16, 16), layers=(1, 1, 1, 1))
timm("ResNet-18, fixed", "resnet18", channels=(8, 8, 16, 16), layers=(1, 1, 1, 1), fixed=True)
timm(
    "ResNet v2 (BiT, standardised weights)", "models.resnetv2.ResNetV2", layers=(1, 1), channels=(128, 128), stem_chs=32
)
timm("NF-ResNet (standardised weights)", "nf_resnet26", width_factor=0.125)
timm("EfficientNet, fixed", "efficientnet_lite0", fixed=True)
timm("MobileNetV3, fixed", "mobilenetv3_small_050", fixed=True)
timm("RegNet, fixed", "regnety_002", fixed=True)
timm("DenseNet, fixed", "densenet121", growth_rate=4, block_config=(2, 2), fixed=True)
timm("GhostNet, fixed", "ghostnet_050", fixed=True)
