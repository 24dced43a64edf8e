"""Every parser of other parties' bytes: damaged documents are refused by name, and cost no more than their size."""

from __future__ import annotations

import gc
import tracemalloc
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tallystick.errors import InvalidInput
from tallystick.testing.parser_seeds import seeds
from tallystick.testing.parsers import TARGETS, ParserDefect, Target, accepts, find_target

VECTORS = Path(__file__).parents[3] / "vectors"
BY_NAME = {target.name: target for target in TARGETS}
# A document of n bytes may cost so much while it is read: Python objects of some 100 bytes for fields of two.
BYTES_A_BYTE, BYTES_AT_ALL = 400, 2_000_000
TRIES = 3  # what a document costs it costs each time; what threads and finalizers of other tests do, not


@cache
def documents() -> tuple[bytes, ...]:
    return tuple(seeds(VECTORS))


@cache
def accepted(name: str) -> tuple[bytes, ...]:
    make = BY_NAME[name].own_seeds
    return tuple(data for data in (documents() if make is None else make()) if accepts(BY_NAME[name], data))


@st.composite
def damaged(draw: st.DrawFn, name: str) -> bytes:
    """A document that the parser accepts, with up to four edits."""
    data = bytearray(draw(st.sampled_from(accepted(name))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(("change", "insert", "delete", "double", "cut", "splice"))):
            case "change" if at < len(data):
                data[at] = draw(st.integers(0, 255))
            case "insert":
                data[at:at] = draw(st.one_of(st.binary(min_size=1, max_size=9), st.just(b"\xff" * 9)))
            case "delete":
                del data[at : at + draw(st.integers(1, 9))]
            case "double":
                data[at:at] = data[at : at + draw(st.integers(1, 64))]
            case "splice":
                other = draw(st.sampled_from(documents()))
                data[at:at] = other[: draw(st.integers(1, 64))]
            case _:
                del data[at:]
    return bytes(data)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_there_are_documents_that_the_parser_accepts(name: str) -> None:
    """Otherwise the tests below would damage nothing."""
    assert accepted(name)


@pytest.mark.parametrize("name", sorted(BY_NAME))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_document_is_refused_or_is_another_documents_one_encoding(
    name: str, data: st.DataObject
) -> None:
    accepts(BY_NAME[name], data.draw(damaged(name)))


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"checkpoint"}))
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@example(text=b"")
@example(text=b"[" * 5000)
@example(text=b"\xff" * 5000)
@example(text=b"\x01" + b"\xff" * 9 + b"\x7f")
@given(text=st.binary(max_size=300))
def test_memory_is_bounded_by_the_size_whatever_is_declared(name: str, text: bytes) -> None:
    takes_bounded_memory(name, text)


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {"checkpoint"}))
def test_memory_for_what_is_accepted_is_bounded_by_the_size(name: str) -> None:
    gc.collect()  # what others left to be finalized is not the document's cost either
    for data in accepted(name)[:3]:
        takes_bounded_memory(name, data)


def takes_bounded_memory(name: str, data: bytes) -> None:
    accepts(BY_NAME[name], data)  # imports and caches are not the document's cost
    peaks: list[int] = []
    while len(peaks) < TRIES and (not peaks or peaks[-1] > BYTES_AT_ALL + BYTES_A_BYTE * len(data)):
        tracemalloc.start()
        accepts(BY_NAME[name], data)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[-1] <= BYTES_AT_ALL + BYTES_A_BYTE * len(data), peaks


def test_a_parser_that_accepts_two_spellings_is_found_out() -> None:
    lenient = Target("lenient", int, lambda value: str(value).encode())
    assert accepts(lenient, b"7")
    with pytest.raises(ParserDefect, match=r"lenient: accepts 303037\.\., whose encoding is 37"):
        accepts(lenient, b"007")
    with pytest.raises(ValueError, match="invalid literal"):  # any other exception passes through, to be seen
        accepts(lenient, b"seven")


def test_an_unknown_parser_is_named() -> None:
    with pytest.raises(InvalidInput, match="parser 'x': must be one of canonical-json, "):
        find_target("x")
