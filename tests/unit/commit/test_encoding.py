"""Canonical JSON, frames, hexadecimal: one value, one encoding."""

from __future__ import annotations

import hashlib
import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.commit.encoding import (
    Fields,
    canonical_json,
    digest,
    frame,
    hex_float,
    parse_canonical_json,
    parse_hex,
    parse_hex_float,
)
from tallystick.errors import InvalidInput

UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
INTEGERS = st.integers(-(2**63) + 1, 2**63 - 1)
VALUES = st.recursive(
    st.none() | st.booleans() | INTEGERS | UNICODE,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(UNICODE, inner, max_size=4),
    max_leaves=12,
)


def parse(data: bytes, limit: int = 4096) -> object:
    return parse_canonical_json(data, what="document", limit=limit)


@given(VALUES)
def test_decoding_returns_what_was_encoded(value: object) -> None:
    assert parse(canonical_json(value), limit=2**20) == value


@given(st.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value, indent=1).encode()))
def test_arbitrary_bytes_are_refused_or_are_the_encoding_of_their_value(data: bytes) -> None:
    try:
        value = parse(data, limit=2**20)
    except InvalidInput:
        return

    assert canonical_json(value) == data


@given(VALUES, st.data())
def test_a_changed_byte_never_decodes_to_the_same_value(value: object, data: st.DataObject) -> None:
    encoded = bytearray(canonical_json(value))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))

    try:
        changed = parse(bytes(encoded), limit=2**20)
    except InvalidInput:
        return
    assert canonical_json(changed) != canonical_json(value)


def test_keys_are_sorted_by_code_point_and_text_is_ascii() -> None:
    value = {"\U0001f600": 1, "\uffee": 2, "b": [True, None, -5], "a": "\u00e9\x7f\n/"}

    expected = b'{"a":"\\u00e9\\u007f\\n/","b":[true,null,-5],"\\uffee":2,"\\ud83d\\ude00":1}'
    assert canonical_json(value) == expected


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"a":1,"a":1}', "duplicate key 'a'"),
        (b'{"b":1,"a":1}', "not the canonical encoding of its value (first differs at byte 2)"),
        (b'{"a": 1}', "first differs at byte 5"),
        (b"[1] ", "first differs at byte 3"),
        (b"[1]x", "Extra data"),
        (b"1.0", "float '1.0'"),
        (b"1e3", "float '1e3'"),
        (b"NaN", "float 'NaN'"),
        (b"-Infinity", "float '-Infinity'"),
        (b"-0", "not the canonical encoding"),
        (b"9223372036854775808", "an integer exceeds 63 bits"),
        (b"1" * 3000, "an integer exceeds 63 bits"),
        (b'"\\u0041"', "not the canonical encoding"),
        (b'"\\ud800"', "lone surrogate"),
        (b'"\xc3\xa9"', "byte 1 is not ASCII"),
        (b"\xef\xbb\xbf1", "byte 0 is not ASCII"),
        (b"", "Expecting value"),
        (b"[" * 33 + b"]" * 33, "nested deeper than 32"),
        (b"[" * 2000, "document: "),
        (b"[" * 2000 + b"]" * 2000, "nested deeper than 32"),
        (b'"' + b"a" * 4095 + b'"', "4097 bytes exceed the limit of 4096"),
    ],
)
def test_another_spelling_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        parse(data)

    assert reason in str(refusal.value)
    assert str(refusal.value).startswith("document: ")


def test_the_deepest_and_longest_documents_pass() -> None:
    assert canonical_json(parse(b"[" * 32 + b"]" * 32)) == b"[" * 32 + b"]" * 32
    assert len(str(parse(b'"' + b"a" * 4094 + b'"'))) == 4094


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (1.5, "has no form for a float"),
        ([math.inf], "has no form for a float"),
        (2**63, "exceeds 63 bits"),
        (-(2**63), "exceeds 63 bits"),
        ({1: 2}, "key 1 must be a string"),
        ({None: 2}, "key null must be a string"),
        (b"bytes", "has no form for a bytes"),
        ({"a": {1}}, "has no form for a set"),
        ("\udc00", "lone surrogate"),
        ({"\udc00": 1}, "lone surrogate"),
    ],
)
def test_a_value_without_a_form_is_refused(value: object, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        canonical_json(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)

    with pytest.raises(InvalidInput, match="nested deeper than 32"):
        canonical_json(value)


def test_a_digest_is_the_hash_of_the_drawn_bytes() -> None:
    drawn = b"\x0btallystick/" + struct.pack("<Q", 2) + b"ab" + struct.pack("<Q", 0)

    assert frame("tallystick/", b"ab", b"") == drawn
    assert digest("tallystick/", memoryview(b"ab"), b"") == hashlib.sha256(drawn).digest()


TAGS = st.text(st.characters(codec="ascii"), min_size=1, max_size=3)
PARTS = st.lists(st.binary(max_size=3), max_size=3)


@given(TAGS, PARTS, TAGS, PARTS)
def test_different_arguments_have_different_frames(a: str, xs: list[bytes], b: str, ys: list[bytes]) -> None:
    assert (frame(a, *xs) == frame(b, *ys)) == ((a, xs) == (b, ys))


@pytest.mark.parametrize("tag", ["", "a" * 256, "\u00e9"])
def test_a_tag_without_an_encoding_is_refused(tag: str) -> None:
    with pytest.raises(InvalidInput, match="must be 1 to 255 ASCII characters"):
        frame(tag)


def test_hexadecimal_has_one_spelling() -> None:
    assert parse_hex("00ff", n_bytes=2, what="hash") == b"\x00\xff"
    for text in ("00FF", "00f", "00ff00", "0x00", "00f\n", "\u0660" * 4):
        with pytest.raises(InvalidInput, match="hash: must be 4 lower-case hexadecimal digits"):
            parse_hex(text, n_bytes=2, what="hash")


@given(st.floats())
def test_a_hexadecimal_float_is_exact(value: float) -> None:
    found = parse_hex_float(hex_float(value), what="loss")

    assert struct.pack("<d", found) == struct.pack("<d", value) or math.isnan(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0x1p0", r"must be written 0x1\.0000000000000p\+0"),
        ("1.0", "must be written"),
        ("0X1.0000000000000P+0", "must be written"),
        (" 0x0.0p+0", "must be written"),
        ("Infinity", "must be written inf"),
        ("-nan", "must be written nan"),
        ("0x1p99999", "is not a hexadecimal float"),
        ("one", "is not a hexadecimal float"),
        ("", "is not a hexadecimal float"),
    ],
)
def test_another_spelling_of_a_float_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        parse_hex_float(text, what="loss")


ALL = ("text", "integer", "flag", "list", "object", "none")


def fields() -> Fields:
    value = {"text": "t", "integer": 3, "flag": True, "list": ["x"], "object": {"k": "v"}, "none": None}
    return Fields(value, what="claim", names=ALL)


def test_fields_are_read_with_the_type_they_must_have() -> None:
    found = fields()

    assert (found.text("text"), found.integer("integer"), found.boolean("flag")) == ("t", 3, True)
    assert (found.texts("list"), found.items("list")) == (("x",), ["x"])
    assert (found.mapping("object"), found.text_mapping("object")) == ({"k": "v"}, {"k": "v"})
    assert (found.optional_text("none"), found.optional_text("text"), found.value("none")) == (
        None,
        "t",
        None,
    )
    found.constant("integer", 3)


@pytest.mark.parametrize(
    ("reader", "name", "reason"),
    [
        ("text", "integer", "integer must be a string, is 3"),
        ("integer", "flag", "flag must be an integer, is true"),
        ("boolean", "integer", "integer must be true or false, is 3"),
        ("items", "object", "object must be a list, is a dict"),
        ("integers", "list", "list must be a list of integers"),
        ("hashes", "list", "list: must be 64 lower-case hexadecimal digits"),
        ("mapping", "none", "none must be an object, is null"),
    ],
)
def test_a_field_of_another_type_is_refused(reader: str, name: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=f"claim: {reason}"):
        getattr(fields(), reader)(name)


def test_a_constant_is_compared_with_its_type() -> None:
    with pytest.raises(InvalidInput, match="flag must be 1, is true"):
        fields().constant("flag", 1)


def test_an_object_with_other_fields_is_refused() -> None:
    with pytest.raises(InvalidInput, match="claim: field 'b' is missing"):
        Fields({"a": 1}, what="claim", names=("a", "b"))
    with pytest.raises(InvalidInput, match="claim: field 'a' is unknown"):
        Fields({"a": 1, "b": 1}, what="claim", names=("b",))
    with pytest.raises(InvalidInput, match="claim: must be an object, is null"):
        Fields(None, what="claim", names=())
