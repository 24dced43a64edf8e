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
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Annotated, Literal, cast

from tallystick.commit.encoding import HASH_BYTES, Fields, check_depth, digest, parse_hex
from tallystick.commit.field_rules import Via
from tallystick.errors import InvalidInput
from tallystick.fleet.tables import read_table

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
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
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


def shown(value: Fraction) -> str:
    """Return a number for people: whole ones to their last digit up to a million, others with six digits."""
    return str(value) if value.denominator == 1 and abs(value) < 10**6 else f"{float(value):.6g}"


# -- what stands in a rule's table, besides what ``fleet.tables`` reads by itself


def _read_number(value: object, what: str) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidInput(f"{what} must be a finite number, is {ascii(value)[:80]}")
    if abs(exact := Fraction(value)) > LARGEST_NUMBER:
        raise InvalidInput(f"{what} exceeds 1e40")
    return exact


def _read_flop(value: object, what: str) -> Fraction:
    if (found := _read_number(value, what)) < 0:
        raise InvalidInput(f"{what} must not be negative")
    return found


def _read_whole(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise InvalidInput(f"{what} must be a whole number below 2**31, is {ascii(value)[:80]}")
    return value


def _read_text(value: object, what: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= 200:
        raise InvalidInput(f"{what} must be a text of 1 to 200 characters, is {ascii(value)[:80]}")
    return value


def _read_texts(value: object, what: str) -> tuple[str, ...]:
    found = cast("list[object]", value) if isinstance(value, list) else [None]
    texts = tuple(item for item in found if isinstance(item, str))
    if len(texts) != len(found) or len(set(texts)) != len(texts) or len(texts) > MOST_DIGESTS:
        raise InvalidInput(f"{what} must be a list of at most {MOST_DIGESTS} texts, none twice")
    return texts


def _read_digest(value: object, what: str) -> str:
    return parse_hex(_read_text(value, what), n_bytes=HASH_BYTES, what=what).hex()


def _read_digests(value: object, what: str) -> frozenset[str]:
    return frozenset(
        parse_hex(text, n_bytes=HASH_BYTES, what=what).hex() for text in _read_texts(value, what)
    )


def _read_some(value: object, what: str) -> frozenset[str]:
    if not (found := _read_digests(value, what)):
        raise InvalidInput(f"{what} must name at least one")
    return found


def _read_chips(value: object, what: str) -> frozenset[str]:
    texts = _read_texts(value, what)
    return frozenset(
        parse_hex(text, n_bytes=min(max(len(text) // 2, 7), 33), what=what).hex() for text in texts
    )


Number = Annotated[Fraction, Via(str, _read_number)]
Flop = Annotated[Fraction, Via(str, _read_flop)]
Whole = Annotated[int, Via(int, _read_whole)]
Text = Annotated[str, Via(str, _read_text)]
Digest = Annotated[str, Via(str, _read_digest)]
Digests = Annotated[frozenset[str], Via(sorted, _read_digests)]
SomeDigests = Annotated[frozenset[str], Via(sorted, _read_some)]


@dataclass(frozen=True, kw_only=True)
class Compute:
    """At most so many FLOP in a run, or in a run and all that it continues."""

    scope: Scope
    most_flop: Flop


@dataclass(frozen=True, kw_only=True)
class Data:
    """Digests of batches (data sets, single records) that no run may have used, and that every run must have used.

    ``forms`` is for records alone: the layouts of one record that the digests were made for (``batch_opening``).
    """

    unit: Unit = "batch"
    forbidden: Digests = frozenset()
    required: Digests = frozenset()
    forms: Digests = frozenset()

    def __post_init__(self) -> None:
        if bool(self.forms) != (self.unit == "record"):
            raise InvalidInput("forms must be named for unit record, and for it alone")
        if not self.forbidden | self.required or self.forbidden & self.required:
            raise InvalidInput("must forbid or require some data, and not the same")


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """What has bounds: at least and at most, or else one of some texts."""

    least: Number | None = None
    most: Number | None = None
    one_of: Annotated[tuple[str, ...], Via(list, _read_texts)] = ()

    def __post_init__(self) -> None:
        if (self.least is not None or self.most is not None) == bool(self.one_of):
            raise InvalidInput("must have least or most, or else one_of")
        if self.least is not None and self.most is not None and self.least > self.most:
            raise InvalidInput(f"least {shown(self.least)} is above most {shown(self.most)}")

    @property
    def bounds(self) -> Bounds:
        """The bounds."""
        return Bounds(self.least, self.most, self.one_of)


@dataclass(frozen=True, kw_only=True)
class HyperParameter(Bounded):
    """Bounds on a setting of the job, a scheduled value of any step, or a field of the specification."""

    name: Text
    where: Where

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.where == "specification" and self.name not in SPECIFIED:
            raise InvalidInput(f"name must be one of {', '.join(SPECIFIED)}, is {ascii(self.name)[:80]}")


@dataclass(frozen=True, kw_only=True)
class Evaluation(Bounded):
    """Bounds on what an agreed program, run in a neutral place, says of a run's last state."""

    program: Digest
    output: Text
    places: SomeDigests


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """Pre-commitments logged by every chip of a run, with its data, and so many snapshots matched."""

    data_precommitted: bool = False
    least_snapshots: Whole = 0


@dataclass(frozen=True, kw_only=True)
class Licence:
    """A licence for the run's pre-commitment, signed by one of these keys, that covers its FLOP."""

    licensors: SomeDigests


@dataclass(frozen=True, kw_only=True)
class Mitigation:
    """A declared run that goes on from the run's last state on these data, and passes the evaluation if there is one.

    In a file the evaluation's fields stand beside the others.
    """

    required: Digests
    unit: Literal["batch", "dataset"] = "batch"
    evaluation: Evaluation | None = None


@dataclass(frozen=True, kw_only=True)
class NoTraining:
    """The chips named (all that are shown, if none is) hold one and the same state in every snapshot."""

    chips: Annotated[frozenset[str], Via(sorted, _read_chips)] = frozenset()
    least_snapshots: Whole = 2

    def __post_init__(self) -> None:
        if self.least_snapshots < 2:
            raise InvalidInput("least_snapshots must be 2 or more: one snapshot shows no rest")


Body = Compute | Data | HyperParameter | Evaluation | Reporting | Licence | Mitigation | NoTraining
BODIES: Mapping[str, type[Body]] = {
    "compute": Compute, "data": Data, "hyperparameter": HyperParameter, "evaluation": Evaluation, "reporting": Reporting,
    "licence": Licence, "mitigation": Mitigation, "no-training": NoTraining,
}  # fmt: skip
EVALUATED = frozenset(
    field.name for field in fields(Evaluation)
)  # a mitigation has these, if it is evaluated

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
    top = Fields(value, what=what, names=("format", "name", "rule"))
    top.constant("format", FORMAT)
    items = top.items("rule")
    if not 1 <= len(items) <= MOST_RULES:
        raise InvalidInput(f"{what}: must have 1 to {MOST_RULES} rules, has {len(items)}")
    rules = tuple(_rule(item, f"{what}: rule {at + 1}") for at, item in enumerate(items))
    names = [rule.id for rule in rules]
    if twice := sorted(name for name in set(names) if names.count(name) > 1):
        raise InvalidInput(f"{what}: two rules are called {twice[0]!r}")
    return Rules(_title(top.text("name"), f"{what}: name"), digest(RULES_TAG, data).hex(), rules)


def _rule(value: object, what: str) -> Rule:
    if not isinstance(value, dict):
        raise InvalidInput(f"{what}: must be a table")
    values = dict(cast("dict[str, object]", value))
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in BODIES:
        raise InvalidInput(f"{what}: kind must be one of {', '.join(sorted(BODIES))}, is {ascii(kind)[:80]}")
    if "id" not in values:
        raise InvalidInput(f"{what}: field 'id' is missing")
    name = values.pop("id")
    if not isinstance(name, str) or not _ID.fullmatch(name):
        raise InvalidInput(
            f"{what}: id {ascii(name)[:80]} must be 1 to 64 letters, digits, dots, dashes or underscores"
        )
    above, what = None, f"{what} ({name})"
    if kind != "no-training" and "above_flop" in values:
        above = _read_flop(values.pop("above_flop"), f"{what}: above_flop")
    if kind == "mitigation":
        if "evaluation" in values:
            raise InvalidInput(f"{what}: field 'evaluation' is unknown to kind {kind}")
        if evaluation := {field: values.pop(field) for field in sorted(EVALUATED & set(values))}:
            values["evaluation"] = evaluation
    return Rule(name, kind, read_table(BODIES[kind], values, what, whose=f" to kind {kind}"), above)


def _title(text: str, what: str) -> str:
    if not 1 <= len(text) <= 200 or not text.isprintable():
        raise InvalidInput(f"{what} must be 1 to 200 printable characters")
    return text
