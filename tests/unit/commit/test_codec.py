"""Documents from classes: what is written is read back, and anything else is refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.commit.codec import Document
from tallystick.commit.encoding import canonical_json, parse_canonical_json
from tallystick.commit.field_rules import (
    Ascii,
    At,
    Elsewhere,
    Embedded,
    Hash,
    HashText,
    Hex,
    Least,
    Match,
    NotNegative,
    Positive,
    Row,
    Size,
    Spare,
    Via,
    Whole,
)
from tallystick.errors import InvalidInput

ROOT = bytes(range(32))


@dataclass(frozen=True)
class Inner(Document, form="test/inner/1", what="inner", limit=1 << 8):
    """A document in a document."""

    count: Positive
    name: Annotated[str, Match(re.compile("[a-z]+"), "letters")] = "a"


@dataclass(frozen=True)
class Pair(Document, what="pair"):
    """A list of two."""

    party: Literal["trainer", "auditor"]
    at: Whole


@dataclass(frozen=True)
class Outer(Document, form="test/outer/1", what="outer", limit=1 << 12, implied=("double",)):
    """One field of each kind."""

    root: Hash
    text: HashText
    data: Annotated[bytes, Hex(), Size(0, 4)]
    leaf: Annotated[bytes, Ascii()]
    size: NotNegative
    real: float
    flag: bool
    either: str | bool | int | None
    perhaps: Positive | None
    beacon: Annotated[int, At("beacon", "round"), Least(-1)]
    source: Annotated[str, At("beacon", "source"), Size(1, 3)]
    many: Annotated[tuple[Whole, ...], Size(0, 3)]
    two: tuple[str, Whole]
    names: Mapping[str, Whole]
    ends: Mapping[Literal["trainer", "auditor"], Hash]
    slots: Mapping[int, tuple[str, ...]]
    inner: Inner
    embedded: Annotated[Inner, Embedded()]
    pairs: tuple[Annotated[Pair, Row()], ...]
    upper: Annotated[str, Via(str.lower, lambda value, what: str(value).upper())]
    anything: object
    spare: Annotated[Mapping[str, str], Spare()] = field(default_factory=dict[str, str])
    elsewhere: Annotated[int, Elsewhere()] = 5

    @property
    def double(self) -> int:
        """Twice the round."""
        return 2 * self.beacon


WHOLE: dict[str, Any] = {
    "root": ROOT, "text": ROOT.hex(), "data": b"ab", "leaf": b"{}", "size": 0.5, "real": -1.5, "flag": True,
    "either": None, "perhaps": None, "beacon": 3, "source": "x", "many": (0, 1), "two": ("a", 0), "names": {"n": 1},
    "ends": {"trainer": ROOT, "auditor": ROOT}, "slots": {-1: ("a",), 2: ()}, "inner": Inner(1), "embedded": Inner(2, "b"),
    "pairs": (Pair("trainer", 1),), "upper": "UP", "anything": [1, {"x": None}],
}  # fmt: skip
OUTER = Outer(**WHOLE)
SAID: dict[str, Any] = OUTER.fields()


def test_one_value_of_each_kind_has_the_form_that_its_annotation_says() -> None:
    assert {
        "root": ROOT.hex(), "text": ROOT.hex(), "data": "6162", "leaf": "{}", "size": "0x1.0000000000000p-1",
        "real": "-0x1.8000000000000p+0", "flag": True, "either": None, "perhaps": None,
        "beacon": {"round": 3, "source": "x"}, "many": [0, 1], "two": ["a", 0], "names": {"n": 1},
        "ends": {"trainer": ROOT.hex(), "auditor": ROOT.hex()}, "slots": [[-1, ["a"]], [2, []]],
        "inner": {"count": 1, "format": "test/inner/1", "name": "a"},
        "embedded": '{"count":2,"format":"test/inner/1","name":"b"}', "pairs": [["trainer", 1]], "upper": "up",
        "anything": [1, {"x": None}], "double": 6, "format": "test/outer/1",
    } == SAID  # fmt: skip
    assert Outer.parse(OUTER.encode()) == OUTER
    assert Outer(**WHOLE, spare={"a": "b"}).fields()["spare"] == {"a": "b"}


LEFT_OUT = object()


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("root", LEFT_OUT, "outer: field 'root' is missing"),
        ("other", 1, "outer: field 'other' is unknown"),
        ("root", "00", "outer: root: must be 64"),
        ("root", 7, "outer: root must be a string, is 7"),
        ("text", ROOT.hex().upper(), "outer: text: must be 64 lower-case"),
        ("data", "0", "outer: data: must be 0 lower-case"),
        ("data", "00" * 5, "outer: data must have 0 to 4 bytes, has 5"),
        ("leaf", "\u00e9", "outer: leaf must be in ASCII"),
        ("size", "-0x1.0000000000000p-1", "outer: size must be at least 0, is -0.5"),
        ("size", "nan", "outer: size must be at least 0, is nan"),
        ("real", "0.5", "outer: real: '0.5' must be written"),
        ("real", 1, "outer: real must be a string, is 1"),
        ("flag", 1, "outer: flag must be true or false, is 1"),
        ("either", [], "outer: either must be a string or true or false or an integer or null, is a list"),
        ("perhaps", 0, "outer: perhaps must be 1 to 2**63 - 1, is 0"),
        ("perhaps", True, "outer: perhaps must be an integer, is true"),
        ("beacon", {"round": -2, "source": "x"}, "outer: beacon: round must be -1 to"),
        ("beacon", {"round": 1}, "outer: beacon: field 'source' is missing"),
        ("beacon", 3, "outer: beacon: must be an object, is 3"),
        ("beacon", {"round": 1, "source": ""}, "source must have 1 to 3 characters, has 0"),
        ("many", [0, 1, 2, 3], "outer: many must have 0 to 3 items, has 4"),
        ("many", [0, -1], "outer: many[1] must be 0 to"),
        ("many", [0, "1"], "outer: many[1] must be an integer, is '1'"),
        ("two", ["a"], "outer: two must be a list of 2, has 1"),
        ("two", ["a", True], "outer: two[1] must be an integer, is true"),
        ("names", {"n": -1}, "outer: names: 'n' must be 0 to"),
        ("names", [], "outer: names must be an object"),
        ("ends", {"trainer": ROOT.hex()}, "outer: ends: field 'auditor' is missing"),
        ("ends", {"trainer": ROOT.hex(), "auditor": ""}, "outer: ends: 'auditor': must be 64"),
        ("slots", [[2, []], [-1, []]], "outer: slots must ascend"),
        ("slots", [[2, []], [2, []]], "outer: slots must ascend"),
        ("inner", {"count": 1, "format": "test/inner/2", "name": "a"}, "outer: inner: format must be 'test/inner/1'"),
        ("inner", {"count": 1, "format": "test/inner/1", "name": "A"}, "inner: name must be letters, is 'A'"),
        ("embedded", '{"count":2, "format":"test/inner/1","name":"b"}', "outer: embedded: not the canonical encoding"),
        ("embedded", "x" * 300, "outer: embedded: 300 bytes exceed the limit of 256"),
        ("pairs", [["judge", 1]], "outer: pairs[0][0] must be one of trainer, auditor, is 'judge'"),
        ("pairs", [["trainer", 1, 1]], "outer: pairs[0] must be a list of 2, has 3"),
        ("double", 7, "outer: double must be 6, is 7"),
        ("format", "test/outer/2", "outer: format must be 'test/outer/1'"),
        ("spare", {}, "outer: spare must be left out where it is empty"),
    ],
)  # fmt: skip
def test_what_no_writer_writes_is_refused_by_its_name(field: str, value: object, reason: str) -> None:
    said = {name: each for name, each in (SAID | {field: value}).items() if each is not LEFT_OUT}
    with pytest.raises(InvalidInput, match=re.escape(reason)):
        Outer.parse(canonical_json(said))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"root": ROOT[:31]}, "outer: root: must be 64"),
        ({"perhaps": 0}, "outer: perhaps must be 1 to"),
        ({"many": (0, 2**63)}, "outer: many[1] must be 0 to 2**63 - 1"),
        ({"source": "long"}, "outer: beacon: source must have 1 to 3 characters"),
    ],
)
def test_a_rule_holds_for_an_object_that_nobody_parsed(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(reason)):
        Outer(**(WHOLE | changes))


def test_a_row_may_begin_with_a_word() -> None:
    assert Pair("auditor", 2).row("pair") == ["pair", "auditor", 2]
    assert Pair.read_row(["pair", "auditor", 2], "pair") == Pair("auditor", 2)
    with pytest.raises(InvalidInput, match="must be a list of 3 that begins with 'pair'"):
        Pair.read_row(["other", "auditor", 2], "pair")


@given(
    st.builds(
        Outer,
        **{
            name: st.just(value)
            for name, value in WHOLE.items()
            if name not in ("many", "names", "either", "real", "slots")
        },
        many=st.lists(st.integers(0, 2**63 - 1), max_size=3).map(tuple),
        names=st.dictionaries(st.text(st.characters(codec="utf-8")), st.integers(0, 2**63 - 1)),
        either=st.one_of(
            st.none(), st.booleans(), st.integers(-(2**62), 2**62), st.text(st.characters(codec="utf-8"))
        ),
        real=st.floats(allow_nan=False),
        slots=st.dictionaries(st.integers(-(2**62), 2**62), st.just(("x",)), max_size=4),
    )
)
def test_what_is_written_is_read_back(document: Outer) -> None:
    if len(data := document.encode()) <= 1 << 12:
        assert Outer.parse(data) == document


@given(
    st.sampled_from(sorted(SAID)),
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.text(), st.just([]), st.just({})),
)
def test_another_value_in_a_field_is_read_and_written_alike_or_refused(name: str, value: object) -> None:
    try:
        data = canonical_json(SAID | {name: value})
        read = Outer.parse(data)
    except InvalidInput:
        return
    if name != "upper":
        assert parse_canonical_json(read.encode(), what="again", limit=1 << 12) == SAID | {name: value}
