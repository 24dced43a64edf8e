"""An objection to one operator of a list: which result, by what it was made (spec/dispute.md 4)."""

from __future__ import annotations

from dataclasses import dataclass

from tallystick.commit.encoding import (
    canonical_json,
    parse_document,
)
from tallystick.dispute.operator_list import LEAF_LIMIT, SIZE_LIMIT
from tallystick.errors import InvalidInput

OBJECTION_FORMAT = "tallystick/objection/1"


@dataclass(frozen=True)
class Objection:
    """What an auditor puts into its list in place of the first leaf it holds to be false.

    Attributes:
        index: of that leaf.
        output, element: where its value is wrong; or
        structure: its name, arguments, wiring or form is not what the job asks for (then both numbers are 0).
    """

    index: int
    output: int = 0
    element: int = 0
    structure: bool = False

    def __post_init__(self) -> None:
        if any(not 0 <= number < SIZE_LIMIT for number in (self.index, self.output, self.element)):
            raise InvalidInput("objection: a number is out of range")
        if self.structure and (self.output or self.element):
            raise InvalidInput("objection: a structure has no element")

    def encode(self) -> bytes:
        """Return the canonical JSON of the objection, which stands as a leaf in the auditor's list."""
        return canonical_json(
            {
                "element": self.element, "format": OBJECTION_FORMAT, "index": self.index, "output": self.output,
                "structure": self.structure,
            }
        )  # fmt: skip


def parse_objection(data: bytes) -> Objection:
    """Return the objection that ``data`` encodes.

    Raises:
        InvalidInput: ``data`` is not what ``Objection.encode`` returns.
    """
    what = "objection"
    names = ("element", "format", "index", "output", "structure")
    fields = parse_document(data, OBJECTION_FORMAT, what=what, limit=LEAF_LIMIT, names=names)
    numbers = (fields.integer("index"), fields.integer("output"), fields.integer("element"))
    return Objection(*numbers, fields.boolean("structure"))
