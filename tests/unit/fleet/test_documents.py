"""Bounds of fleet's documents: a case just inside each, and one just outside."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

import pytest

from tallystick.commit.codec import Document
from tallystick.commit.encoding import canonical_json
from tallystick.commit.field_rules import Secret, Via, hexed
from tallystick.errors import InvalidInput, StoreError
from tallystick.fleet.agent.memory import Region, SnapshotOpening
from tallystick.fleet.attestation.spdm import MeasurementReference
from tallystick.fleet.attestation.tpm import PcrReference
from tallystick.fleet.registry.event_bodies import BODIES, MOST_CHIPS_IN_AN_EVENT
from tallystick.fleet.tables import read_table
from tallystick.store.documents import read_document


@dataclass(frozen=True)
class Word:
    data: bytes

    def encode(self) -> bytes:
        return self.data


def parse_word(data: bytes, *, what: str) -> Word:
    if data == b"no":
        raise InvalidInput(f"{what}: is no")
    return Word(data)


@dataclass(frozen=True)
class Held(Document, form="test/held/1", what="held", limit=200):
    word: Annotated[Word, hexed(parse_word, most=3)]
    secret: Secret = field(repr=False)


HELD = Held(Word(b"abc"), bytes(range(32)))


def test_an_encodable_and_a_secret_stand_there_in_hexadecimal() -> None:
    assert Held.parse(HELD.encode()) == HELD
    assert HELD.fields()["word"] == "616263"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"word": "61626364"}, "held: word must be hexadecimal of at most 3 bytes"),
        ({"word": 1}, "held: word must be hexadecimal"),
        ({"word": "6"}, "lower-case hexadecimal"),
        ({"word": "6E6F"}, "lower-case hexadecimal"),
        ({"word": "6e6f"}, "held: word: is no"),
        ({"secret": "ab" * 31}, "held: secret must be 64 lower-case hexadecimal digits"),
        ({"secret": "ab" * 33}, "held: secret must be 64 lower-case hexadecimal digits"),
        ({"secret": "AB" * 32}, "held: secret must be 64 lower-case hexadecimal digits"),
        ({"secret": None}, "held: secret must be 64 lower-case hexadecimal digits"),
    ],
)
def test_what_is_no_encoding_is_refused_and_a_secret_is_never_shown(
    change: dict[str, object], reason: str
) -> None:
    with pytest.raises(InvalidInput) as problem:
        Held.parse(canonical_json(HELD.fields() | change))
    assert reason in str(problem.value)
    assert "ab" * 16 not in str(problem.value).lower()


def test_a_document_is_read_from_its_file_and_named_after_it(tmp_path: Path) -> None:
    path = tmp_path / "held.json"
    path.write_bytes(HELD.encode())
    assert read_document(Held, path) == HELD
    path.write_bytes(HELD.encode() + b"\n")
    with pytest.raises(InvalidInput, match=r"held\.json: not the canonical encoding"):
        read_document(Held, path)
    path.write_bytes(b" " * 201)
    with pytest.raises(InvalidInput):
        read_document(Held, path)
    with pytest.raises(StoreError):
        read_document(Held, tmp_path / "absent")


def test_references_name_what_can_be_measured_in_order() -> None:
    digest = bytes(48)
    assert MeasurementReference.parse(
        MeasurementReference(((1, (digest,)), (255, (digest, digest)))).encode()
    )
    for allowed in (((0, (digest,)),), ((256, (digest,)),), ((2, (digest,)), (1, (digest,))), ()):
        with pytest.raises(InvalidInput, match="indices must be there"):
            MeasurementReference(allowed)
    with pytest.raises(InvalidInput, match="items"):
        MeasurementReference(((1, ()),))
    assert PcrReference.parse(PcrReference("sha256", ((0, bytes(32)), (23, bytes(32)))).encode())
    for registers in (((24, bytes(32)),), ((-1, bytes(32)),), ((0, bytes(48)),)):
        with pytest.raises(InvalidInput, match="must be below 24"):
            PcrReference("sha256", registers)
    for registers in (((1, bytes(32)), (0, bytes(32))), ((1, bytes(32)), (1, bytes(32)))):
        with pytest.raises(InvalidInput, match="in order, each once"):
            PcrReference("sha256", registers)
    with pytest.raises(InvalidInput, match="bank must be sha256 or sha384"):
        PcrReference("sha512", ((0, bytes(64)),))


def test_a_snapshots_opening_has_a_hash_for_each_page() -> None:
    region, leaf = Region("w", "F32", "weights", 129), bytes(32)
    opening = SnapshotOpening(bytes(7), 0, bytes(16), 64, (region,), (leaf,) * 3)
    assert SnapshotOpening.parse(opening.encode()) == opening
    for leaves in ((leaf,) * 2, (leaf,) * 4):
        with pytest.raises(InvalidInput, match="the layout has 3 pages"):
            SnapshotOpening(bytes(7), 0, bytes(16), 64, (region,), leaves)
    for text in ("ab" * 31, "ab" * 97, 5):
        with pytest.raises(InvalidInput, match="must be a string of whole hashes"):
            SnapshotOpening.parse(canonical_json(opening.fields() | {"leaves": text}))
    for ueid in (bytes(6), bytes(34)):
        with pytest.raises(InvalidInput, match="7 to 33 bytes"):
            SnapshotOpening(ueid, 0, bytes(16), 64, (region,), (leaf,) * 3)


def test_a_lot_has_one_chip_to_ten_thousand() -> None:
    names = [f"{at:016x}" for at in range(MOST_CHIPS_IN_AN_EVENT + 1)]
    body = {"holder": "north", "board": "B1"}
    for chips in (names[:1], names[:-1]):
        assert len(BODIES["board"].read({**body, "chips": chips}).named()) == len(chips)
    for chips in ([], names):
        with pytest.raises(InvalidInput, match=f"{len(chips)} chips; must be 1 to 10000"):
            BODIES["board"].read({**body, "chips": chips})


@pytest.mark.parametrize("text", ["", "x" * 1001, "a\nb", 5])
def test_a_reason_is_printable_and_short(text: object) -> None:
    body = {"owner": "north", "chips": ["ab" * 8]}
    assert BODIES["loss"].read({**body, "reason": "x" * 1000})
    with pytest.raises(InvalidInput, match="reason: must be 1 to 1000 printable characters"):
        BODIES["loss"].read({**body, "reason": text})


# -- tables that people write


def _half(value: object, what: str) -> Fraction:
    if not isinstance(value, int):
        raise InvalidInput(f"{what} must be whole")
    return Fraction(value, 2)


@dataclass(frozen=True)
class Inner:
    size: int


@dataclass(frozen=True)
class Outer:
    name: str
    share: float = 0.5
    open: bool = False
    kind: Literal["a", "b"] = "a"
    half: Annotated[Fraction, Via(str, _half)] = Fraction(0)
    inner: Inner | None = None
    rows: tuple[Inner, ...] = ()

    def __post_init__(self) -> None:
        if self.share > 1.0:
            raise InvalidInput(f"share {self.share} is above 1")


def test_a_table_becomes_its_class() -> None:
    table = {
        "name": "x", "share": 1, "open": True, "kind": "b", "half": 3, "inner": {"size": 1}, "rows": [{"size": 2}],
    }  # fmt: skip
    assert read_table(Outer, table, "file") == Outer(
        "x", 1.0, True, "b", Fraction(3, 2), Inner(1), (Inner(2),)
    )
    assert read_table(Outer, {"name": "x"}, "file") == Outer("x")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"more": 1}, "file: field 'more' is unknown to kind outer"),
        ({"name": 1}, "file: name must be a text, is 1"),
        ({"share": "1"}, "file: share must be a number, is '1'"),
        ({"share": True}, "file: share must be a number, is True"),
        ({"share": 10**400}, "file: share exceeds binary64"),
        ({"share": 1.5}, "file: share 1.5 is above 1"),
        ({"open": 1}, "file: open must be true or false, is 1"),
        ({"kind": "c"}, "file: kind must be one of a, b, is 'c'"),
        ({"half": 0.5}, "file: half must be whole"),
        ({"inner": None}, "file: inner: must be an object"),
        ({"inner": {"size": True}}, "file: inner: size must be a whole number, is True"),
        ({"rows": {}}, "file: rows must be a list, is {}"),
        ({"rows": [{"size": 1}, {}]}, "file: rows[1]: field 'size' is missing"),
    ],
)
def test_a_table_with_one_fault_is_refused_by_name(change: dict[str, object], reason: str) -> None:
    with pytest.raises(InvalidInput) as problem:
        read_table(Outer, {"name": "x", **change}, "file", whose=" to kind outer")
    assert reason in str(problem.value)
