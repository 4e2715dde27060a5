"""The privacy engine: puts the parts together. No mathematics here.

lot ─► taps ─► norms ─► clip ─► sum ─► noise ─► optimizer
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from numbers import Integral
from os import PathLike
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from dphero import checkpoint
from dphero._checks import closest, one_of, positive, whole
from dphero.accounting import (
    ACCOUNTANTS,
    DEFAULT_FILTER_ORDER,
    AdaptiveGaussian,
    Budget,
    Event,
    Ledger,
    PoissonGaussian,
    Price,
    ShuffledGaussian,
    Statement,
    calibrate_noise_multiplier,
    price,
    statement,
)
from dphero.checks.modules import require_private_modules, trained_parameters
from dphero.checks.optimizers import innermost
from dphero.guidance import Guidance, resolve
from dphero.mechanism.clipping import make_clipping
from dphero.mechanism.lot_sum import Diagnostics
from dphero.mechanism.parameters import describe
from dphero.mechanism.release import Mechanism, Mode
from dphero.noise import FastNoise, NoiseSource, SecureNoise
from dphero.run import Run, require_free
from dphero.sampling import (
    Lots,
    PoissonSampler,
    PrivateLoader,
    Sampler,
    ShuffleSampler,
    dataset_of,
    describe_data,
    public_lot,
    public_rate,
    require_same_data,
)

__all__ = ["PrivacyEngine"]

logger = logging.getLogger(__name__)

Optimizers = Optimizer | Sequence[Optimizer]

_UNSOUND = "UNSOUND AS PUBLISHED: the noise is far weaker along some directions than the recipe claims."
_KEY_SHARED = (
    "Another run of the same process used the same key of noise (a seed, or a checkpoint continued twice). Its noise "
    "was another wherever its sums were; if both runs are published, their budgets add up."
)
_SET_ANEW = (
    "The noise was set anew after {} releases ({}; then {}). The bound holds if that was decided beforehand, or from "
    "public things. If it was decided by what had come out, composition is fully adaptive, for which this bound is not "
    "proven: only a Rényi filter that was fixed before the first release covers that."
)
_RAISED = "The limit was raised from {} to {} after releases had been made: the first limit is no longer kept."
_SEEDED = "The random seed was chosen by the user; the guarantee holds only while it stays secret."


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
        one_of("accountant", accountant, tuple(ACCOUNTANTS))
        self.accountant = accountant
        self._run: Run | None = None
        self._ledger = Ledger()
        self._used: set[str] = set()  # marks of the keys of noise: none may be used again
        self._past_notes: dict[str, None] = {}
        self._described: dict[str, Any] | None = None  # the data, for checkpoints
        self._budget: Budget | None = None  # it outlives a training, as the ledger does

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
        cuda_graphs: bool = False,
        pad_to: int | Sequence[int] | None = None,
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
            secure: Draw the noise from a cryptographic generator and each lot from fresh randomness; nothing is
                replayed, not even on resume.
            seed: Makes the run repeatable; the guarantee then holds only while the seed is secret.
            unsound: Consent to run ``mechanism="published"``.
            cuda_graphs: Record the model's forward and backward pass on the GPU once and replay it: the same results,
                up to rounding. It pays for models of many small operations. Python in ``forward`` then runs only when a
                recording is made, so ``forward`` must do the same for every batch of one shape.
            pad_to: A public length to which all examples are padded, where the loader's ``collate_fn`` pads each batch
                to its longest example; or several, and each example is padded to the smallest that is long enough.
                Needed unless the model ignores padding, which is tried out.

        Returns:
            The module, the optimizer (both the very objects that were given) and the private loader.

        Raises:
            ValueError: For anything that cannot be made private as asked; nothing is changed then.
        """
        if self._run is not None:
            raise RuntimeError(
                "this engine already trains a model; call detach() first, or use another PrivacyEngine for another one"
            )
        positive("noise_multiplier", noise_multiplier)
        one_of("mechanism", mechanism, ("ellipsoid", "ball", "published"))
        one_of("sampling", sampling, ("poisson", "shuffle"))
        one_of("loss_reduction", loss_reduction, ("mean", "sum"))
        one_of("cuda_graphs", cuda_graphs, (False, True))
        if physical_batch_size is not None:
            whole("physical_batch_size", physical_batch_size)
        lengths = () if pad_to is None else (pad_to,) if isinstance(pad_to, int) else tuple(pad_to)
        for length in lengths:
            whole("pad_to", length)
        if mechanism == "published":
            _require_consent(unsound, sampling)
            if clipping == "adaptive":  # the noise on its count would not follow the geometry that the price assumes
                raise ValueError('mechanism="published" cannot be priced with clipping="adaptive"; use "flat"')
        noise, key = self._sources(secure, seed)
        given = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
        optimizers: list[Optimizer] = [innermost(each) for each in given]
        require_private_modules(module)
        require_free(module)
        parameters = trained_parameters(module, optimizers)
        _, size = dataset_of(data_loader)
        lots = Lots()
        if sampling == "poisson":
            rate, lot = public_rate(
                data_loader,
                size,
                sample_rate=sample_rate,
                expected_batch_size=expected_batch_size,
                dataset_size=dataset_size,
            )
            sampler: Sampler = PoissonSampler(size, rate, key)
            event = _poisson_event(mechanism, rate)
        else:
            lot = _fixed_lot(data_loader, sample_rate, expected_batch_size)
            sampler = ShuffleSampler(size, int(lot), key, first_epoch=_next_epoch(self._ledger))
            event = _shuffled_event(sampler, lots)
        relation = event(noise_multiplier).relation
        if self._ledger.relation not in (None, relation):
            raise ValueError(
                f"this engine's ledger is about neighbours under {self._ledger.relation!r}, sampling={sampling!r} is "
                f"about {relation!r}: their prices do not add up. Use another PrivacyEngine."
            )
        templates = describe(module, parameters)
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
                    noise_multiplier=float(noise_multiplier),
                    layers={name: template.layer for name, template in templates.items()},
                ),
                noise=noise,
                noise_multiplier=float(noise_multiplier),
                expected_lot=lot,
                event=event,
                ledger=self._ledger,
            ),
            lots=lots,
            sampler=sampler,
            usual_rows=min(sampler.usual_size, physical_batch_size or sampler.usual_size),
            loss_reduction=loss_reduction,
            cuda_graphs=cuda_graphs,
        )
        self._used |= _mark(noise)
        self._source, self._described = (data_loader, size), None
        self._run.mechanism.budget = self._budget = self._budget_of(self._accountant)
        self._note_if_set_anew(event(float(noise_multiplier)))
        loader = PrivateLoader(
            data_loader,
            sampler,
            lots,
            before_lot=self._run.before_lot,
            before_batch=self._run.before_batch,
            handed_out=self._run.handed_out,
            expected_batch_size=lot,
            physical_batch_size=physical_batch_size,
            pad_to=lengths,
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
            options: Further arguments of :meth:`make_private`; unknown ones are an error.

        Returns:
            As :meth:`make_private`. Drawing a lot beyond the budget raises :class:`~dphero.BudgetExhausted`.
        """
        _require_known(options, self.make_private)
        if (epochs is None) == (steps is None):
            raise ValueError("give either epochs= or steps=")
        if "noise_multiplier" in options:
            raise ValueError("noise_multiplier follows from target_epsilon; use make_private to set it yourself")
        if options.get("mechanism") == "published":
            raise ValueError('mechanism="published" has no noise multiplier that would meet a target; use make_private')
        one_of("sampling", sampling, ("poisson",))
        _, size = dataset_of(data_loader)
        public = {"sample_rate": sample_rate, "expected_batch_size": expected_batch_size, "dataset_size": dataset_size}
        rate, _ = public_rate(data_loader, size, **public)  # type: ignore[arg-type]
        if steps is None:
            assert epochs is not None
            positive("epochs", epochs)
            steps = max(1, round(epochs * PoissonSampler(size, rate, None).lots_per_epoch))
        whole("steps", steps)
        if self._ledger.steps:
            raise RuntimeError(
                f"this engine has made {self._ledger.steps} releases already, which the target would have to cover "
                "too. Use make_private with a noise_multiplier and limit(), or another PrivacyEngine for other data."
            )
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
        """Refuse, from now on, every lot that would take what this engine released beyond (ε, δ).

        The limit outlives :meth:`detach`, and goes with checkpoints: of a checkpoint's and the engine's own, the
        smaller one holds after :meth:`load`. To raise it, call this again; a note in the statement then says so.
        For ``mechanism="published"`` this is a Rényi filter, whose size must be fixed before the first release. To
        resume such a run, set the same limit before :meth:`load`.
        """
        run = self._attached
        if self._accountant == "filter" and self.ledger.steps:
            raise RuntimeError('with mechanism="published" a limit must be set before the first step of this engine')
        before, self._budget = self._budget, Budget(epsilon, delta, accountant=self._accountant)
        run.mechanism.budget = self._budget
        if before is not None and self.ledger.steps and (epsilon > before.epsilon or delta > before.delta):
            note = _RAISED.format(f"({before.epsilon:g}, {before.delta:g})", f"({epsilon:g}, {delta:g})")
            logger.warning("%s", note)
            self._past_notes[note] = None

    def _budget_of(self, accountant: str) -> Budget | None:
        """Return the engine's limit for a training that is about to begin."""
        budget = self._budget
        if budget is None or budget.accountant == accountant or self._ledger.steps:
            return budget
        return Budget(budget.epsilon, budget.delta, accountant=accountant)

    def _stricter_budget(self, saved: Sequence[Any] | None) -> Budget | None:
        """Return the smaller of the limits of a checkpoint and of this engine.

        Raises:
            ValueError: If neither is the smaller one.
        """
        ours = self._budget
        if saved is None:
            return ours
        theirs = Budget(saved[0], saved[1], saved[2], filter_order=saved[3])
        if ours is None:
            return theirs
        if ours.delta != theirs.delta:
            raise ValueError(
                f"the checkpoint has limit({theirs.epsilon:g}, {theirs.delta:g}), this engine limit({ours.epsilon:g}, "
                f"{ours.delta:g}): at different δ neither is the stricter one. Load without a limit, or with that δ"
            )
        if ours.epsilon > theirs.epsilon:
            logger.info("The limit of the checkpoint, ε %g, stays: it is stricter than %g.", saved[0], ours.epsilon)
            return Budget(theirs.epsilon, theirs.delta, ours.accountant)
        return ours

    def _note_if_set_anew(self, event: Event) -> None:
        """Note if a training releases otherwise than those before it: somebody chose that after outputs were seen."""
        names = ("noise_multiplier", "sample_rate")
        now = {name: getattr(event, name, None) for name in names}
        for earlier in self._ledger.counts:
            then = {name: getattr(earlier, name, None) for name in names}
            if type(earlier) is type(event) and then != now:
                was, is_now = ("σ {noise_multiplier}, q {sample_rate}".format(**each) for each in (then, now))
                self._past_notes[_SET_ANEW.format(self._ledger.steps, was, is_now)] = None

    # -- what it costs ------------------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """What was released so far, by all training with this engine; it stays after :meth:`detach`."""
        return self._ledger if self._run is None else self._run.mechanism.ledger

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
        return self.price(delta, accountant=accountant, coarse=coarse).epsilon

    def price(self, delta: float, *, accountant: str | None = None, coarse: bool = False) -> Price:
        """Return ε at δ of what was released so far, with what it is a bound for; arguments as :meth:`get_epsilon`."""
        order = self._filter.filter_order if self._filter else DEFAULT_FILTER_ORDER
        return price(self.ledger, delta, accountant or self._accountant, coarse=coarse, filter_order=order)

    def statement(self, delta: float, *, unit: str = "one training example") -> Statement:
        """Return, in plain words, what is protected, at what price, and what is not covered."""
        made = statement(self.ledger, delta, unit=unit, accountant=self._accountant, notes=self._notes)
        if self._filter and self._filter.delta == delta:
            made = replace(made, price=self._filter.guarantee(self.ledger))
        return made

    @property
    def _accountant(self) -> str:
        published = self._run is not None and self._run.mechanism.mode == "published"
        return "filter" if published or any(event.adaptive for event in self.ledger.counts) else self.accountant

    @property
    def _filter(self) -> Budget | None:
        """The Rényi filter that was set before a run whose noise depends on earlier outputs."""
        budget = self._run.mechanism.budget if self._run is not None else None
        return budget if budget is not None and budget.accountant == "filter" else None

    @property
    def _notes(self) -> tuple[str, ...]:
        mechanism = self._run.mechanism if self._run is not None else None
        if mechanism is not None and mechanism.mode == "published":
            self._past_notes[_UNSOUND] = None
        if mechanism is not None and mechanism.noise.seeded:
            self._past_notes[_SEEDED] = None
        if mechanism is not None and getattr(mechanism.noise, "key_shared", False):
            self._past_notes[_KEY_SHARED] = None
        self._past_notes |= dict.fromkeys(self._run.notes if self._run is not None else ())
        return tuple(self._past_notes)

    @property
    def diagnostics(self) -> Diagnostics:
        """What the data's owner may look at while tuning: private, outside every guarantee."""
        return self._attached.lot_sum.diagnostics

    # -- life ---------------------------------------------------------------------------------------------

    def save(self, path: str | PathLike[str], *, scheduler: Any = None, extra: Mapping[str, Any] | None = None) -> None:
        """Write model, optimizer, scheduler, noise, sampler, guidance and ledger, atomically.

        The file holds the key of the noise: keep it as secret as the data. To publish the model, save its own
        ``state_dict``.

        Args:
            path: File to write; an older one stays intact until the new one is complete.
            scheduler: Anything with ``state_dict``.
            extra: Whatever else the caller wants back from :meth:`load`: tensors and plain values.
        """
        if self._described is None:
            self._described = describe_data(*self._source)
        budget = self._budget
        state = {
            **self._attached.state_dict(),
            "notes": list(self._notes),
            "used_keys": sorted(self._used),
            "data": self._described,
            "budget": budget and [budget.epsilon, budget.delta, budget.accountant, budget.filter_order],
        }
        with self._attached.lots.generators.set_aside():  # a resumed run draws a batch's random numbers anew
            checkpoint.save(path, state, scheduler, extra)

    def load(self, path: str | PathLike[str], *, scheduler: Any = None) -> dict[str, Any]:
        """Continue a saved run, exactly as it would have gone on.

        Call it on a fresh engine, after ``make_private`` with the same arguments. With ``secure=True`` the noise is
        new instead of repeated; releases that were made after the file was written, and seen by anyone, are then not in
        its ledger.

        Returns:
            The ``extra`` that was saved.

        Raises:
            ValueError: If the file is damaged, or belongs to another run or to other data; nothing is changed then.
        """
        saved = checkpoint.load(path)
        if (saved.scheduler is None) != (scheduler is None):
            how = "without" if saved.scheduler is None else "with"
            raise ValueError(f"{path} was saved {how} a scheduler; load it the same way")
        run, data = self._attached, saved.engine.get("data")  # older files do not tell
        if data is not None:
            require_same_data(data, *self._source)
        budget = self._stricter_budget(saved.engine.get("budget"))
        with checkpoint.unchanged_on_failure(*([] if scheduler is None else [scheduler])):
            if scheduler is not None:
                scheduler.load_state_dict(saved.scheduler)
            saved.restore_random()  # it may fail; and again below, since the next line moves generators
            run.load_state_dict(saved.engine)
        saved.restore_random()
        # nothing was released before: what is known of earlier training is what the file says (older ones are silent)
        self._past_notes = dict.fromkeys(saved.engine.get("notes", ()))
        self._used = {*saved.engine.get("used_keys", ()), *_mark(run.mechanism.noise)}
        self._described, self._budget, run.mechanism.budget = data, budget, budget
        return saved.extra

    def paused(self) -> AbstractContextManager[None]:
        """Let the model run untapped on other data (public, synthetic) inside a ``with`` block.

        Gradients computed inside are ordinary ones, and are gone at its end: they never reach the optimizer.
        """
        return self._attached.paused()

    def detach(self) -> None:
        """Leave module and optimizer as they were before; the engine can then be used again, its ledger goes on."""
        self._notes  # noqa: B018 (they outlive the run)
        self._ledger = self._attached.mechanism.ledger
        self._attached.detach()
        self._run = None

    @property
    def _attached(self) -> Run:
        if self._run is None:
            raise RuntimeError("the engine trains no model: call make_private first")
        return self._run

    def _sources(self, secure: bool, seed: int | None) -> tuple[NoiseSource, int | None]:
        """Return the noise, and the key of the lots: secret, and another one than that of the noise."""
        if secure and seed is not None:
            raise ValueError("secure=True draws from the operating system; it takes no seed")
        if secure:
            return SecureNoise(), None
        if seed is None:
            return FastNoise(), secrets.randbits(128)
        seed = _whole_seed(seed)
        noise = FastNoise(seed)
        if _mark(noise) & self._used:
            raise ValueError(f"this engine has used seed {seed} already: the same noise would be added a second time")
        return noise, int.from_bytes(hashlib.blake2b(f"lots {seed}".encode(), digest_size=16).digest())


def _whole_seed(seed: Any) -> int:
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise ValueError(f"seed must be a whole number, got {seed!r}")
    return int(seed)


def _mark(noise: NoiseSource) -> set[str]:
    """Return a hash by which the key of a noise source is known again; none if its key is never repeated."""
    key = noise.state_dict().get("key")
    return set() if key is None else {hashlib.blake2b(f"used {key}".encode(), digest_size=16).hexdigest()}


def _require_consent(unsound: bool, sampling: str) -> None:
    if not unsound:
        raise ValueError(
            'mechanism="published" is the recipe as printed: its noise is weakest along some directions and its true '
            "ε is far above the claimed one. To study it, pass unsound=True; to train, use the ellipsoid."
        )
    if sampling != "poisson":
        raise ValueError('mechanism="published" is priced for Poisson sampling alone; pass sampling="poisson"')


def _fixed_lot(source: DataLoader[Any] | Dataset[Any], sample_rate: float | None, expected: float | None) -> float:
    """Return the size of shuffled lots."""
    if sample_rate is not None:
        raise ValueError('sampling="shuffle" has no sample_rate: every example takes part once in an epoch')
    lot = public_lot(source, expected)
    if lot is None or not float(lot).is_integer():
        raise ValueError(f"shuffled lots have a fixed whole size: give it as expected_batch_size=, got {lot}")
    return float(lot)


def _poisson_event(mechanism: Mode, rate: float) -> Callable[[float], Event]:
    """Return what a release of a Poisson lot costs, given its effective noise multiplier."""
    return partial(AdaptiveGaussian if mechanism == "published" else PoissonGaussian, rate)


def _shuffled_event(sampler: ShuffleSampler, lots: Lots) -> Callable[[float], Event]:
    """Return what the release of the next shuffled lot costs, given its effective noise multiplier."""
    return lambda multiplier: ShuffledGaussian(multiplier, sampler.epoch(lots.next))


def _next_epoch(ledger: Ledger) -> int:
    """Return a number that no shuffled epoch has had: a second permutation under an old one would ride for free."""
    return 1 + max((event.epoch for event in ledger.counts if isinstance(event, ShuffledGaussian)), default=-1)


def _require_known(options: Mapping[str, Any], method: Callable[..., Any]) -> None:
    known = inspect.signature(method).parameters
    for name in options.keys() - known.keys():
        hint = closest(name, known, f"the arguments are {', '.join(known)}")
        raise TypeError(f"make_private_with_epsilon got an unexpected argument {name!r}; {hint}")
