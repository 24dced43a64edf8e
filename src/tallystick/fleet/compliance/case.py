"""A fleet's case: what a reader's plan asks for, and where everything lies that was handed over or is known from elsewhere.

    case = parse_case(data, what="case.toml")           # spec/monitoring.md 7

It is the reader's own file, in TOML; paths in it are relative to it. Pure.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from tallystick.errors import InvalidInput
from tallystick.fleet.tables import read_table

FORMAT = "tallystick/fleet-case/1"
CASE_LIMIT = 1 << 24  # bytes
Format = Literal["tallystick/fleet-case/1"]


@dataclass(frozen=True)
class CaseChip:
    """One chip that is an owner's.

    Attributes:
        ueid: hexadecimal.
        key: its public key, known before the log was handed over.
        since, until: when it came to this owner and when it left it, where that is within the case's time or after it. One
            that came after it was not to be watched, and is no chip that is missing.
        hours: for how long it was in use in the time asked for, by a meter or an inspection.
        attestation: what it attested for the case's nonce.
        tpm, tpm_key, tpm_enrolment, enroller, pcrs: as of ``tally chip verify``: a TPM's quote and what it is judged by.
        device, device_root, measurements, endorsement: likewise, of an accelerator and of the maker's word for the key.
        crl, require_crl: lists of revoked certificates, and whether a chain needs them.
    """

    ueid: str
    key: str
    since: str | None = None
    until: str | None = None
    hours: float | None = None
    attestation: str | None = None
    tpm: str | None = None
    tpm_key: str | None = None
    tpm_enrolment: str | None = None
    enroller: str | None = None
    pcrs: str | None = None
    device: str | None = None
    device_root: str | None = None
    measurements: str | None = None
    endorsement: str | None = None
    crl: tuple[str, ...] = ()
    require_crl: bool = False


@dataclass(frozen=True)
class CaseOwner:
    """One owner: its name in the registry, the folder that it handed over (``runs/`` and ``chips/``), and its chips.

    ``job`` is what its runs are of, instead of the plan's.
    """

    name: str
    folder: str
    chip: tuple[CaseChip, ...]
    job: str | None = None


@dataclass(frozen=True)
class CasePlan:
    """What was planned, and is demanded.

    Attributes:
        snapshots_per_day: of every chip in use.
        since, until: dates in UTC; from and until when the chips were to be watched.
        nonce: that every attestation answers, hexadecimal; none if nothing was asked.
        beacon: 32 bytes that became public after the reports were committed, hexadecimal.
        segments, largest: of each run, to be repeated at random, and those with the largest updates.
        memory: records of each segment to look for in the model's memory.
        job: what the runs are of, if it is no shipped job; a file is relative to the case, if one is there.
        least_rate: snapshots per day below which no log may ever have been (rule 15).
        idle_share: of wall time, above which time without a live agent is a finding (rule 14).
        flop_per_chip_second: the most that a chip does in a second; without it no run's FLOP are held against time (109).
        least_utilisation: the least share of that which a run uses.
    """

    snapshots_per_day: float
    since: str
    until: str
    beacon: str
    nonce: str | None = None
    segments: int = 2
    largest: int = 1
    memory: int = 0
    job: str | None = None
    least_rate: float | None = None
    idle_share: float = 1.0
    flop_per_chip_second: float | None = None
    least_utilisation: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("segments", 1), ("largest", 0), ("memory", 0)):
            if getattr(self, name) < least:
                raise InvalidInput(f"{name} must be at least {least}, is {getattr(self, name)}")
        for name in ("idle_share", "least_utilisation"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InvalidInput(f"{name} must be from 0 to 1, is {getattr(self, name):g}")
        if self.flop_per_chip_second is not None and not 0.0 < self.flop_per_chip_second < 1e30:
            raise InvalidInput(
                f"flop_per_chip_second must be from 0 to 1e30, is {self.flop_per_chip_second:g}"
            )
        if self.flop_per_chip_second is None and self.least_utilisation:
            raise InvalidInput("least_utilisation needs flop_per_chip_second")


@dataclass(frozen=True)
class CaseRegistry:
    """The registry of chips, and lists of others that it is held against (``tally registry stream``)."""

    directory: str
    streams: tuple[str, ...] = ()


@dataclass(frozen=True)
class CaseInspection:
    """Sealed inspection packages, and the public keys of those who may have signed them."""

    packages: tuple[str, ...]
    trust: tuple[str, ...]


@dataclass(frozen=True)
class FleetCase:
    """All of it.

    Raises:
        InvalidInput: no owner, two of one name, or one chip twice.
    """

    format: Format
    plan: CasePlan
    owner: tuple[CaseOwner, ...]
    registry: CaseRegistry | None = None
    inspection: CaseInspection | None = None

    def __post_init__(self) -> None:
        if not self.owner:
            raise InvalidInput("must have at least one owner")
        for what, names in (
            ("owner", [owner.name for owner in self.owner]),
            ("chip", [chip.ueid for owner in self.owner for chip in owner.chip]),
        ):
            if twice := next((name for name, count in Counter(names).items() if count > 1), None):
                raise InvalidInput(f"{what} {twice[:80]} is there twice")


def parse_case(data: bytes, *, what: str) -> FleetCase:
    """Return the case in a TOML document.

    Raises:
        InvalidInput: too large, no TOML, a field too few or too many, of another type, or against a rule of its class.
    """
    if len(data) > CASE_LIMIT:
        raise InvalidInput(f"{what}: {len(data)} bytes exceed the limit of {CASE_LIMIT}")
    try:
        value = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as problem:
        raise InvalidInput(f"{what}: is no TOML ({ascii(str(problem))[1:-1][:200]})") from None
    return read_table(FleetCase, value, what)
