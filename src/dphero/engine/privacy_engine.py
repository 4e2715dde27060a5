"""``PrivacyEngine``: makes a model, its optimizer and its data private, and says what that costs.

lot ─► taps ─► norms ─► clip ─► sum ─► noise ─► optimizer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from dphero import checkpoint
from dphero._checks import one_of, positive, whole
from dphero.accounting import ACCOUNTANTS, Ledger, Price, Statement, calibrate_noise_multiplier
from dphero.engine.account import Account
from dphero.engine.assembly import assemble
from dphero.engine.options import Clipping, Options, require_known
from dphero.guidance import Guidance
from dphero.mechanism.lot_sum import Diagnostics
from dphero.mechanism.modes import Mode
from dphero.noise import NoiseSource
from dphero.run import Run
from dphero.sampling import PoissonSampler, PrivateLoader, dataset_of, describe_data, public_rate, require_same_data

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
        one_of("accountant", accountant, tuple(ACCOUNTANTS))
        self.accountant = accountant
        self._account = Account(accountant)
        self._run: Run | None = None
        self._source: DataLoader[Any] | Dataset[Any]  # the data of that run
        self._described: dict[str, Any] | None = None  # these data, for checkpoints

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
        clipping: Clipping = "flat",
        sample_rate: float | None = None,
        expected_batch_size: float | None = None,
        dataset_size: int | Literal["public"] | None = None,
        physical_batch_size: int | Literal["auto"] | None = None,
        sampling: Literal["poisson", "shuffle"] = "poisson",
        loss_reduction: Literal["mean", "sum"] = "mean",
        secure: bool = False,
        seed: int | None = None,
        noise: NoiseSource | None = None,
        unsound: bool = False,
        cuda_graphs: bool | Literal["auto"] = "auto",
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
                ``"isotropic"``, a :class:`dphero.guidance.Prior`, or a :class:`dphero.guidance.Guidance` of your own.
            mechanism: ``"ellipsoid"`` (sound, the default), ``"ball"`` (sound), or ``"published"``, the paper's
                recipe, whose privacy is far weaker than claimed; it runs only with ``unsound=True``.
            clipping: ``"flat"``, ``"per_layer"``, ``"automatic"``, ``"adaptive"``, or a rule of your own (docs/extend).
            sample_rate: q, the probability with which each example enters a lot. A public number.
            expected_batch_size: B, the public divisor of every sum; the loader's ``batch_size`` unless given.
            dataset_size: A public number of records, from which q = B / N; ``"public"`` declares ``len(dataset)``
                itself public.
            physical_batch_size: The most examples per forward pass; a lot then comes in several batches. ``"auto"``: as
                many as fit in the memory of the GPU, found by measuring the first batches; on a CPU at most 256.
            sampling: ``"poisson"``, or ``"shuffle"``: fixed lots of a shuffled epoch, priced without
                amplification, for neighbours in which a record is blanked out.
            loss_reduction: Whether the loss is a ``"mean"`` or a ``"sum"`` over the examples of a batch.
            secure: Draw the noise from a cryptographic generator and each lot from fresh randomness; nothing is
                replayed, not even on resume.
            seed: Makes the run repeatable; the guarantee then holds only while the seed is secret.
            noise: A noise source of your own (docs/extend); each lot is then drawn from fresh randomness.
            unsound: Consent to run ``mechanism="published"``.
            cuda_graphs: Whether the model's forward and backward pass on a GPU is recorded and replayed: the same
                results, up to rounding, without the time that Python takes to start each operation. ``"auto"``: after
                the first batches, where that is found to pay and to be safe; a line in the log says what was decided.
                ``True``: at once, or an error says why not. In a recorded model Python in ``forward`` no longer runs.
            pad_to: A public length to which all examples are padded, where the loader's ``collate_fn`` pads each batch
                to its longest example; or several, and each example is padded to the smallest that is long enough.
                Needed unless the model ignores padding, which is tried out.

        Returns:
            The module, the optimizer (both the very objects that were given) and the private loader.

        Raises:
            ValueError: For anything that cannot be made private as asked; nothing is changed then.
        """
        options = Options(
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            guidance=guidance,
            mechanism=mechanism,
            clipping=clipping,
            sample_rate=sample_rate,
            expected_batch_size=expected_batch_size,
            dataset_size=dataset_size,
            physical_batch_size=physical_batch_size,
            sampling=sampling,
            loss_reduction=loss_reduction,
            secure=secure,
            seed=seed,
            noise=noise,
            unsound=unsound,
            cuda_graphs=cuda_graphs,
            pad_to=pad_to,
        )
        if self._run is not None:
            raise RuntimeError(
                "this engine already trains a model; call detach() first, or use another PrivacyEngine for another one"
            )
        self._run, loader = assemble(options, module, optimizer, data_loader, self._account)
        self._source, self._described = data_loader, None
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

        The training takes ``epochs`` of 1/q lots, or ``steps`` lots; a shuffled epoch is not calibrated. All other
        arguments, and what is returned, are those of :meth:`make_private`; unknown ones are an error. Drawing a lot
        beyond the budget raises :class:`~dphero.BudgetExhausted`.
        """
        require_known(options, self.make_private)
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
            steps = max(1, round(positive("epochs", epochs) * PoissonSampler(size, rate, None).lots_per_epoch))
        whole("steps", steps)
        if self.ledger.steps:
            raise RuntimeError(
                f"this engine has made {self.ledger.steps} releases already, which the target would have to cover "
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

    # -- what it costs ------------------------------------------------------------------------------------

    def limit(self, epsilon: float, delta: float) -> None:
        """Refuse, from now on, every lot that would take what this engine released beyond (ε, δ).

        The limit outlives :meth:`detach`, and goes with checkpoints: of a checkpoint's and the engine's own, the
        smaller one holds after :meth:`load`. To raise it, call this again; a note in the statement then says so.
        For ``mechanism="published"`` this is a Rényi filter, whose size must be fixed before the first release. To
        resume such a run, set the same limit before :meth:`load`.
        """
        self._attached  # noqa: B018 (there must be a training)
        self._account.limit(epsilon, delta)

    @property
    def ledger(self) -> Ledger:
        """What was released so far, by all training with this engine; it stays after :meth:`detach`."""
        return self._account.ledger

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

        ``accountant`` takes the place of the engine's own. ``coarse`` is a quicker, slightly larger, still valid bound,
        for live displays.
        """
        return self.price(delta, accountant=accountant, coarse=coarse).epsilon

    def price(self, delta: float, *, accountant: str | None = None, coarse: bool = False) -> Price:
        """Return ε at δ of what was released so far, with what it is a bound for; arguments as :meth:`get_epsilon`."""
        return self._account.price(delta, accountant, coarse=coarse)

    def statement(self, delta: float, *, unit: str = "one training example") -> Statement:
        """Return, in plain words, what is protected, at what price, and what is not covered."""
        return self._account.statement(delta, unit, [] if self._run is None else self._run.notes)

    @property
    def diagnostics(self) -> Diagnostics:
        """What the data's owner may look at while tuning: private, outside every guarantee."""
        return self._attached.lot_sum.diagnostics

    # -- life ---------------------------------------------------------------------------------------------

    def save(self, path: str | PathLike[str], *, scheduler: Any = None, extra: Mapping[str, Any] | None = None) -> None:
        """Write model, optimizer, scheduler, noise, sampler, guidance and ledger, atomically.

        The file holds the key of the noise: keep it as secret as the data. To publish the model, save its own
        ``state_dict``. An older file stays intact until the new one is complete.

        Args:
            path: File to write.
            scheduler: Anything with ``state_dict``.
            extra: Whatever else the caller wants back from :meth:`load`: tensors and plain values.
        """
        if self._described is None:
            self._described = describe_data(self._source, dataset_of(self._source)[1])
        state = {
            **self._attached.state_dict(),
            **self._account.state_dict(self._attached.notes),
            "data": self._described,
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
            require_same_data(data, self._source, dataset_of(self._source)[1])
        budget = self._account.stricter_budget(saved.engine.get("budget"))
        with checkpoint.unchanged_on_failure(*([] if scheduler is None else [scheduler])):
            if scheduler is not None:
                scheduler.load_state_dict(saved.scheduler)
            saved.restore_random()  # it may fail; and again below, since the next line moves generators
            run.load_state_dict(saved.engine)
        saved.restore_random()
        # nothing was released before: what is known of earlier training is what the file says
        self._account.load_state_dict(saved.engine, budget)
        self._described = data
        return saved.extra

    def paused(self) -> AbstractContextManager[None]:
        """Let the model run untapped on other data (public, synthetic) inside a ``with`` block.

        Gradients computed inside are ordinary ones, and are gone at its end: they never reach the optimizer.
        """
        return self._attached.paused()

    def detach(self) -> None:
        """Leave module and optimizer as they were before; the engine can then be used again, its ledger goes on."""
        run = self._attached
        self._account.end(run.notes)
        run.detach()
        self._run = None

    @property
    def _attached(self) -> Run:
        if self._run is None:
            raise RuntimeError("the engine trains no model: call make_private first")
        return self._run
