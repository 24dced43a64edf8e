"""drand's rounds: when they are published, and whose signature says what they said."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest

from tallystick.errors import InvalidInput, Mismatch
from tallystick.run.drand import QUICKNET, spoken, verify_time

# Round 1000 of quicknet, as its relays give it (https://api.drand.sh/v2/beacons/quicknet/rounds/1000).
ROUND = 1000
SIGNATURE = bytes.fromhex(
    "b44679b9a59af2ec876b1a6b1ad52ea9b1615fc3982b19576350f93447cb1125e342b73a8dd2bacbe47e4b6b63ed5e39"
)
VALUE = "fe290beca10872ef2fb164d2aa4442de4566183ec51c56ff3cd603d930e54fdd"


def needs_pairings() -> None:
    if importlib.util.find_spec("py_ecc") is None:
        pytest.skip("drand's signatures need py_ecc: pip install tallystick[drand]")


def test_a_round_says_the_digest_of_its_signature() -> None:
    needs_pairings()
    deepest = sys.getrecursionlimit()
    assert QUICKNET.value_of(ROUND, SIGNATURE).hex() == VALUE
    assert spoken("drand/quicknet", ROUND, SIGNATURE).hex() == VALUE
    # py_ecc raises it to 100,000 when it is imported, and a document of brackets within brackets ended the process.
    fresh = "import sys; from tallystick.run.drand import QUICKNET; before = sys.getrecursionlimit(); "
    asked = f"QUICKNET.value_of({ROUND}, bytes.fromhex({SIGNATURE.hex()!r})); assert sys.getrecursionlimit() == before"
    subprocess.run([sys.executable, "-c", fresh + asked], check=True)
    assert sys.getrecursionlimit() == deepest


FORGED = {
    "another round's": (ROUND + 1, SIGNATURE),
    "of no curve point": (ROUND, b"\xff" * 48),
    "the point at infinity": (ROUND, b"\xc0" + bytes(47)),
    "zeros": (ROUND, bytes(48)),
    "the negative of it": (ROUND, bytes([SIGNATURE[0] ^ 0x20]) + SIGNATURE[1:]),
    "a bit off": (ROUND, SIGNATURE[:-1] + bytes([SIGNATURE[-1] ^ 1])),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_signature_that_is_not_the_rounds_is_refused(what: str) -> None:
    needs_pairings()
    number, signature = FORGED[what]
    with pytest.raises(Mismatch, match=f"drand/quicknet: the signature given is not of round {number}"):
        QUICKNET.value_of(number, signature)


def test_a_value_without_its_signature_is_none_of_a_known_network() -> None:
    with pytest.raises(InvalidInput, match="a round's signature has 48 bytes, given are 32"):
        spoken("drand/quicknet", ROUND, bytes.fromhex(VALUE))
    assert spoken("some/beacon", ROUND, b"\x07" * 32) == b"\x07" * 32


def test_a_round_is_published_when_the_network_says() -> None:
    assert QUICKNET.time_of(1) == 1692803367
    assert QUICKNET.time_of(ROUND) == 1692803367 + 999 * 3
    verify_time("drand/quicknet", ROUND, 1692806364)
    verify_time("some/beacon", ROUND, 7)
    with pytest.raises(InvalidInput, match="round 1000 is published at 1692806364, stated is 1692806363"):
        verify_time("drand/quicknet", ROUND, 1692806363)
    with pytest.raises(InvalidInput, match="round 0: rounds count from 1"):
        verify_time("drand/quicknet", 0, 0)


def test_without_the_library_nothing_is_taken_on_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(InvalidInput, match=r"pip install tallystick\[drand\]"):
        QUICKNET.value_of(ROUND, SIGNATURE)
