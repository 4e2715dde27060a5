"""``--guidance prior``: the guidance sees synthetic images as the trained part of the network would see them."""

from __future__ import annotations

import pytest
import torch

from dphero.methods.trainers.engine_trainer import PrivateTrainer
from tests.methods.image_task import start, take


@pytest.mark.parametrize("model", ["mlp", "scatter-linear"])
def test_every_layer_of_the_trained_part_is_shaped_on_both_sides(model: str) -> None:
    trainer = take(start("dp-sgd", model=model, guidance="prior", epsilon=3.0), 1)
    assert isinstance(trainer, PrivateTrainer)
    shape = trainer.engine._attached.mechanism.noise_geometry["1.weight"]
    assert shape.left is not None and shape.right is not None
    assert torch.linalg.vector_norm(shape.colour(torch.ones(shape.shape))) > 0


def test_a_method_that_trains_another_network_refuses_it() -> None:
    with pytest.raises(ValueError, match="leave --guidance out"):
        start("dp-randp", guidance="prior", epsilon=3.0, options={"pretrain_steps": 2, "pretrain_batch": 8})
