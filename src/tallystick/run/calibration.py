"""What a calibration chose, as a document: canonical JSON, versioned, read by ``tally record --bands``.

The choice is two or three numbers of the policy. They go into the specification of every run recorded with
them, where an auditor checks them against the policy's limits; nobody but the trainer needs this document.
The rest says where the numbers come from. Format: spec/policies.md 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tallystick.commit.encoding import (
    Fields,
    canonical_json,
    hex_float,
    parse_document,
    parse_hex,
    parse_hex_float,
)
from tallystick.errors import InvalidInput

FORMAT = "tallystick/calibration/1"
LIMIT = 1 << 22  # bytes: some thousands of sites with their numbers
MOST_SITES = 1 << 14
LONGEST_NAME = 512
KINDS = ("buffer", "decision", "gradient", "loss", "state")


@dataclass(frozen=True)
class SiteChoice:
    """One site: its band under the choice, and the largest deviation over its scale, by source.

    ``band`` is an exponent relative to the site's scale, ``floor`` that of its smallest quantum; both as of the last
    step measured, None where the policy gives the site none.
    """

    kind: str
    name: str
    band: int | None
    floor: int | None
    largest: Mapping[str, float]


@dataclass(frozen=True)
class CalibrationChoice:
    """The numbers chosen for ``policy``, and what they rest on.

    Attributes:
        policy: its name.
        parameters: chosen numbers of the policy, by name.
        job, source_digest, settings, seed: what was measured.
        steps: at which steps.
        repeats: jittered repetitions at each.
        profiles: other arithmetic compared with.
        log_bits, freedom: expected under the choice: bits of log per parameter and step, share of roundings that
            a dishonest log could choose.
        sites: every site.
    """

    policy: str
    parameters: Mapping[str, int]
    job: str
    source_digest: str
    settings: Mapping[str, str]
    seed: int
    steps: tuple[int, ...]
    repeats: int
    profiles: tuple[str, ...]
    log_bits: float
    freedom: float
    sites: tuple[SiteChoice, ...]

    def encode(self) -> bytes:
        """Return the one encoding."""
        return canonical_json(
            {
                "expected": {"freedom": hex_float(self.freedom), "log_bits": hex_float(self.log_bits)},
                "format": FORMAT,
                "job": {
                    "path": self.job,
                    "seed": self.seed,
                    "settings": dict(self.settings),
                    "source_digest": self.source_digest,
                },
                "measured": {
                    "profiles": list(self.profiles),
                    "repeats": self.repeats,
                    "steps": list(self.steps),
                },
                "parameters": dict(self.parameters),
                "policy": self.policy,
                "sites": [
                    {
                        "band": site.band,
                        "floor": site.floor,
                        "kind": site.kind,
                        "largest": {source: hex_float(value) for source, value in site.largest.items()},
                        "name": site.name,
                    }
                    for site in self.sites
                ],
            }
        )


def parse_calibration(data: bytes) -> CalibrationChoice:
    """Return the choice that ``data`` encodes; whether a policy allows it is not checked here.

    Raises:
        InvalidInput: ``data`` is longer than ``LIMIT`` or not what ``CalibrationChoice.encode`` returns.
    """
    what = "calibration"
    names = ("expected", "format", "job", "measured", "parameters", "policy", "sites")
    fields = parse_document(data, FORMAT, what=what, limit=LIMIT, names=names)
    expected = Fields(fields.value("expected"), what=f"{what}: expected", names=("freedom", "log_bits"))
    job = Fields(
        fields.value("job"), what=f"{what}: job", names=("path", "seed", "settings", "source_digest")
    )
    measured = Fields(
        fields.value("measured"), what=f"{what}: measured", names=("profiles", "repeats", "steps")
    )
    parameters: dict[str, int] = {}
    for name, value in fields.mapping("parameters").items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidInput(f"{what}: parameter {name[:40]!r} must be an integer")
        parameters[name] = value
    sites = fields.items("sites")
    if len(sites) > MOST_SITES:
        raise InvalidInput(f"{what}: {len(sites)} sites, at most {MOST_SITES} are read")
    digest = job.text("source_digest")
    parse_hex(digest, n_bytes=32, what=f"{what}: source_digest")
    steps = measured.integers("steps")
    if list(steps) != sorted(set(steps)) or not steps or steps[0] < 0:
        raise InvalidInput(f"{what}: steps must be ascending whole numbers, are {list(steps)[:8]}")
    return CalibrationChoice(
        policy=fields.text("policy"),
        parameters=parameters,
        job=job.text("path"),
        source_digest=digest,
        settings=job.text_mapping("settings"),
        seed=_at_least(0, job.integer("seed"), f"{what}: seed"),
        steps=steps,
        repeats=_at_least(1, measured.integer("repeats"), f"{what}: repeats"),
        profiles=measured.texts("profiles"),
        log_bits=_size(expected.text("log_bits"), f"{what}: log_bits"),
        freedom=_size(expected.text("freedom"), f"{what}: freedom"),
        sites=tuple(_parse_site(site) for site in sites),
    )


def _parse_site(value: object) -> SiteChoice:
    what = "calibration: site"
    fields = Fields(value, what=what, names=("band", "floor", "kind", "largest", "name"))
    kind, name = fields.text("kind"), fields.text("name")
    if kind not in KINDS:
        raise InvalidInput(f"{what}: kind {kind[:40]!r} is none of {', '.join(KINDS)}")
    if len(name) > LONGEST_NAME:
        raise InvalidInput(f"{what}: a name has {len(name)} characters, at most {LONGEST_NAME} are read")
    largest = {
        source: _size(text, f"{what} {name[:80]!r}")
        for source, text in fields.text_mapping("largest").items()
    }
    band, floor = (None if fields.value(key) is None else fields.integer(key) for key in ("band", "floor"))
    return SiteChoice(kind, name, band, floor, largest)


def _size(text: str, what: str) -> float:
    value = parse_hex_float(text, what=what)
    if not value >= 0.0:
        raise InvalidInput(f"{what}: must not be negative, is {value!r}")
    return value


def _at_least(least: int, value: int, what: str) -> int:
    if value < least:
        raise InvalidInput(f"{what}: must be at least {least}, is {value}")
    return value
