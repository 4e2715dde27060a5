"""Training loops of other libraries around a private model: accelerate, Lightning, the Hugging Face Trainer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dphero import PrivacyEngine

pytestmark = [
    pytest.mark.models,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


class Training:
    """A private model, and the same one to be trained by hand."""

    def __init__(self, prepare: Any = lambda *objects: objects, **options: Any) -> None:
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
        self.model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.engine = PrivacyEngine()
        self.model, optimizer = prepare(self.model, torch.optim.AdamW(self.model.parameters(), lr=0.01))
        _, self.optimizer, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=optimizer,
            data_loader=DataLoader(data, batch_size=16),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            dataset_size="public",
            seed=1,
            **options,
        )

    def by_hand(self) -> Training:
        for x, y in self.loader:
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
        return self

    def require_same(self, other: Training) -> None:
        assert self.engine.ledger.steps == other.engine.ledger.steps
        torch.testing.assert_close(self.model.state_dict(), other.model.state_dict())


@pytest.mark.parametrize("options", [{}, {"physical_batch_size": 5}], ids=["whole lots", "physical batches"])
@pytest.mark.parametrize("order", ["prepared first", "private first"])
def test_accelerate(order: str, options: dict[str, Any]) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    made = Training(accelerator.prepare, **options) if order == "prepared first" else Training(**options)
    if order == "private first":
        made.model, made.optimizer, made.loader = accelerator.prepare(made.model, made.optimizer, made.loader)
    for x, y in made.loader:
        made.optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(made.model(x), y))
        made.optimizer.step()
    made.require_same(Training(**options).by_hand())


def test_automatic_optimisation_of_lightning() -> None:
    lightning = pytest.importorskip("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    made = Training()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = made.model

        def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return made.optimizer

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(Module(), train_dataloaders=made.loader)
    made.require_same(Training().by_hand())


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, causal: bool) -> None:
        self._causal = causal
        self._words = torch.randint(3, 40, (32, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = self._words[index]
        return {"input_ids": words, "labels": words if self._causal else words[0] % 2}


def trained_by_trainer(path: Path, causal: bool = False, **options: Any) -> PrivacyEngine:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16, "max_position_embeddings": 16}
    kind = "Llama" if causal else "Bert"
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}For{'CausalLM' if causal else 'SequenceClassification'}")(config)
    optimizer, engine, data = torch.optim.AdamW(model.parameters()), PrivacyEngine(), Sentences(causal)
    numbers = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "dataset_size": "public"}
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=8), **numbers
    )

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return loader

    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_strategy": "no", "use_cpu": True}
    arguments = transformers.TrainingArguments(str(path), num_train_epochs=1, **quiet, **options)
    Trainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None)).train()
    return engine


@pytest.mark.parametrize("causal", [False, True], ids=["classification", "language model"])
def test_the_trainer_of_hugging_face(causal: bool, tmp_path: Path) -> None:
    assert trained_by_trainer(tmp_path, causal).ledger.steps == 4


def test_accumulation_in_the_trainer_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"gradient_accumulation_steps: set it to 1.*physical_batch_size"):
        trained_by_trainer(tmp_path, gradient_accumulation_steps=2)
