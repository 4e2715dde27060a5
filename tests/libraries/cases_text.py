"""Language models of transformers: encoders, decoders, both, and speech."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from tests.libraries.verdict import ROWS, Batch, Model, mean

CASES: dict[str, Callable[[], Model]] = {}

LENGTH, WORDS = 8, 40

SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 8,
}
SMALL_SEQ2SEQ = {
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(3, WORDS, (ROWS, length))


def build(name: str, config: str, options: Mapping[str, Any]) -> nn.Module:
    """Make a model of transformers from the names of its class and of its configuration."""
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**options))


def text(
    case: str,
    name: str,
    config: str = "",
    *,
    base: Mapping[str, Any] = SMALL,
    batch: Callable[[], Batch] = lambda: {"input_ids": tokens()},
    loss: Callable[[nn.Module, Batch], Tensor] | None = None,
    **options: Any,
) -> None:
    """Add a model; its configuration is that of its class unless named."""
    config = config or name.split("For")[0].removesuffix("Model").removesuffix("LMHead") + "Config"

    def make() -> Model:
        module = build(name, config, {**base, **options})
        return Model(module, batch()) if loss is None else Model(module, batch(), loss)

    CASES[f"transformers/{case}"] = make


def own_loss(module: nn.Module, batch: Batch) -> Tensor:
    """The loss that the model returns for ``labels=``."""
    return module(**batch).loss


def padded() -> Batch:
    """Rows with and without padding."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[0, LENGTH // 2 :] = 0
    mask[1, LENGTH - 2 :] = 0
    return {"input_ids": tokens() * mask, "attention_mask": mask}


def labelled() -> Batch:
    ids = tokens()
    return {"input_ids": ids, "labels": ids.clone()}


def classified(batch: Callable[[], Batch]) -> Callable[[], Batch]:
    return lambda: {**batch(), "labels": torch.arange(ROWS) % 2}


def sequence_pair() -> Batch:
    return {"input_ids": tokens(), "decoder_input_ids": tokens(6)}


def padded_pair() -> Batch:
    return {**padded(), "decoder_input_ids": tokens(6)}


def labelled_pair() -> Batch:
    return {"input_ids": tokens(), "labels": tokens(6)}


# -- encoders --------------------------------------------------------------------------------------------------------

text("Bert", "BertForSequenceClassification")
text("Bert, padded", "BertForSequenceClassification", batch=padded)
text("Bert, labels=", "BertForSequenceClassification", batch=classified(padded), loss=own_loss)
text("Bert, eager attention, padded", "BertForSequenceClassification", batch=padded, attn_implementation="eager")
text("Bert, gradient checkpointing", "BertForSequenceClassification", batch=padded)
text("Bert, masked language model", "BertForMaskedLM")
text("Bert, token classification", "BertForTokenClassification")
text("Roberta", "RobertaForSequenceClassification", batch=padded)
text("DistilBert", "DistilBertForSequenceClassification", dim=16, n_layers=2, n_heads=2, hidden_dim=24, batch=padded)
text("Albert", "AlbertForSequenceClassification", embedding_size=12)
text("Electra", "ElectraForSequenceClassification", embedding_size=12)
text("MobileBert", "MobileBertForSequenceClassification", embedding_size=16, intra_bottleneck_size=8)
text("Deberta", "DebertaForSequenceClassification", relative_attention=True, pos_att_type=["c2p", "p2c"])
text("Deberta v2", "DebertaV2ForSequenceClassification", relative_attention=True, pos_att_type=["c2p", "p2c"])
text(
    "Deberta v3 (shared, buckets)",
    "DebertaV2ForSequenceClassification",
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    share_att_key=True,
    position_buckets=4,
    norm_rel_ebd="layer_norm",
    batch=padded,
)
text("MPNet", "MPNetForSequenceClassification")
text("ConvBert", "ConvBertForSequenceClassification", embedding_size=16, conv_kernel_size=3)
text(
    "Funnel",
    "FunnelForSequenceClassification",
    base={"vocab_size": WORDS},
    d_model=16,
    n_head=2,
    d_head=8,
    d_inner=24,
    block_sizes=[1, 1],
)
text("Longformer", "LongformerForSequenceClassification", attention_window=[4, 4], max_position_embeddings=40)
text("BigBird", "BigBirdForSequenceClassification", attention_type="original_full")
text("SqueezeBert", "SqueezeBertForSequenceClassification", embedding_size=16)
text("ModernBert", "ModernBertForSequenceClassification", global_attn_every_n_layers=2)
text("FNet", "FNetForSequenceClassification")
text("Nystromformer", "NystromformerForSequenceClassification", num_landmarks=4, segment_means_seq_len=8)
text("RoFormer", "RoFormerForSequenceClassification", "RoFormerConfig", embedding_size=16)
text(
    "XLNet",
    "XLNetForSequenceClassification",
    base={"vocab_size": WORDS},
    d_model=16,
    n_layer=2,
    n_head=2,
    d_inner=24,
    dropout=0.0,
)
text("Canine", "CanineForSequenceClassification", batch=lambda: {"input_ids": tokens(16)}, local_attention_window=8)
text("EuroBert", "EuroBertForSequenceClassification")
text("LayoutLM", "LayoutLMForSequenceClassification")

# -- decoders --------------------------------------------------------------------------------------------------------

text("GPT-2", "GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2, n_positions=32)
text("GPT-2, labels=", "GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2, n_positions=32, batch=labelled, loss=own_loss)
text("GPT-2, gradient checkpointing", "GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2, n_positions=32)
text("GPT-Neo", "GPTNeoForCausalLM", num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]])
text("GPT-NeoX", "GPTNeoXForCausalLM")
text("GPT-J", "GPTJForCausalLM", n_embd=16, n_layer=2, n_head=2, rotary_dim=4)
text("OPT", "OPTForCausalLM", ffn_dim=24, word_embed_proj_dim=16)
text("Bloom", "BloomForCausalLM", n_layer=2, n_head=2)
text("Llama", "LlamaForCausalLM")
text("Llama, padded", "LlamaForCausalLM", batch=padded)
text("Llama, labels=", "LlamaForCausalLM", batch=labelled, loss=own_loss)
text("Llama, gradient checkpointing", "LlamaForCausalLM")
text("Mistral", "MistralForCausalLM")
text("Qwen2", "Qwen2ForCausalLM", num_key_value_heads=1)
text("Qwen3", "Qwen3ForCausalLM")
text("Gemma", "GemmaForCausalLM")
text("Gemma 2", "Gemma2ForCausalLM")
text("Gemma 3", "Gemma3ForCausalLM", "Gemma3TextConfig")
text("Phi", "PhiForCausalLM")
text("Phi-3", "Phi3ForCausalLM")
text("Falcon", "FalconForCausalLM", base={n: v for n, v in SMALL.items() if n != "head_dim"})
text("MPT", "MptForCausalLM", d_model=16, n_layers=2, n_heads=2, max_seq_len=32)
text("StableLM", "StableLmForCausalLM")
text("Starcoder2", "Starcoder2ForCausalLM")
text("OLMo 2", "Olmo2ForCausalLM")
text("SmolLM3", "SmolLM3ForCausalLM")
text("Cohere", "CohereForCausalLM")
text("XGLM", "XGLMForCausalLM", d_model=16, ffn_dim=24, num_layers=2, attention_heads=2)
text("Mixtral", "MixtralForCausalLM", num_local_experts=3, num_experts_per_tok=2)
text(
    "Mixtral, eager experts",
    "MixtralForCausalLM",
    num_local_experts=3,
    num_experts_per_tok=2,
    experts_implementation="eager",
)
text(
    "Mixtral, router loss",
    "MixtralForCausalLM",
    num_local_experts=3,
    num_experts_per_tok=2,
    output_router_logits=True,
    router_aux_loss_coef=0.02,
    batch=labelled,
    loss=own_loss,
)
text("Qwen2-MoE", "Qwen2MoeForCausalLM", num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=8)
text("GPT-OSS", "GptOssForCausalLM", num_local_experts=3, num_experts_per_tok=2, sliding_window=4)
text("Mamba", "MambaForCausalLM", state_size=4)
text("RWKV", "RwkvForCausalLM", context_length=16, attention_hidden_size=16)

# -- both ------------------------------------------------------------------------------------------------------------

T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
text("T5", "T5ForConditionalGeneration", **T5, batch=sequence_pair)
text("T5, padded", "T5ForConditionalGeneration", **T5, batch=padded_pair)
text("T5, labels=", "T5ForConditionalGeneration", **T5, batch=labelled_pair, loss=own_loss)
text("T5, eager attention", "T5ForConditionalGeneration", **T5, batch=padded_pair, attn_implementation="eager")
text("mT5", "MT5ForConditionalGeneration", **T5, batch=sequence_pair)
text("Bart", "BartForConditionalGeneration", base=SMALL_SEQ2SEQ, batch=sequence_pair)
text("Bart, padded", "BartForConditionalGeneration", base=SMALL_SEQ2SEQ, batch=padded_pair)
text("mBart", "MBartForConditionalGeneration", base=SMALL_SEQ2SEQ, batch=sequence_pair)
text("Pegasus", "PegasusForConditionalGeneration", base=SMALL_SEQ2SEQ, batch=sequence_pair)
text("Marian", "MarianMTModel", "MarianConfig", base=SMALL_SEQ2SEQ, batch=sequence_pair)
text("Blenderbot", "BlenderbotForConditionalGeneration", base=SMALL_SEQ2SEQ, batch=sequence_pair)
text(
    "Whisper",
    "WhisperForConditionalGeneration",
    base=SMALL_SEQ2SEQ,
    num_mel_bins=4,
    max_source_positions=10,
    max_target_positions=16,
    batch=lambda: {"input_features": torch.randn(ROWS, 4, 20), "decoder_input_ids": tokens(6)},
)

# -- speech ----------------------------------------------------------------------------------------------------------

SPEECH = {
    "conv_dim": (8, 8),
    "conv_kernel": (4, 3),
    "conv_stride": (2, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "mask_time_length": 2,
    "layerdrop": 0.0,
}


def sound() -> Batch:
    return {"input_values": torch.randn(ROWS, 80)}


plain_speech = {**SPEECH, "mask_time_prob": 0.0, "mask_feature_prob": 0.0, "feat_extract_norm": "layer"}
text("Wav2Vec2", "Wav2Vec2ForSequenceClassification", **plain_speech, batch=sound)
text(
    "Wav2Vec2, group norm",
    "Wav2Vec2ForSequenceClassification",
    **{**plain_speech, "feat_extract_norm": "group"},
    batch=sound,
)
text(
    "Wav2Vec2, time masking",
    "Wav2Vec2ForSequenceClassification",
    **{**plain_speech, "mask_time_prob": 0.3},
    batch=sound,
)
text("HuBERT", "HubertForSequenceClassification", **plain_speech, batch=sound)
text("WavLM", "WavLMForSequenceClassification", **plain_speech, num_buckets=8, max_bucket_distance=16, batch=sound)
text(
    "AST",
    "ASTForAudioClassification",
    patch_size=4,
    frequency_stride=4,
    time_stride=4,
    max_length=16,
    num_mel_bins=8,
    batch=lambda: {"input_values": torch.randn(ROWS, 16, 8)},
)
text(
    "PatchTST",
    "PatchTSTForClassification",
    num_input_channels=2,
    num_targets=3,
    context_length=16,
    patch_length=4,
    patch_stride=4,
    d_model=16,
    ffn_dim=24,
    norm_type="layernorm",
    batch=lambda: {"past_values": torch.randn(ROWS, 16, 2)},
    loss=lambda module, batch: mean(module(**batch).prediction_logits),
)


def _masked_alike(make: Callable[[], Model]) -> Model:
    """Let the same moments of every recording be masked."""

    def mask(shape: tuple[int, int], *args: Any, **options: Any) -> Any:
        return np.tile(np.arange(shape[1]) % 3 == 1, (shape[0], 1))

    home = "transformers.models.wav2vec2.modeling_wav2vec2._compute_mask_indices"
    return replace(make(), settled=lambda: mock.patch(home, mask))


CASES["transformers/Wav2Vec2, time masking"] = functools.partial(
    _masked_alike, CASES["transformers/Wav2Vec2, time masking"]
)


def _checkpointed(make: Callable[[], Model]) -> Model:
    model = make()
    model.module.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


for _name in [name for name in CASES if "gradient checkpointing" in name]:
    CASES[_name] = functools.partial(_checkpointed, CASES[_name])
