"""A method's card: what a reader must know before comparing its numbers."""

from __future__ import annotations

from dataclasses import dataclass

SEEDED = "The random seed was chosen by the user; the guarantee holds only while it stays secret."
"""A note for the privacy statement."""


@dataclass(frozen=True)
class Card:
    """What a reader must know of a method before comparing its numbers with another's.

    Attributes:
        name: On the command line.
        title: In a few words.
        protects: The protected unit: what one record of the guarantee is.
        relation: Which data sets are neighbours.
        sampling: How examples come into a step.
        paper: Where it was published.
        priced: How its ε is computed here.
        flaws: Known flaws, of the paper or of its published figures.
        extra_data: Data beyond the private set that it needs, or empty.
        sound: Whether the price printed here is a proven bound for what was released.
    """

    name: str
    title: str
    protects: str
    relation: str
    sampling: str
    paper: str
    priced: str
    flaws: tuple[str, ...] = ()
    extra_data: str = ""
    sound: bool = True
