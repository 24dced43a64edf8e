"""Jobs for a neutral place: what two parties agreed to run, on which committed data, and how little may come out; pure.

    order = NeutralOrder(..)                                 # refused if its outputs could say more than its budget
    signed = sign_order(order, verifier_key)                 # then the owner: sign_order(order, owner_key, signed)
    order = open_order(signed, verifier, owner)              # both signed these very bytes
    outcome = judge(order, ends)                             # what several identical runs printed
    statement = result_statement(order, outcome, ..)         # in-toto, to be signed by the neutral place

A verifier's program sees everything the owner has opened, and is the way by which it could leave. So what leaves is one
of a fixed number of values, counted beforehand: the schema's, and the few ways in which a run can fail. Formats and
rules: spec/neutral-run.md.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Literal

from tallystick.commit.codec import Document
from tallystick.commit.encoding import digest, parse_hex_float
from tallystick.commit.field_rules import At, HashText, Hex
from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.enclave.sandbox import ResourceBounds
from tallystick.signing.dsse import (
    Envelope,
    parse_envelope,
    sign_payload,
)
from tallystick.signing.keys import PublicKey, Signer

ORDER_FORMAT = "tallystick/neutral-order/1"
ORDER_TYPE = "application/vnd.tallystick.neutral-order+json"
RESULT_TYPE = "https://tallystick/neutral-result/v0.1"
ORDER_TAG = "tallystick/neutral-order/1"
ORDER_LIMIT = 1 << 20
NONCE_BYTES = 16
MOST_INPUTS, MOST_OUTPUTS, MOST_REPEATS = 64, 64, 16
MOST_BITS = 4096
MOST_LEVELS = 1 << 32
MOST_SECONDS = 7 * 86_400
LEAST_MEMORY, MOST_MEMORY = 1 << 26, 1 << 44
RANGES = {
    "budget": (1, MOST_BITS), "repeats": (2, MOST_REPEATS), "seconds": (1, MOST_SECONDS),
    "memory": (LEAST_MEMORY, MOST_MEMORY), "scratch": (4096, MOST_MEMORY),
}  # fmt: skip

Binding = Literal["file", "committed", "state"]
OutputKind = Literal["verdict", "integer", "scalar"]
Value = str | int
COMPLETED = "completed"
FAILURES = ("program failed", "time limit", "malformed output", "not repeatable")
ASSURANCE = (
    "isolated by the kernel of the neutral operator's machine, as tested before the run; nothing attests the machine, "
    "its memory's erasure, or that the operator showed the program these bytes"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


@dataclass(frozen=True)
class NeutralInput(Document, what="order: input"):
    """One file under ``/in``: its name, how it is bound, and the 32 bytes it is matched against, in hexadecimal.

    ``file``: SHA-256 of the bytes. ``committed``: a salted commitment to the bytes (spec/monitoring.md 1). ``state``: a
    salted commitment to the root of the state that the bytes, a checkpoint's file, hold. ``salted`` is what its salt
    follows from, empty for a file.
    """

    name: str
    binding: Binding
    digest: HashText
    salted: Annotated[str, At("label")] = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        what, label = _named(self.name, self.label()), self.salted
        if (self.binding == "file") != (not label) or len(label) > 64 or not label.isascii():
            raise InvalidInput(f"{what}: a file has no label, a commitment one of 1 to 64 ASCII characters")


@dataclass(frozen=True)
class NeutralOutput(Document, what="order: output"):
    """One value that may leave: pass or fail, an integer from low to high, or one of ``levels`` scalars between them.

    Bounds of a scalar are binary64; the program's number is rounded to the nearest level, ties to the lower.
    """

    name: str
    kind: OutputKind
    low: str = ""
    high: str = ""
    levels: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        what = _named(self.name, self.label())
        if self.kind == "verdict":
            levels = 2
        elif self.kind == "integer":
            levels = _integer(self.high, what) - _integer(self.low, what) + 1
        else:
            low, high = (parse_hex_float(text, what=what) for text in (self.low, self.high))
            if not math.isfinite(low) or not math.isfinite(high) or not math.isfinite(high - low):
                raise InvalidInput(f"{what}: bounds must be finite, their difference too")
            if not low < high:
                raise InvalidInput(f"{what}: {low:g} to {high:g} is empty")
            levels = self.levels
        bare = self.kind == "verdict" and (self.low or self.high)
        if levels != self.levels or bare or not 2 <= levels <= MOST_LEVELS:
            raise InvalidInput(
                f"{what}: has {self.levels} levels, its bounds make {levels}; must be equal, and 2 to {MOST_LEVELS}"
            )

    def level(self, at: int) -> float:
        """Return the scalar at level ``at``, 0 being the lowest."""
        low, high = (Fraction(float.fromhex(text)) for text in (self.low, self.high))
        return float(low + (high - low) * at / (self.levels - 1))


@dataclass(frozen=True)
class NeutralOrder(Document, form=ORDER_FORMAT, what="order", limit=ORDER_LIMIT):
    """What verifier and owner sign.

    Attributes:
        nonce: makes the order one of its kind.
        verifier, owner: key ids of the two parties.
        program: SHA-256 of the program's bytes.
        inputs, outputs: by name, ascending.
        budget: the most bits that a run may tell.
        repeats: how often the program runs; all must print the same.
        seconds, memory, scratch: what each run may use (``bounds``).
        constant_time: whether the result is held back until the time limit, so that the duration tells nothing.

    Raises:
        InvalidInput: a number out of range, one key for both parties, or outputs that could say more than the budget.
    """

    nonce: Annotated[str, Hex(NONCE_BYTES)]
    verifier: HashText
    owner: HashText
    program: HashText
    inputs: tuple[NeutralInput, ...]
    outputs: tuple[NeutralOutput, ...]
    budget: int
    repeats: int
    seconds: int
    memory: int
    scratch: int
    constant_time: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        what = self.label()
        for name, (least, most) in RANGES.items():
            if not least <= (number := getattr(self, name)) <= most:
                raise InvalidInput(f"{what}: {name} must be {least} to {most}, is {number}")
        if self.verifier == self.owner:
            raise InvalidInput(f"{what}: verifier and owner are one key, {self.owner[:16]}..")
        for kind, items, most in (
            ("inputs", self.inputs, MOST_INPUTS),
            ("outputs", self.outputs, MOST_OUTPUTS),
        ):
            found = [item.name for item in items]
            if found != sorted(set(found)) or not 1 <= len(found) <= most:
                raise InvalidInput(f"{what}: {kind} must be 1 to {most}, ascending by name, none twice")
        if self.bits > self.budget:
            raise InvalidInput(
                f"{what}: its outputs and failures can tell {self.bits} bits, the budget is {self.budget}"
            )

    @property
    def bounds(self) -> ResourceBounds:
        """What each run may use."""
        return ResourceBounds(self.seconds, self.memory, self.scratch)

    @property
    def bits(self) -> int:
        """The most bits that a run tells: log2 of all the answers there are, failures included, rounded up."""
        return (math.prod(output.levels for output in self.outputs) + len(FAILURES) - 1).bit_length()

    def digest(self) -> str:
        """Return the 64 hexadecimal digits that name the order."""
        return digest(ORDER_TAG, self.encode()).hex()


def verdict_output(name: str) -> NeutralOutput:
    """Return an output that is pass or fail."""
    return NeutralOutput(name, "verdict")


def integer_output(name: str, low: int, high: int) -> NeutralOutput:
    """Return an output that is an integer from ``low`` to ``high``."""
    return NeutralOutput(name, "integer", str(low), str(high), high - low + 1)


def scalar_output(name: str, low: float, high: float, levels: int) -> NeutralOutput:
    """Return an output that is one of ``levels`` scalars, evenly spaced from ``low`` to ``high``."""
    return NeutralOutput(name, "scalar", float(low).hex(), float(high).hex(), levels)


def sign_order(order: NeutralOrder, signer: Signer, signed: bytes | None = None) -> bytes:
    """Return the order in a DSSE envelope with the signer's signature, beside those in ``signed`` if that is given.

    Raises:
        InvalidInput: the signer is neither of the two parties, signed it already, or ``signed`` is no such envelope.
        Mismatch: ``signed`` holds another order.
    """
    key_id, payload = signer.public_key.key_id, order.encode()
    if key_id not in (order.verifier, order.owner):
        raise InvalidInput(
            f"order: key {key_id[:16]}.. is neither the verifier's {order.verifier[:16]}.. nor the owner's "
            f"{order.owner[:16]}.."
        )
    before: tuple[tuple[str, bytes], ...] = ()
    if signed is not None:
        envelope = parse_envelope(signed, what="order")
        if envelope.payload != payload or envelope.payload_type != ORDER_TYPE:
            raise Mismatch("order: the envelope holds another one")
        before = envelope.signatures
    if key_id in {name for name, _ in before}:
        raise InvalidInput(f"order: key {key_id[:16]}.. signed it already")
    made = sign_payload(ORDER_TYPE, payload, [signer]).signatures
    return Envelope(ORDER_TYPE, payload, (*before, *made)).encode()


def read_order(signed: bytes) -> NeutralOrder:
    """Return the order in an envelope, whoever signed it: for people to look at, never to run.

    Raises:
        InvalidInput: no such envelope, or a malformed order.
    """
    return NeutralOrder.parse(parse_envelope(signed, what="order").payload_of(ORDER_TYPE, what="order"))


def open_order(signed: bytes, verifier: PublicKey, owner: PublicKey) -> NeutralOrder:
    """Return the order that both parties signed, these two and no others.

    Raises:
        InvalidInput: no such envelope, or a malformed order.
        Mismatch: the order names other parties, or one of the two did not sign it.
    """
    order = read_order(signed)
    signers = parse_envelope(signed, what="order").signers([verifier, owner])
    for role, named, key in (("verifier", order.verifier, verifier), ("owner", order.owner, owner)):
        if named != key.key_id:
            raise Mismatch(f"order: its {role} is {named[:16]}.., known here is {key.key_id[:16]}..")
        if key not in signers:
            raise Mismatch(f"order: its {role} {named[:16]}.. did not sign it")
    return order


def _integer(text: str, what: str) -> int:
    if not re.fullmatch(r"0|-?[1-9][0-9]{0,17}", text, re.ASCII):
        raise InvalidInput(f"{what}: {text[:40]!a} is no decimal integer")
    return int(text)


def _named(name: str, what: str) -> str:
    """Return what errors call the input or output ``name``, whose spelling is checked."""
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{what}: name {name[:80]!a} must be 1 to 64 letters, digits, dots, dashes or underscores"
        )
    return f"{what} {name}"
