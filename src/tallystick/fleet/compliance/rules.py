"""Rules about training as data: one TOML file, strict, and what evidence each rule asks for; pure.

    rules = parse_rules(data)
    rules.rules[0].needs          # ("the run's report, verified: FLOP counted from its operators", ..)

A file is a list of rules, each of a kind with fields of its own; a field that a kind does not have is refused, because it
might ask for something. What becomes of rules and evidence: ``compliance``. Format: spec/rules.md.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, cast

from tallystick.commit.encoding import HASH_BYTES, Fields, check_depth, digest, parse_hex
from tallystick.errors import InvalidInput

FORMAT = "tallystick/rules/1"
RULES_TAG = "tallystick/rules/1"
RULES_LIMIT = 1 << 20  # bytes
DEPTH_LIMIT = 8
MOST_RULES = 1000
MOST_DIGESTS = 100_000
LARGEST_NUMBER = Fraction(10) ** 40

Scope = Literal["run", "lineage"]
Where = Literal["setting", "schedule", "specification"]
Unit = Literal["batch", "dataset", "record"]
SPECIFIED = ("accumulation", "checkpoint_every", "policy", "seed", "steps", "world_size")


@dataclass(frozen=True)
class Bounds:
    """What a value may be: at least and at most (either may be open), or one of some texts."""

    least: Fraction | None = None
    most: Fraction | None = None
    one_of: tuple[str, ...] = ()

    def problem(self, value: Fraction | str) -> str | None:
        """Return why ``value`` is not allowed, or None. Texts are compared with texts, numbers with bounds."""
        if self.one_of:
            return (
                None
                if str(value) in self.one_of
                else f"is {ascii(str(value))[:60]}, must be one of {', '.join(self.one_of)}"
            )
        if isinstance(value, str):
            return f"is {ascii(value)[:60]}, must be a number"
        if self.least is not None and value < self.least:
            return f"is {shown(value)}, must be at least {shown(self.least)}"
        if self.most is not None and value > self.most:
            return f"is {shown(value)}, must be at most {shown(self.most)}"
        return None


@dataclass(frozen=True)
class Compute:
    """At most so many FLOP in a run, or in a run and all that it continues."""

    scope: Scope
    most_flop: Fraction


@dataclass(frozen=True)
class Data:
    """Digests of batches (data sets, single records) that no run may have used, and that every run must have used.

    ``forms`` is for records alone: the layouts of one record that the digests were made for (``batch_opening``).
    """

    unit: Unit
    forbidden: frozenset[str]
    required: frozenset[str]
    forms: frozenset[str] = frozenset()


@dataclass(frozen=True)
class HyperParameter:
    """Bounds on a setting of the job, a scheduled value of any step, or a field of the specification."""

    name: str
    where: Where
    bounds: Bounds


@dataclass(frozen=True)
class Evaluation:
    """Bounds on what an agreed program, run in a neutral place, says of a run's last state."""

    program: str
    output: str
    places: frozenset[str]
    bounds: Bounds


@dataclass(frozen=True)
class Reporting:
    """Pre-commitments logged by every chip of a run, with its data, and so many snapshots matched."""

    data_precommitted: bool
    least_snapshots: int


@dataclass(frozen=True)
class Licence:
    """A licence for the run's pre-commitment, signed by one of these keys, that covers its FLOP."""

    licensors: frozenset[str]


@dataclass(frozen=True)
class Mitigation:
    """A declared run that goes on from the run's last state on these data, and passes the evaluation if there is one."""

    unit: Unit
    required: frozenset[str]
    evaluation: Evaluation | None


@dataclass(frozen=True)
class NoTraining:
    """The chips named (all that are shown, if none is) hold one and the same state in every snapshot."""

    chips: frozenset[str]
    least_snapshots: int


Body = Compute | Data | HyperParameter | Evaluation | Reporting | Licence | Mitigation | NoTraining

REPORT = "the run's report, opened and verified: segments repeated, FLOP counted from its operators"
NEEDS: Mapping[str, tuple[str, ...]] = {
    "compute": (REPORT, "for a lineage, every run back to a seeded initialisation"),
    "data": (REPORT, "data committed before step 0", "the opened batch digests"),
    "hyperparameter": (REPORT, "the opened specification and step records"),
    "evaluation": (REPORT, "a neutral place's signed result on the state that the report commits to"),
    "reporting": (REPORT, "the chips' logs, with pre-commitments and matched snapshots"),
    "licence": (REPORT, "a licence signed for the run's pre-commitment"),
    "mitigation": (REPORT, "the verified report of a run that continues the last state", "a neutral result, if it is evaluated"),
    "data-record": (REPORT, "data committed before step 0", "the batch of every step, opened under the report"),
    "no-training": ("the chips' logs", "snapshots matched with declared states"),
}  # fmt: skip
EXCLUDED: Mapping[str, str] = {
    "compute": "operators other than matrix products and convolutions, and compute on chips not shown",
    "data": "the same records in batches of another make-up: a digest is of a whole batch or data set",
    "hyperparameter": "what the job's source does beside its settings; the source itself is in the specification's digest",
    "evaluation": "what other prompts, tools or fine-tuning would draw out of the state, and whether the program is apt",
    "reporting": "runs on chips that were not shown",
    "licence": "whether the licensor's conditions beyond FLOP are kept",
    "mitigation": "whether the mitigation lasts, and states that were used without it",
    "data-record": "a record changed by one bit, cut, padded, tokenised or laid out otherwise has another digest; what a record "
    "was made from; runs that are not declared",
    "no-training": "chips not shown, memory that no program registered, and training undone between two snapshots",
}


@dataclass(frozen=True)
class Rule:
    """One rule: its name in the file, what it asks, and above how many FLOP of lineage it holds (None: always)."""

    id: str
    kind: str
    body: Body
    above_flop: Fraction | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """The evidence that the rule needs, in words."""
        return NEEDS[self._evidence]

    @property
    def excluded(self) -> str:
        """What its answer leaves out, in words."""
        return EXCLUDED[self._evidence]

    @property
    def _evidence(self) -> str:
        of_records = isinstance(self.body, Data) and self.body.unit == "record"
        return "data-record" if of_records else self.kind


@dataclass(frozen=True)
class Rules:
    """A file of rules; ``digest`` names its bytes."""

    name: str
    digest: str
    rules: tuple[Rule, ...]


def shown(value: Fraction) -> str:
    """Return a number for people: whole ones to their last digit up to a million, others with six digits."""
    return str(value) if value.denominator == 1 and abs(value) < 10**6 else f"{float(value):.6g}"


def parse_rules(data: bytes, *, what: str = "rules") -> Rules:
    """Return the rules in a TOML document.

    Raises:
        InvalidInput: more than a mebibyte, not TOML, a field too few or too many, a kind unknown, a number out of range, or
            one name twice.
    """
    if len(data) > RULES_LIMIT:
        raise InvalidInput(f"{what}: {len(data)} bytes exceed the limit of {RULES_LIMIT}")
    try:
        value = tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as problem:
        raise InvalidInput(f"{what}: byte {problem.start} is not UTF-8") from None
    except RecursionError:
        raise InvalidInput(f"{what}: nested deeper than {DEPTH_LIMIT}") from None
    except ValueError as problem:
        raise InvalidInput(f"{what}: not TOML ({ascii(str(problem))[1:-1][:200]})") from None
    check_depth(value, what=what, limit=DEPTH_LIMIT)
    fields = Fields(value, what=what, names=("format", "name", "rule"))
    fields.constant("format", FORMAT)
    items = fields.items("rule")
    if not 1 <= len(items) <= MOST_RULES:
        raise InvalidInput(f"{what}: must have 1 to {MOST_RULES} rules, has {len(items)}")
    rules = tuple(_rule(item, f"{what}: rule {at + 1}") for at, item in enumerate(items))
    names = [rule.id for rule in rules]
    if twice := sorted(name for name in set(names) if names.count(name) > 1):
        raise InvalidInput(f"{what}: two rules are called {twice[0]!r}")
    return Rules(_text(fields, "name", f"{what}: name"), digest(RULES_TAG, data).hex(), rules)


# ----------------------------------------------------------------------------------------- reading one rule

_FORMS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "compute": (("scope", "most_flop"), ()),
    "data": ((), ("forbidden", "required", "unit", "forms")),
    "hyperparameter": (("name", "where"), ("least", "most", "one_of")),
    "evaluation": (("program", "output", "places"), ("least", "most", "one_of")),
    "reporting": ((), ("data_precommitted", "least_snapshots")),
    "licence": (("licensors",), ()),
    "mitigation": (
        ("required",),
        ("unit", "program", "output", "places", "least", "most", "one_of"),
    ),
    "no-training": ((), ("chips", "least_snapshots")),
}
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


class _Table:
    """A rule's table: which fields its kind has, each read with the type it must have."""

    def __init__(self, values: Mapping[str, object], what: str) -> None:
        self.values, self.what = values, what

    def has(self, name: str) -> bool:
        return name in self.values

    def text(self, name: str, known: tuple[str, ...] = (), default: str | None = None) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str) or (known and value not in known) or not 1 <= len(value) <= 200:
            wanted = f"one of {', '.join(known)}" if known else "a text of 1 to 200 characters"
            raise InvalidInput(f"{self.what}: {name} must be {wanted}, is {ascii(value)[:80]}")
        return value

    def number(self, name: str) -> Fraction | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidInput(f"{self.what}: {name} must be a finite number, is {ascii(value)[:80]}")
        exact = Fraction(value)
        if abs(exact) > LARGEST_NUMBER:
            raise InvalidInput(f"{self.what}: {name} exceeds 1e40")
        return exact

    def whole(self, name: str, default: int) -> int:
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
            raise InvalidInput(
                f"{self.what}: {name} must be a whole number below 2**31, is {ascii(value)[:80]}"
            )
        return value

    def flag(self, name: str) -> bool:
        value = self.values.get(name, False)
        if not isinstance(value, bool):
            raise InvalidInput(f"{self.what}: {name} must be true or false, is {ascii(value)[:80]}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.values.get(name, [])
        found = cast("list[object]", value) if isinstance(value, list) else [None]
        texts = tuple(item for item in found if isinstance(item, str))
        if len(texts) != len(found) or len(set(texts)) != len(texts) or len(texts) > MOST_DIGESTS:
            raise InvalidInput(
                f"{self.what}: {name} must be a list of at most {MOST_DIGESTS} texts, none twice"
            )
        return texts

    def digests(self, name: str) -> frozenset[str]:
        texts = self.texts(name)
        for text in texts:
            parse_hex(text, n_bytes=HASH_BYTES, what=f"{self.what}: {name}")
        return frozenset(texts)

    def bounds(self) -> Bounds:
        found = Bounds(self.number("least"), self.number("most"), self.texts("one_of"))
        numeric = found.least is not None or found.most is not None
        if numeric == bool(found.one_of):
            raise InvalidInput(f"{self.what}: must have least or most, or else one_of")
        if found.least is not None and found.most is not None and found.least > found.most:
            raise InvalidInput(f"{self.what}: least {shown(found.least)} is above most {shown(found.most)}")
        return found

    def some(self, name: str) -> frozenset[str]:
        found = self.digests(name)
        if not found:
            raise InvalidInput(f"{self.what}: {name} must name at least one")
        return found


def _rule(value: object, what: str) -> Rule:
    if not isinstance(value, dict):
        raise InvalidInput(f"{what}: must be a table")
    values = cast("dict[str, object]", value)
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in _FORMS:
        raise InvalidInput(f"{what}: kind must be one of {', '.join(sorted(_FORMS))}, is {ascii(kind)[:80]}")
    must, may = _FORMS[kind]
    must = ("id", "kind", *must)
    may = (*may, "above_flop") if kind != "no-training" else may
    for name in must:
        if name not in values:
            raise InvalidInput(f"{what}: field {name!r} is missing")
    if unknown := sorted(set(values) - {*must, *may}):
        raise InvalidInput(f"{what}: field {ascii(unknown[0])[:80]} is unknown to kind {kind}")
    table = _Table(values, what)
    name = table.text("id")
    if not _ID.fullmatch(name):
        raise InvalidInput(
            f"{what}: id {ascii(name)[:80]} must be 1 to 64 letters, digits, dots, dashes or underscores"
        )
    above = table.number("above_flop")
    if above is not None and above < 0:
        raise InvalidInput(f"{what}: above_flop must not be negative")
    return Rule(name, kind, _body(kind, _Table(values, f"{what} ({name})")), above)


def _body(kind: str, table: _Table) -> Body:
    match kind:
        case "compute":
            most = table.number("most_flop")
            if most is None or most < 0:
                raise InvalidInput(f"{table.what}: most_flop must not be negative")
            return Compute(cast("Scope", table.text("scope", ("run", "lineage"))), most)
        case "data":
            unit = cast("Unit", table.text("unit", ("batch", "dataset", "record"), "batch"))
            forms = table.digests("forms")
            if bool(forms) != (unit == "record"):
                raise InvalidInput(f"{table.what}: forms must be named for unit record, and for it alone")
            data = Data(unit, table.digests("forbidden"), table.digests("required"), forms)
            if not data.forbidden | data.required or data.forbidden & data.required:
                raise InvalidInput(f"{table.what}: must forbid or require some data, and not the same")
            return data
        case "hyperparameter":
            where = cast("Where", table.text("where", ("setting", "schedule", "specification")))
            name = table.text("name", SPECIFIED if where == "specification" else ())
            return HyperParameter(name, where, table.bounds())
        case "evaluation":
            return _evaluation(table)
        case "reporting":
            return Reporting(table.flag("data_precommitted"), table.whole("least_snapshots", 0))
        case "licence":
            return Licence(table.some("licensors"))
        case "mitigation":
            evaluated = any(
                table.has(name) for name in ("program", "output", "places", "least", "most", "one_of")
            )
            return Mitigation(
                _unit(table), table.digests("required"), _evaluation(table) if evaluated else None
            )
        case _:
            chips = table.texts("chips")
            for chip in chips:
                parse_hex(chip, n_bytes=min(max(len(chip) // 2, 7), 33), what=f"{table.what}: chips")
            least = table.whole("least_snapshots", 2)
            if least < 2:
                raise InvalidInput(
                    f"{table.what}: least_snapshots must be 2 or more: one snapshot shows no rest"
                )
            return NoTraining(frozenset(chips), least)


def _unit(table: _Table) -> Unit:
    return cast("Unit", table.text("unit", ("batch", "dataset"), "batch"))


def _evaluation(table: _Table) -> Evaluation:
    for name in ("program", "output", "places"):
        if not table.has(name):
            raise InvalidInput(
                f"{table.what}: field {name!r} is missing: an evaluation names program, output and places"
            )
    program = parse_hex(table.text("program"), n_bytes=HASH_BYTES, what=f"{table.what}: program").hex()
    return Evaluation(program, table.text("output"), table.some("places"), table.bounds())


def _text(fields: Fields, name: str, what: str) -> str:
    text = fields.text(name)
    if not 1 <= len(text) <= 200 or not text.isprintable():
        raise InvalidInput(f"{what} must be 1 to 200 printable characters")
    return text
