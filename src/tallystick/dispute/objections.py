"""An objection to one operator of a list: which result, by what it was made (spec/dispute.md 4)."""

from __future__ import annotations

from dataclasses import dataclass

from tallystick.commit.codec import Document
from tallystick.dispute.operator_list import LEAF_LIMIT, SIZE_LIMIT
from tallystick.errors import InvalidInput

OBJECTION_FORMAT = "tallystick/objection/1"


@dataclass(frozen=True)
class Objection(Document, form=OBJECTION_FORMAT, what="objection", limit=LEAF_LIMIT):
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
        super().__post_init__()
        if any(not 0 <= number < SIZE_LIMIT for number in (self.index, self.output, self.element)):
            raise InvalidInput("objection: a number is out of range")
        if self.structure and (self.output or self.element):
            raise InvalidInput("objection: a structure has no element")


parse_objection = Objection.parse
