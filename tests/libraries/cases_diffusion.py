"""Networks of diffusers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.libraries.verdict import ROWS, Batch, Model

CASES: dict[str, Callable[[], Model]] = {}


def diffusion(case: str, name: str, batch: Callable[[], Batch], **options: Any) -> None:
    def make() -> Model:
        import diffusers

        torch.manual_seed(0)
        module = getattr(diffusers, name)(**options)
        return Model(module, batch())

    CASES[f"diffusers/{case}"] = make


def noisy(channels: int = 4, size: int = 8, **others: Any) -> Callable[[], Batch]:
    return lambda: {
        "sample": torch.randn(ROWS, channels, size, size),
        "timestep": torch.arange(ROWS) * 7,
        **{name: torch.randn(ROWS, *shape) for name, shape in others.items()},
    }


def hidden(channels: int = 4, size: int = 8, **others: Any) -> Callable[[], Batch]:
    return lambda: {
        "hidden_states": torch.randn(ROWS, channels, size, size),
        "timestep": torch.arange(ROWS) * 7,
        **{name: torch.randn(ROWS, *shape) for name, shape in others.items()},
    }


_unet = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "norm_num_groups": 4,
}
diffusion(
    "UNet2D",
    "UNet2DModel",
    noisy(),
    **_unet,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    attention_head_dim=4,
)
diffusion(
    "UNet2D, conditional (Stable Diffusion)",
    "UNet2DConditionModel",
    noisy(encoder_hidden_states=(5, 12)),
    **_unet,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
    up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    cross_attention_dim=12,
    attention_head_dim=2,
)
diffusion(
    "AutoencoderKL",
    "AutoencoderKL",
    lambda: {"sample": torch.randn(ROWS, 3, 8, 8)},
    block_out_channels=(8, 8),
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    norm_num_groups=4,
    latent_channels=2,
)
diffusion(
    "DiT",
    "DiTTransformer2DModel",
    lambda: {**hidden()(), "class_labels": torch.arange(ROWS)},
    num_attention_heads=2,
    attention_head_dim=8,
    in_channels=4,
    out_channels=4,
    num_layers=2,
    sample_size=8,
    num_embeds_ada_norm=10,
    norm_num_groups=4,
)
diffusion(
    "PixArt",
    "PixArtTransformer2DModel",
    hidden(encoder_hidden_states=(5, 12)),
    num_attention_heads=2,
    attention_head_dim=8,
    in_channels=4,
    out_channels=4,
    num_layers=2,
    sample_size=8,
    caption_channels=12,
    cross_attention_dim=16,
    use_additional_conditions=False,
    norm_num_groups=4,
)
diffusion(
    "Stable Diffusion 3",
    "SD3Transformer2DModel",
    hidden(encoder_hidden_states=(5, 12), pooled_projections=(10,)),
    sample_size=8,
    patch_size=2,
    in_channels=4,
    num_layers=2,
    attention_head_dim=8,
    num_attention_heads=2,
    joint_attention_dim=12,
    caption_projection_dim=16,
    pooled_projection_dim=10,
    out_channels=4,
    pos_embed_max_size=8,
)
diffusion(
    "Latte (video)",
    "LatteTransformer3DModel",
    lambda: {
        "hidden_states": torch.randn(ROWS, 4, 2, 8, 8),
        "timestep": torch.arange(ROWS) * 7,
        "encoder_hidden_states": torch.randn(ROWS, 5, 12),
    },
    num_attention_heads=2,
    attention_head_dim=8,
    in_channels=4,
    out_channels=4,
    num_layers=1,
    sample_size=8,
    patch_size=2,
    caption_channels=12,
    cross_attention_dim=16,
    video_length=2,
    num_embeds_ada_norm=10,
    norm_type="ada_norm_single",
)
diffusion(
    "UNet1D",
    "UNet1DModel",
    lambda: {"sample": torch.randn(ROWS, 2, 16), "timestep": torch.arange(ROWS) * 7},
    sample_size=16,
    in_channels=2,
    out_channels=2,
    block_out_channels=(32, 32),
    extra_in_channels=64,
    down_block_types=("DownBlock1DNoSkip", "DownBlock1D"),
    up_block_types=("UpBlock1D", "UpBlock1DNoSkip"),
)
diffusion(
    "Prior transformer",
    "PriorTransformer",
    lambda: {
        "hidden_states": torch.randn(ROWS, 8),
        "timestep": torch.arange(ROWS),
        "proj_embedding": torch.randn(ROWS, 8),
        "encoder_hidden_states": torch.randn(ROWS, 5, 8),
    },
    num_attention_heads=2,
    attention_head_dim=4,
    num_layers=2,
    embedding_dim=8,
    num_embeddings=5,
    additional_embeddings=4,
)
