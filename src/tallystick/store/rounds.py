"""What a docket's journal says of each round of a dispute by files: when what was asked, and what has arrived."""

from __future__ import annotations

from dataclasses import dataclass, field

from tallystick.commit.encoding import Fields
from tallystick.dispute.terms import PARTIES, Party


@dataclass(frozen=True)
class Taken:
    """An answer that counts: when it was there, its file's length, digests of the file's first line and of what was signed."""

    at: int
    nbytes: int
    head: str
    payload: str


@dataclass
class Round:
    """One round: when it was posted, what was asked (digest, and length of the file), what has arrived, who was silent.

    ``delivered`` says whether every question has been written into its mailbox: before that, nobody's time has begun.
    """

    posted: int
    asked: dict[Party, tuple[str, int]]
    taken: dict[Party, Taken] = field(default_factory=dict[Party, Taken])
    silent: list[Party] = field(default_factory=list[Party])
    delivered: bool = False

    def fields(self) -> dict[str, object]:
        """Return the round as a JSON object."""
        return {
            "asked": {party: list(each) for party, each in self.asked.items()},
            "delivered": self.delivered,
            "posted": self.posted,
            "silent": list(self.silent),
            "taken": {party: vars(each) for party, each in self.taken.items()},
        }


def read_round(value: object) -> Round:
    """Return the round that a JSON object is.

    Raises:
        InvalidInput: a field is missing or malformed.
    """
    names = ("asked", "delivered", "posted", "silent", "taken")
    fields = Fields(value, what="journal: round", names=names)
    asked: dict[Party, tuple[str, int]] = {}
    taken: dict[Party, Taken] = {}
    silent = fields.items("silent")
    for party in PARTIES:
        match fields.mapping("asked").get(party):
            case [str(named), int(size)] if type(size) is int:
                asked[party] = named, size
            case _:
                pass
        if (stated := fields.mapping("taken").get(party)) is not None:
            each = Fields(stated, what="journal: answer", names=("at", "head", "nbytes", "payload"))
            taken[party] = Taken(
                each.integer("at"), each.integer("nbytes"), each.text("head"), each.text("payload")
            )
    was_silent: list[Party] = [party for party in PARTIES if party in silent]
    return Round(fields.integer("posted"), asked, taken, was_silent, fields.value("delivered") is True)
