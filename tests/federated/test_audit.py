"""What an attacker makes of one client's answers, with a canary among its records and without it."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from dphero import experiments
from dphero.audit.bounds.claims import claim_of_ledger
from dphero.audit.bounds.two_sample import audit
from dphero.data import Split
from dphero.experiments.runs.preparation import prepare
from dphero.federated.client.training_round import Client
from dphero.federated.requests import Request
from dphero.federated.settings import Federation
from dphero.noise import FastNoise

RECORDS = 16
RECIPE = {"data": "digits", "model": "mlp", "method": "dp-sgd", "noise_multiplier": 1.0, "lot": RECORDS, "lr": 0.1}
RECIPE |= {"momentum": 0.0, "clip": 0.5, "dataset_size": RECORDS, "accountant": "rdp"}


class ClientRelease:
    """One answer of a client; the attacker looks at how far the model moved against the canary's gradient."""

    def __init__(self, digits, path):
        self.digits, self.path, self.ledger = digits, path, None
        self.recipe = experiments.resolve(RECIPE)
        task, _ = prepare(self.recipe, digits)
        self.weights = {name: value.detach().clone() for name, value in task.module.state_dict().items()}
        self.canary = 30 * digits.test.images[:1]
        label = task.module(self.canary)[0].argmin()[None]
        F.cross_entropy(task.module(self.canary), label).backward()
        gradient = {name: parameter.grad for name, parameter in task.module.named_parameters()}
        length = torch.cat([value.flatten() for value in gradient.values()]).norm()
        self.direction = {name: value / length for name, value in gradient.items()}
        images, labels = digits.train.images[:RECORDS], digits.train.labels[:RECORDS]
        self.splits = {
            False: Split(images, labels),
            True: Split(torch.cat([images, self.canary]), torch.cat([labels, label])),
        }

    def __call__(self, canary_in, seed):
        data = replace(self.digits, train=self.splits[canary_in])
        recipe = self.recipe.with_(seed=seed)
        client = Client("a", recipe, Federation(clients=1, sampled=1, rounds=1), data, self.path / str(seed))
        answer = client.answer(Request(1, self.weights))
        self.ledger = answer.ledger
        return -sum(float(((answer.weights[n] - self.weights[n]) * d).sum()) for n, d in self.direction.items())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("faulty", [False, True], ids=["honest", "half the noise"])
def test_the_audit_refutes_a_client_whose_noise_was_halved_and_no_other(digits, tmp_path, monkeypatch, faulty):
    if faulty:
        fill = FastNoise.fill

        def half(self, tensors, std, *rest, **options):
            less = [each / 2 for each in std] if isinstance(std, list) else std / 2
            return fill(self, tensors, less, *rest, **options)

        monkeypatch.setattr(FastNoise, "fill", half)
    release = ClientRelease(digits, tmp_path)
    found = audit(release, lambda: claim_of_ledger(release.ledger, 1e-5), name="client", releases=100, seed=1)
    assert found.refuted is faulty
    # The canary's gradient is clipped to C and all records are in the lot: its share of the answer is C against noise
    # of standard deviation σC, so that answers with and without it lie 1/σ apart, and no attack can see more than that.
    # An attack that saw less would refute nobody, honest or not. (0.5 is 3 standard errors and more.)
    spread = math.sqrt((found.inside.var(ddof=1) + found.outside.var(ddof=1)) / 2)
    assert (found.inside.mean() - found.outside.mean()) / spread == pytest.approx(2 if faulty else 1, abs=0.5)
