"""What a federated run promises: to the examples of each client, against everybody else, the server included."""

from __future__ import annotations

from collections.abc import Mapping

from dphero.accounting import Ledger, Statement, statement
from dphero.federated.settings import Federation
from dphero.methods import METHODS
from dphero.methods.recipe import Recipe

_SCAFFOLD = {
    ("scaffold", "update"): ("SCAFFOLD's control variates follow from the updates that were sent: no further charge.",),
    ("scaffold", "gradient"): ("SCAFFOLD's control variates are a second release in every round, and are charged.",),
}

_SHARED = {
    "generated": (
        "The shared data set was drawn from generators that the clients trained with noise: its price is in the "
        "ledgers, and nothing more.",
    ),
    "distilled": (
        "The shared data set holds noisy parts of examples, two copies, and their noisy labels: all of it is in the "
        "ledgers. Records are dealt out to slots at random; without a record, its slot holds noise alone.",
    ),
    "distilled-published": (
        "UNSOUND AS PUBLISHED: the shared data set holds parts of examples without clipping, one noise for 64 images "
        "(their differences have none), and true labels. Its price is infinite. Even with a noise for each image, "
        "0.15 and 0.25 on unclipped images of 28x28 pixels from 0 to 1 would cost an epsilon of about 2.5e4.",
    ),
}


def record_level(
    recipe: Recipe, federation: Federation, ledgers: Mapping[str, Ledger], worst: str | None, *, reported: bool = False
) -> Statement:
    """State what the examples of every client are promised: the price of the client that spent most.

    Args:
        recipe: How the clients train.
        federation: The settings.
        ledgers: What left each client.
        worst: The client whose ledger costs most; ``None`` if nothing left any client.
        reported: Whether the ledgers are what clients on other machines say they are.
    """
    card = METHODS[recipe.method].card
    ledger = ledgers[worst] if worst is not None else Ledger()
    adaptive = any(event.adaptive for event in ledger.counts)
    weighted = (
        "Updates are weighted by the clients' numbers of records, which are declared public."
        if federation.weights == "records"
        else "All updates weigh the same."
    )
    notes = [
        f"Worst client: {worst}. The price is that of its answers in all rounds; no other client's is higher."
        if worst is not None
        else "No client answered: nothing was released.",
        f"{len(ledgers)} of {federation.clients} clients answered at least once.",
        "Who adds the noise: each client, to its own gradients, before anything leaves it.",
        "Against whom: everybody but the client itself, the server and all other clients together included. The server "
        "knows who took part in which round, so that sampling clients earns nothing here.",
        "Who must be trusted: the client's own machine and the code that runs there; the server and the network need "
        "not be, for this promise.",
        f"{weighted} Losses and accuracies of clients are not sent.",
        "An example that several clients hold is protected by the sum of their prices.",
        *_SCAFFOLD.get((federation.strategy, federation.controls), ()),
        *_SHARED.get(federation.shared, ()),
    ]
    if reported:
        notes.append("The ledgers are those that the clients report; each client's own, on its own disk, decides.")
    if not card.sound:
        notes += list(card.flaws)
    if recipe.seed is not None:
        notes.append("The random seed was chosen by the user; the guarantee holds only while it stays secret.")
    return statement(
        ledger,
        recipe.delta,
        unit=f"{card.protects} of one client" if card.protects != "nothing" else "nothing",
        accountant="filter" if adaptive else recipe.accountant,
        notes=notes,
    )


def client_level(recipe: Recipe, federation: Federation, ledger: Ledger) -> Statement:
    """State what whole clients are promised, by the noise that the server adds.

    Args:
        recipe: For δ and the accountant.
        federation: The settings.
        ledger: What the server released.
    """
    notes = [
        f"Who adds the noise: the server, to the sum of updates that are clipped to length {federation.client_clip:g} "
        "and have equal weights.",
        "Against whom: everybody who sees the models, all other clients included, but not who took part in a round.",
        "Who must be trusted: the server, which sees every client's update, draws the clients and the noise, and keeps "
        "the names in metrics.jsonl to itself.",
    ]
    if recipe.seed is not None:
        notes.append("The random seed was chosen by the user; the guarantee holds only while it stays secret.")
    unit = "one client with all its examples"
    return statement(ledger, recipe.delta, unit=unit, accountant=recipe.accountant, notes=notes)
