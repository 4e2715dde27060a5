"""Models of well-known libraries: each is exact, or refused for the reason that is written down here."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.libraries.cases import CASES
from tests.libraries.verdict import TOLERANCE, examine

REFUSED = {
    "torch/BatchNorm": r"normalises each example by the others.*dphero\.fix",
    "transformers/ResNet": r"normalises each example by the others.*dphero\.fix",
    "timm/ResNet-18": r"normalises each example by the others.*dphero\.fix",
    "timm/XCiT": r"normalises each example by the others.*dphero\.fix",
    "transformers/CLIP (contrast over the batch)": "do not carry the examples in one axis",
    "transformers/Mixtral, router loss": "gradient for '.*' depends on the other examples",
}
"""What cannot be private, and what must be said of it."""

NOT_YET = {
    "transformers/WavLM": "what multi_head_attention_forward does",
}
"""What could be private, and is refused so far."""

POPULAR = [
    "transformers/Bert, labels=",
    "transformers/Roberta",
    "transformers/DistilBert",
    "transformers/GPT-2",
    "transformers/Llama, labels=",
    "transformers/Qwen3",
    "transformers/T5, padded",
    "transformers/Deberta v3 (shared, buckets)",
    "transformers/Mixtral",
    "transformers/Llama, gradient checkpointing",
    "transformers/ViT",
    "transformers/ResNet",
    "transformers/CLIP (contrast over the batch)",
]
"""Those that the fast tests try: transformers alone, about a second each."""

NOISE = ("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def check(name: str) -> None:
    if importlib.util.find_spec(name.partition("/")[0]) is None:
        pytest.skip(f"{name.partition('/')[0]} is not installed (make test-models)")
    verdict = examine(CASES[name])
    expected = (REFUSED | NOT_YET).get(name)
    if expected is not None:
        assert not verdict.exact and re.search(expected, verdict.reason), verdict
    else:
        assert verdict.exact, verdict.reason
        assert verdict.error <= TOLERANCE


@pytest.mark.filterwarnings(*NOISE)
@pytest.mark.parametrize("name", [*(name for name in CASES if name.startswith("torch/")), *POPULAR])
def test_popular_models_are_exact_or_refused(name: str) -> None:
    check(name)


@pytest.mark.models
@pytest.mark.filterwarnings(*NOISE)
@pytest.mark.parametrize("name", CASES)
def test_every_model_is_exact_or_refused(name: str) -> None:
    check(name)
