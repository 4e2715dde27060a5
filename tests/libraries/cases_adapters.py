"""Adapters of peft, on language models whose own weights are frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.libraries.cases_text import CASES as TEXT
from tests.libraries.verdict import Model

CASES: dict[str, Callable[[], Model]] = {}


def adapter(
    case: str, config: str, on: str, *, targets: list[str] | None = None, checkpointing: bool = False, **options: Any
) -> None:
    def make() -> Model:
        import peft

        model = TEXT[f"transformers/{on}"]()
        if targets is not None:
            options["target_modules"] = targets
        task = "SEQ_CLS" if "Bert" in on else "SEQ_2_SEQ_LM" if "T5" in on else "CAUSAL_LM"
        module = peft.get_peft_model(model.module, getattr(peft, config)(task_type=task, **options))
        if checkpointing:
            module.gradient_checkpointing_enable()
            module.enable_input_require_grads()
        return Model(module, model.batch, model.loss)

    CASES[f"peft/{case}"] = make


LLAMA = ["q_proj", "v_proj"]
adapter("LoRA on Llama", "LoraConfig", "Llama", targets=LLAMA, r=2)
adapter("LoRA on Llama, labels=", "LoraConfig", "Llama, labels=", targets=LLAMA, r=2)
adapter("LoRA on Llama, random start", "LoraConfig", "Llama", targets=LLAMA, r=2, init_lora_weights=False)
adapter("LoRA on Llama, gradient checkpointing", "LoraConfig", "Llama", targets=LLAMA, r=2, checkpointing=True)
adapter("LoRA on GPT-2", "LoraConfig", "GPT-2", targets=["c_attn"], r=2, lora_dropout=0.1, fan_in_fan_out=True)
adapter("LoRA on Bert", "LoraConfig", "Bert, padded", targets=["query", "value"], r=2, lora_dropout=0.1)
adapter("LoRA on T5", "LoraConfig", "T5", targets=["q", "v"], r=2)
adapter("LoRA on embeddings", "LoraConfig", "Llama", targets=["embed_tokens", "q_proj"], r=2)
adapter("LoRA, rank-stabilised", "LoraConfig", "Llama", targets=LLAMA, r=2, use_rslora=True)
adapter("DoRA", "LoraConfig", "Llama", targets=LLAMA, r=2, use_dora=True, init_lora_weights=False)
adapter("AdaLoRA", "AdaLoraConfig", "Llama", targets=LLAMA, r=2, total_step=100)
adapter("IA3", "IA3Config", "Llama", targets=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
adapter("LoHa", "LoHaConfig", "Llama", targets=LLAMA, r=2)
adapter("LoHa, random start", "LoHaConfig", "Llama", targets=LLAMA, r=2, init_weights=False)
adapter("LoKr", "LoKrConfig", "Llama", targets=LLAMA, r=2)
adapter("OFT", "OFTConfig", "Llama", targets=LLAMA, oft_block_size=4)
adapter("HRA", "HRAConfig", "Llama", targets=LLAMA, r=2)
adapter("VeRA", "VeraConfig", "Llama", targets=LLAMA, r=2)
adapter("FourierFT", "FourierFTConfig", "Llama", targets=LLAMA, n_frequency=5)
adapter("LN tuning", "LNTuningConfig", "Llama", targets=["input_layernorm", "norm"])
adapter("Prompt tuning", "PromptTuningConfig", "Llama", num_virtual_tokens=3)
adapter("Prefix tuning", "PrefixTuningConfig", "Llama", num_virtual_tokens=3)
adapter("P-tuning", "PromptEncoderConfig", "Llama", num_virtual_tokens=3, encoder_hidden_size=8)
