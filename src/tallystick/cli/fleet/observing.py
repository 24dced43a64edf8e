"""What a reader's plan asks of chips, and what they attest for the reader's nonce: options of ``tally monitor verify``."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from tallystick.cli.options import option
from tallystick.commit.encoding import parse_hex
from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.attestation.assurance import TOKEN_LIMIT, Attestation, parse_attestation
from tallystick.fleet.provenance.observation import ObservationPlan
from tallystick.signing.keys import PublicKey
from tallystick.store.files import read_whole

Rate = Annotated[
    str | None,
    option("--snapshots-per-day", "F", "Snapshots per day in use that the plan asks of every chip."),
]
Since = Annotated[
    str | None,
    option("--since", "DATE", "From when on chips were to be watched: 2026-11-01, or with a time."),
]
Until = Annotated[str | None, option("--until", "DATE", "Until when.")]
Use = Annotated[
    list[str] | None,
    option(
        "--use", "UEID=HOURS", "How long a chip was in use then, by a meter or inspection; may be repeated."
    ),
]
Attestations = Annotated[
    list[str] | None,
    option("--attestation", "UEID=FILE", "What tally chip attest wrote for your nonce; may be repeated."),
]
Nonce = Annotated[str | None, option("--nonce", "HEX", "The nonce you chose.")]


def plan_of(
    rate: str | None, since: str | None, until: str | None, use: Sequence[str], chips: Collection[str]
) -> ObservationPlan | None:
    """Return the plan that options state, or None.

    Raises:
        InvalidInput: some of them without the others; no number, date or chip; or what ``ObservationPlan`` refuses.
    """
    if rate is None or since is None or until is None:
        if (rate, since, until) != (None, None, None) or use:
            raise InvalidInput("--snapshots-per-day, --since and --until go together, and --use with them")
        return None
    hours: dict[str, float] = {}
    for text in use:
        ueid, equals, number = text.partition("=")
        if not equals or ueid not in chips:
            raise InvalidInput(f"--use {text}: must be UEID=HOURS, of a chip that --chip names")
        hours[ueid] = _number(number, "--use")
    thousandths = round(1000 * _number(rate, "--snapshots-per-day"))
    now = round(time.time() * 1000)
    return ObservationPlan(thousandths, moment_of(since, "--since"), moment_of(until, "--until"), hours, now)


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < 1e9:
        raise InvalidInput(f"{name} {text}: must be a number from 0 to 1e9")
    return value


def moment_of(text: str, name: str) -> int:
    """Return a date as milliseconds since 1970; UTC, where it does not say otherwise."""
    try:
        found = datetime.fromisoformat(text)
        found = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
        return round(found.timestamp() * 1000)
    except (ValueError, OverflowError) as problem:
        raise InvalidInput(
            f"{name} {text}: must be a date, as 2026-11-01 or 2026-11-01T12:00, in UTC"
        ) from problem


def answered(
    given: Sequence[str], nonce: str | None, keys: Mapping[str, PublicKey]
) -> dict[str, list[Attestation]]:
    """Return what chips attested for a nonce, by UEID.

    Raises:
        InvalidInput, Mismatch: no attestation of that chip for it, or one without a nonce.
    """
    if bool(given) != (nonce is not None):
        raise InvalidInput("--attestation and --nonce go together")
    if nonce is None:
        return {}
    asked = parse_hex(nonce, n_bytes=len(nonce) // 2, what="--nonce")
    found: dict[str, list[Attestation]] = {}
    for text in given:
        ueid, equals, path = text.partition("=")
        if not equals or ueid not in keys:
            raise InvalidInput(f"--attestation {text}: must be UEID=FILE, of a chip that --chip names")
        data = read_whole(Path(path), limit=TOKEN_LIMIT, what="an attestation")
        stated = parse_attestation(data, keys[ueid], asked)
        if stated.ueid.hex() != ueid:
            raise Mismatch(f"--attestation {text}: is of chip {stated.ueid.hex()}")
        found.setdefault(ueid, []).append(stated)
    return found
