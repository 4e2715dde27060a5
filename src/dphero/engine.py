"""The privacy engine: puts the parts together. No mathematics here.

lot ─► taps ─► norms ─► clip ─► sum ─► noise ─► optimizer
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from typing import Any, Literal, cast

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from dphero import checkpoint
from dphero.accounting import (
    AdaptiveGaussian,
    Budget,
    Event,
    Ledger,
    PoissonGaussian,
    ShuffledGaussian,
    Statement,
    calibrate_noise_multiplier,
    price,
    statement,
)
from dphero.blocks import describe
from dphero.clipping import make_clipping
from dphero.guidance import Guidance, resolve
from dphero.lot_sum import Diagnostics
from dphero.mechanism import Mechanism, Mode
from dphero.noise import FastNoise, NoiseSource, SecureNoise
from dphero.run import Run
from dphero.sampling import Lots, PoissonSampler, PrivateLoader, Sampler, ShuffleSampler, dataset_of, public_rate
from dphero.validation import require_private_modules

__all__ = ["PrivacyEngine"]

Optimizers = Optimizer | Sequence[Optimizer]


class PrivacyEngine:
    """Makes an ordinary PyTorch training loop differentially private.

    Example:
        >>> engine = PrivacyEngine()                                              # doctest: +SKIP
        >>> model, optimizer, loader = engine.make_private(
        ...     module=model, optimizer=optimizer, data_loader=loader,
        ...     noise_multiplier=1.1, max_grad_norm=1.0, dataset_size="public")
        >>> for x, y in loader:                                                   # the loop stays as it was
        ...     optimizer.zero_grad()
        ...     loss_function(model(x), y).backward()
        ...     optimizer.step()
        >>> print(engine.statement(delta=1e-5))

    Each lot is released once, when the backward pass of its last physical batch ends: the parameters'
    ``.grad`` then hold the private gradient, and nothing else ever reaches them.

    Args:
        accountant: How the ledger is priced: ``"pld"`` (default), ``"rdp"``, ``"zcdp"`` or ``"gdp"``.
    """

    def __init__(self, *, accountant: str = "pld") -> None:
        self.accountant = accountant
        self._run: Run | None = None

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizers,
        data_loader: DataLoader[Any] | Dataset[Any],
        noise_multiplier: float,
        max_grad_norm: float,
        guidance: str | Guidance = "pca",
        mechanism: Mode = "ellipsoid",
        clipping: Literal["flat", "per_layer", "automatic", "adaptive"] = "flat",
        sample_rate: float | None = None,
        expected_batch_size: float | None = None,
        dataset_size: int | Literal["public"] | None = None,
        physical_batch_size: int | None = None,
        sampling: Literal["poisson", "shuffle"] = "poisson",
        loss_reduction: Literal["mean", "sum"] = "mean",
        secure: bool = False,
        seed: int | None = None,
        unsound: bool = False,
    ) -> tuple[nn.Module, Optimizers, PrivateLoader]:
        """Attach private training to a module, its optimizer and its data.

        Args:
            module: Any module; it keeps its class, attributes and ``state_dict``. Its present weights must be
                public: random, or trained on public data.
            optimizer: Any torch optimizer over the module's parameters, or several (one release serves all).
            data_loader: A ``DataLoader`` or a dataset with ``__len__`` and ``__getitem__``.
            noise_multiplier: σ: the noise's standard deviation over the clip norm.
            max_grad_norm: C: the clip norm, in the whitened space.
            guidance: What shapes the noise: ``"pca"`` of the weights, ``"history"`` of released gradients,
                ``"isotropic"``, or an object of your own (:class:`dphero.guidance.Guidance`).
            mechanism: ``"ellipsoid"`` (sound, the default), ``"ball"`` (sound), or ``"published"``, the paper's
                recipe, whose privacy is far weaker than claimed; it runs only with ``unsound=True``.
            clipping: ``"flat"``, ``"per_layer"``, ``"automatic"`` or ``"adaptive"``.
            sample_rate: q, the probability with which each example enters a lot. A public number.
            expected_batch_size: B, the public divisor of every sum; the loader's ``batch_size`` unless given.
            dataset_size: A public number of records, from which q = B / N; ``"public"`` declares ``len(dataset)``
                itself public.
            physical_batch_size: The most examples per forward pass; a lot then comes in several batches.
            sampling: ``"poisson"``, or ``"shuffle"``: fixed lots of a shuffled epoch, priced without
                amplification, for neighbours in which a record is blanked out.
            loss_reduction: Whether the loss is a ``"mean"`` or a ``"sum"`` over the examples of a batch.
            secure: Draw noise and lots from a cryptographic generator; never replayed, not even on resume.
            seed: Makes the run repeatable; the guarantee then holds only while the seed is secret.
            unsound: Consent to run ``mechanism="published"``.

        Returns:
            The module, the optimizer (both the very objects that were given) and the private loader.

        Raises:
            ValueError: For anything that cannot be made private as asked; nothing is changed then.
        """
        if self._run is not None:
            raise RuntimeError(
                "this engine already trains a model; call detach() first, or use another PrivacyEngine for another model"
            )
        _positive("noise_multiplier", noise_multiplier)
        _one_of("mechanism", mechanism, ("ellipsoid", "ball", "published"))
        _one_of("sampling", sampling, ("poisson", "shuffle"))
        _one_of("loss_reduction", loss_reduction, ("mean", "sum"))
        if mechanism == "published" and not unsound:
            raise ValueError(
                'mechanism="published" is the recipe as printed: its noise is weakest along some directions and its true '
                "ε is far above the claimed one. To study it, pass unsound=True; to train, use the ellipsoid."
            )
        if mechanism == "published" and sampling != "poisson":
            raise ValueError('mechanism="published" is priced for Poisson sampling alone; pass sampling="poisson"')
        if secure and seed is not None:
            raise ValueError("secure=True draws from the operating system; it takes no seed")
        if physical_batch_size is not None and physical_batch_size < 1:
            raise ValueError(f"physical_batch_size must be at least 1, got {physical_batch_size}")
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        require_private_modules(module)
        parameters = _trained_parameters(module, optimizers)
        _, size = dataset_of(data_loader)
        rate, lot = public_rate(
            data_loader,
            size,
            sample_rate=sample_rate,
            expected_batch_size=expected_batch_size,
            dataset_size=dataset_size,
        )
        if sampling == "shuffle" and not float(lot).is_integer():
            raise ValueError(f"shuffled lots have a fixed whole size, got expected_batch_size={lot}")
        key = None if secure else secrets.randbits(128) if seed is None else seed
        noise: NoiseSource = SecureNoise() if secure else FastNoise(seed)
        templates = describe(module, parameters)
        sampler: Sampler = (
            PoissonSampler(size, rate, key) if sampling == "poisson" else ShuffleSampler(size, int(lot), key)
        )
        lots = Lots()
        self._run = Run(
            module=module,
            optimizers=optimizers,
            parameters=parameters,
            mechanism=Mechanism(
                mechanism,
                parameters=parameters,
                templates={name: template.for_guidance for name, template in templates.items()},
                guidance=resolve(guidance),
                clipping=make_clipping(
                    clipping,
                    max_grad_norm,
                    expected_lot=lot,
                    layers={name: template.layer for name, template in templates.items()},
                ),
                noise=noise,
                noise_multiplier=float(noise_multiplier),
                expected_lot=lot,
                event=_pricing(mechanism, sampling, rate, lots, sampler),
                ledger=Ledger(),
            ),
            lots=lots,
            sampler=sampler,
            key=key,
            mean=loss_reduction == "mean",
        )
        loader = PrivateLoader(
            data_loader,
            sampler,
            lots,
            before_lot=self._run.before_lot,
            expected_batch_size=lot,
            physical_batch_size=physical_batch_size,
        )
        return module, optimizer, loader

    def make_private_with_epsilon(
        self,
        *,
        target_epsilon: float,
        target_delta: float,
        epochs: float | None = None,
        steps: int | None = None,
        module: nn.Module,
        optimizer: Optimizers,
        data_loader: DataLoader[Any] | Dataset[Any],
        max_grad_norm: float,
        sample_rate: float | None = None,
        expected_batch_size: float | None = None,
        dataset_size: int | Literal["public"] | None = None,
        sampling: Literal["poisson"] = "poisson",
        **options: Any,
    ) -> tuple[nn.Module, Optimizers, PrivateLoader]:
        """Attach private training with the noise that a target (ε, δ) needs, and stop before it is exceeded.

        Args:
            target_epsilon: ε to stay within.
            target_delta: δ.
            epochs: Length of the training in epochs of 1/q lots; or
            steps: its length in lots.
            module: See :meth:`make_private`, also for all other arguments.
            optimizer: The optimizer.
            data_loader: The data.
            max_grad_norm: C.
            sample_rate: q.
            expected_batch_size: B.
            dataset_size: A public number of records.
            sampling: Poisson; a shuffled epoch is not calibrated.
            options: Further arguments of :meth:`make_private`; unknown ones are an error there.

        Returns:
            As :meth:`make_private`. Drawing a lot beyond the budget raises :class:`~dphero.BudgetExhausted`.
        """
        if (epochs is None) == (steps is None):
            raise ValueError("give either epochs= or steps=")
        if "noise_multiplier" in options:
            raise ValueError("noise_multiplier follows from target_epsilon; use make_private to set it yourself")
        if options.get("mechanism") == "published":
            raise ValueError('mechanism="published" has no noise multiplier that would meet a target; use make_private')
        _one_of("sampling", sampling, ("poisson",))
        _, size = dataset_of(data_loader)
        public = {"sample_rate": sample_rate, "expected_batch_size": expected_batch_size, "dataset_size": dataset_size}
        rate, _ = public_rate(data_loader, size, **public)  # type: ignore[arg-type]
        if steps is None:
            assert epochs is not None
            steps = round(epochs * max(1, round(1 / rate)))
        if steps < 1:
            raise ValueError(f"training needs at least one step, got {steps}")
        noise_multiplier = calibrate_noise_multiplier(
            target_epsilon, target_delta, rate, steps, accountant=self.accountant
        )
        attached = self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            **public,  # type: ignore[arg-type]
            **options,
        )
        self.limit(target_epsilon, target_delta)
        return attached

    def limit(self, epsilon: float, delta: float) -> None:
        """Refuse, from now on, every lot that would take the run beyond (ε, δ)."""
        self._attached.mechanism.budget = Budget(epsilon, delta, accountant=self.accountant)

    # -- what it costs ------------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """What was released so far."""
        return self._attached.mechanism.ledger

    @property
    def noise_multiplier(self) -> float:
        """σ."""
        return self._attached.mechanism.noise_multiplier

    @property
    def steps(self) -> int:
        """Number of lots released."""
        return self._attached.mechanism.releases

    def get_epsilon(self, delta: float, *, accountant: str | None = None, coarse: bool = False) -> float:
        """Return ε at δ of what was released so far (0 before the first release).

        Args:
            delta: δ.
            accountant: Instead of the engine's own.
            coarse: A quicker, slightly larger, still valid bound, for live displays.
        """
        return price(self.ledger, delta, accountant or self._default_accountant, coarse=coarse).epsilon

    def statement(self, delta: float, *, unit: str = "one training example") -> Statement:
        """Return, in plain words, what is protected, at what price, and what is not covered."""
        run = self._attached
        notes = []
        if run.mechanism.mode == "published":
            notes.append("UNSOUND AS PUBLISHED: the noise is far weaker along some directions than the recipe claims.")
        if run.mechanism.noise.seeded:
            notes.append("The random seed was chosen by the user; the guarantee holds only while it stays secret.")
        return statement(self.ledger, delta, unit=unit, accountant=self._default_accountant, notes=tuple(notes))

    @property
    def _default_accountant(self) -> str:
        if self._run is not None and self._run.mechanism.mode == "published":
            return "filter"
        return self.accountant

    @property
    def diagnostics(self) -> Diagnostics:
        """What the data's owner may look at while tuning: private, outside every guarantee."""
        return self._attached.lot_sum.diagnostics

    # -- life ---------------------------------------------------------------------------------------------

    def save(self, path: str | PathLike[str], *, scheduler: Any = None, extra: Mapping[str, Any] | None = None) -> None:
        """Write model, optimizer, scheduler, noise, sampler, guidance and ledger, atomically.

        Args:
            path: File to write; an older one stays intact until the new one is complete.
            scheduler: Anything with ``state_dict``.
            extra: Whatever else the caller wants back from :meth:`load`: tensors and plain values.
        """
        checkpoint.save(path, self._attached.state_dict(), scheduler=scheduler, extra=extra)

    def load(self, path: str | PathLike[str], *, scheduler: Any = None) -> dict[str, Any]:
        """Continue a saved run; call it after ``make_private`` with the same arguments.

        Returns:
            The ``extra`` that was saved.
        """
        state, extra = checkpoint.load(path, scheduler=scheduler)
        self._attached.load_state_dict(state)
        return extra

    def paused(self) -> AbstractContextManager[None]:
        """Let the model run on other data (public, synthetic) inside a ``with`` block, untapped."""
        return self._attached.taps.paused()

    def detach(self) -> None:
        """Leave module and optimizer as they were before; the engine can then be used again."""
        self._attached.detach()
        self._run = None

    @property
    def _attached(self) -> Run:
        if self._run is None:
            raise RuntimeError("the engine trains no model yet: call make_private first")
        return self._run


def _trained_parameters(module: nn.Module, optimizers: list[Optimizer]) -> dict[str, nn.Parameter]:
    """Return the module's parameters that the optimizers train, by name."""
    if not optimizers or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        raise ValueError("optimizer must be a torch optimizer, or a list of them")
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    trained: dict[str, nn.Parameter] = {}
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) not in names:
                raise ValueError(
                    "the optimizer holds a parameter that is not the module's: it would be trained without privacy. Build "
                    "the optimizer from module.parameters(), after moving the module to its device."
                )
            if names[id(parameter)] in trained:
                raise ValueError(
                    f"two optimizers hold parameter {names[id(parameter)]!r}; one release can step it once"
                )
            if parameter.requires_grad:
                trained[names[id(parameter)]] = cast(nn.Parameter, parameter)
    if not trained:
        raise ValueError("the optimizer holds no parameter that requires a gradient: nothing would be trained")
    order = [name for name, _ in module.named_parameters() if name in trained]
    return {name: trained[name] for name in order}


def _pricing(mode: str, sampling: str, rate: float, lots: Lots, sampler: Sampler) -> Callable[[float], Event]:
    """Return what one release costs, given its effective noise multiplier."""
    if mode == "published":
        return lambda multiplier: AdaptiveGaussian(rate, multiplier)
    if sampling == "shuffle":
        return lambda multiplier: ShuffledGaussian(multiplier, lots.index // sampler.lots_per_epoch)
    return lambda multiplier: PoissonGaussian(rate, multiplier)


def _positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a positive number, got {value!r}")


def _one_of(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
