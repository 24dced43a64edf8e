"""What an implementation can be asked about rounding, its logs, random numbers and optimizers (spec/vectors.md 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from tallystick.errors import InvalidInput
from tallystick.evidence.conformance import QUANTILE_TOLERANCE, Json, Query
from tallystick.evidence.question_forms import (
    BAND,
    BOOLEAN,
    HEX,
    INTEGER,
    INTEGERS,
    OBJECT,
    PAIRS,
    REAL,
    REALS,
    TEXT,
    floats,
    listed,
    optional,
    reals,
)
from tallystick.numerics import log, nearest, random
from tallystick.numerics.dense import decode_dense
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.nearest import NearestGrid
from tallystick.numerics.reference import (
    AdamRule,
    LoggedElement,
    RelativeBand,
    ScaledBand,
    SgdRule,
    adam,
    fingerprint,
    follow,
    follow_residues,
    record,
    record_residues,
    sgd,
)

Values = Mapping[str, object]


# ------------------------------------------------------------------------------------------ rounding and logs


def _band(band: Json) -> ScaledBand | RelativeBand:
    if band["kind"] == "scaled":
        return ScaledBand(band["exponent"], band["floor"], tuple(band["scales"]))
    return RelativeBand(tuple(floats(band["olds"])), band["exponent"])


def _scaled(band: Json) -> ScaledBand:
    found = _band(band)
    if not isinstance(found, ScaledBand):
        raise InvalidInput("residues: need scales, the band is relative")
    return found


def _logged(entries: list[list[int]]) -> list[LoggedElement]:
    return [LoggedElement(*entry) for entry in entries]


def _rounding(
    precision: int, band: Json, words: list[int] | None, xs: list[str], ys: list[str], used: list[list[int]]
) -> Values:
    values, entries = record(floats(xs), precision, _band(band), words)
    followed, violations = follow(floats(ys), _logged(used), precision, _band(band), words)
    return {
        "values": reals(values),
        "entries": [[entry.index, entry.side] for entry in entries],
        "followed": reals(followed),
        "violations": violations,
    }


def _residues(
    bits: int, band: Json, words: list[int] | None, xs: list[str], ys: list[str], used: list[int]
) -> Values:
    values, residues = record_residues(floats(xs), _scaled(band), words, bits)
    followed, moved, violations = follow_residues(floats(ys), used, _scaled(band), words, bits)
    return {
        "values": reals(values),
        "residues": residues,
        "followed": reals(followed),
        "moved": [list(each) for each in moved],
        "violations": violations,
    }


def _nearest(grid: Json, xs: list[str], ys: list[str], used: list[list[int]]) -> Values:
    margin = None if grid["tau"] is None else round(math.log2(0.5 - Fraction(grid["tau"])))
    rule = NearestGrid(grid["b_r"], grid["scale"] + grid["floor"], grid["scale"] + grid["band"], margin)
    values, entries = nearest.record(floats(xs), rule)
    found = nearest.follow(floats(ys), _logged(used), rule)
    return {
        "values": reals(values),
        "entries": [[entry.index, entry.side] for entry in entries],
        "followed": reals(found.values),
        "violations": list(found.violations),
    }


def _with_ys(case: Json) -> Json:
    """A refused case may have what the recorder is given alone."""
    return {**case, "ys": case.get("ys") or case["xs"], "used": case.get("used") or []}


def _entries_of(found: log.SparseEntries) -> Values:
    return {"indexes": found.indexes.tolist(), "symbols": found.symbols.tolist()}


def _sparse(data: str, n: int, width: int) -> Values:
    return _entries_of(log.decode(bytes.fromhex(data), n, width))


def _decision(data: str, n: int, width: int) -> Values:
    band, entries = log.decode_decision(bytes.fromhex(data), n, width)
    return {"band": band, **_entries_of(entries)}


def _dense(data: str, n: int) -> Values:
    return _entries_of(decode_dense(bytes.fromhex(data), n))


def _parities(data: str, n: int, bits: int) -> Values:
    return {"residues": log.decode_residues(bytes.fromhex(data), n, bits).values.tolist()}


def _frame(data: str) -> Values:
    found = log.decode_frame(bytes.fromhex(data))
    return {"sites": [[list(address.fields), payload.hex()] for address, payload in found]}


def _grids(table: GridTable) -> list[Json]:
    return [
        {
            "key": list(key),
            "precision": grid.precision,
            "band": grid.band,
            "floor": grid.floor,
            "dithered": grid.dithered,
            "scales": grid.scales.tolist(),
            "residue_bits": grid.residue_bits,
        }
        for key, grid in table.sites.items()
    ]


def _table_of(sites: list[Json]) -> GridTable:
    return GridTable(
        {
            (site["key"][0], site["key"][1]): SiteGrid(
                site["precision"],
                site["band"],
                site["floor"],
                site["dithered"],
                site["scales"],
                residue_bits=site["residue_bits"],
            )
            for site in sites
        }
    )


def _table(data: str) -> Values:
    return {"sites": _grids(GridTable.decode(bytes.fromhex(data)))}


def _change(old: list[Json], data: str) -> Values:
    return {"new": _grids(_table_of(old).apply(bytes.fromhex(data)))}


def _with_residues(case: Json) -> Json:
    """A case leaves ``residue_bits`` out where there are none."""
    tables = {name: case[name] for name in ("sites", "old", "new") if name in case}
    return {
        **case,
        **{name: [{"residue_bits": 0, **site} for site in table] for name, table in tables.items()},
    }


def _fingerprint(tensors: dict[str, list[str]]) -> Values:
    found = fingerprint({name: floats(values) for name, values in tensors.items()})
    return {"fingerprint": f"{found:016x}"}


ROUNDED = {"values": REALS, "followed": REALS, "violations": INTEGERS}
SPARSE = {"indexes": INTEGERS, "symbols": INTEGERS}
WORDS = optional(INTEGERS)
GRIDS = listed(
    {
        "type": "object",
        "properties": {
            "key": listed(INTEGER, 2), "precision": INTEGER, "band": INTEGER, "floor": INTEGER, "dithered": BOOLEAN,
            "scales": INTEGERS, "residue_bits": INTEGER,
        },
        "required": ["band", "dithered", "floor", "key", "precision", "residue_bits", "scales"],
        "additionalProperties": False,
    }
)  # fmt: skip
ROUNDING: Mapping[str, Query] = {
    "record-and-follow": Query(
        "What the recorder makes of xs, and the follower of ys with the entries used.",
        {"precision": INTEGER, "band": BAND, "words": WORDS, "xs": REALS, "ys": REALS, "used": PAIRS}, _rounding,
        {**ROUNDED, "entries": PAIRS}, prepare=_with_ys,
    ),
    "residues": Query(
        "The same with residues of so many bits.",
        {"bits": INTEGER, "band": BAND, "words": WORDS, "xs": REALS, "ys": REALS, "used": INTEGERS}, _residues,
        {**ROUNDED, "residues": INTEGERS, "moved": PAIRS}, prepare=_with_ys,
    ),
    "nearest": Query(
        "The same to nearest; grid has b_r, scale, floor, band and tau, a fraction as text or null.",
        {"grid": OBJECT, "xs": REALS, "ys": REALS, "used": PAIRS}, _nearest, {**ROUNDED, "entries": PAIRS},
        prepare=_with_ys,
    ),
    "entries": Query("The entries of a site.", {"data": HEX, "n": INTEGER, "width": INTEGER}, _sparse, SPARSE),
    "decision": Query(
        "Band and entries of a decision.", {"data": HEX, "n": INTEGER, "width": INTEGER}, _decision,
        {"band": INTEGER, **SPARSE},
    ),
    "dense": Query("The entries of the dense form.", {"data": HEX, "n": INTEGER}, _dense, SPARSE),
    "parities": Query(
        "The residues of a site.", {"data": HEX, "n": INTEGER, "bits": INTEGER}, _parities, {"residues": INTEGERS}
    ),
    "frame": Query(
        "The sites of a frame: [address, payload] each.", {"data": HEX}, _frame, {"sites": listed({"type": "array"})}
    ),
    "table": Query("A table of grids.", {"data": HEX}, _table, {"sites": GRIDS}, prepare=_with_residues),
    "change": Query(
        "The table after a change.", {"old": GRIDS, "data": HEX}, _change, {"new": GRIDS}, prepare=_with_residues
    ),
    "fingerprint": Query(
        "The fingerprint of tensors.", {"tensors": {"type": "object", "additionalProperties": REALS}}, _fingerprint,
        {"fingerprint": HEX},
    ),
}  # fmt: skip


# ------------------------------------------------------------------------------------ random numbers, optimizers


def _block(counter: list[int], key: list[int]) -> Values:
    a, b, c, d = counter
    return {"output": list(random.philox4x32((a, b, c, d), (key[0], key[1])))}


def _key(seed: int, purpose: str, step: int, rank: int, micro_batch: int, call: int) -> Values:
    return {"key": list(random.stream_key(seed, purpose, step, rank, micro_batch, call))}


def _words(key: list[int], start: int, count: int) -> Values:
    return {"values": random.words((key[0], key[1]), start, count).tolist()}


def _uniform(key: list[int], start: int, count: int) -> Values:
    return {"values": reals(random.uniform01((key[0], key[1]), start, count).tolist())}


def _bernoulli(key: list[int], start: int, count: int, p: str) -> Values:
    return {"values": random.bernoulli((key[0], key[1]), start, count, float.fromhex(p)).tolist()}


def _randint(key: list[int], start: int, count: int, low: int, high: int) -> Values:
    return {"values": random.randint((key[0], key[1]), start, count, low, high).tolist()}


def _permutation(key: list[int], count: int) -> Values:
    return {"values": random.permutation((key[0], key[1]), count).tolist()}


def _normal(key: list[int], start: int, count: int) -> Values:
    return {"values": reals(random.normal((key[0], key[1]), start, count).tolist())}


def _normal_at(u: list[str]) -> Values:
    return {"values": reals(random.inverse_normal(np.array(floats(u))).tolist())}


def _adam(
    lr: str,
    beta1: str,
    beta2: str,
    eps: str,
    weight_decay: str,
    decoupled: bool,
    step: int,
    before: list[Any],
) -> Values:
    rate, first, second, least, decay = floats([lr, beta1, beta2, eps, weight_decay])
    rule = AdamRule(rate, first, second, least, decay, decoupled)
    rows = [floats(row) for row in before]
    return {"after": [reals(adam(rule, step, p, g, m, v)) for p, g, m, v in rows]}


def _sgd(
    lr: str, momentum: str, dampening: str, weight_decay: str, nesterov: bool, before: list[Any]
) -> Values:
    rate, kept, damped, decay = floats([lr, momentum, dampening, weight_decay])
    rule = SgdRule(rate, kept, damped, decay, nesterov)
    after: list[list[str | None]] = []
    for p, g, buffer in before:
        held = None if buffer is None else float.fromhex(buffer)
        found = sgd(rule, float.fromhex(p), float.fromhex(g), held)
        after.append([None if value is None else value.hex() for value in found])
    return {"after": after}


STREAM = {"key": listed(INTEGER, 2), "start": INTEGER, "count": INTEGER}
RANDOM: Mapping[str, Query] = {
    "block": Query(
        "One output of the cipher.", {"counter": listed(INTEGER, 4), "key": listed(INTEGER, 2)}, _block,
        {"output": listed(INTEGER, 4)},
    ),
    "key": Query(
        "The key of a stream.",
        {"seed": INTEGER, "purpose": TEXT, "step": INTEGER, "rank": INTEGER, "micro_batch": INTEGER, "call": INTEGER},
        _key, {"key": listed(INTEGER, 2)},
    ),
    "words": Query("Words of a stream.", STREAM, _words, {"values": INTEGERS}),
    "uniform01": Query("Uniform numbers.", STREAM, _uniform, {"values": REALS}),
    "bernoulli": Query(
        "Whether elements are kept.", {**STREAM, "p": REAL}, _bernoulli, {"values": listed(BOOLEAN)}
    ),
    "randint": Query(
        "Integers in [low, high).", {**STREAM, "low": INTEGER, "high": INTEGER}, _randint, {"values": INTEGERS}
    ),
    "permutation": Query(
        "A permutation.", {"key": listed(INTEGER, 2), "count": INTEGER}, _permutation, {"values": INTEGERS}
    ),
    "normal": Query("Normal numbers.", STREAM, _normal, {"values": REALS}),
    "normal-at": Query("Normal numbers at uniform ones, bit for bit.", {"u": REALS}, _normal_at, {"values": REALS}),
    "quantiles": Query(
        "The same, to a relative 4e-15 of another method's.", {"u": REALS}, _normal_at, {"values": REALS},
        tolerance=QUANTILE_TOLERANCE,
    ),
    "adam": Query(
        "Parameter and both averages after a step; before it these and the gradient second.",
        {
            "lr": REAL, "beta1": REAL, "beta2": REAL, "eps": REAL, "weight_decay": REAL, "decoupled": BOOLEAN,
            "step": INTEGER, "before": listed(listed(REAL, 4)),
        },
        _adam, {"after": listed(listed(REAL, 3))},
    ),
    "sgd": Query(
        "Parameter and momentum after a step; before it these and the gradient second.",
        {
            "lr": REAL, "momentum": REAL, "dampening": REAL, "weight_decay": REAL, "nesterov": BOOLEAN,
            "before": listed(listed(optional(REAL), 3)),
        },
        _sgd, {"after": listed(listed(optional(REAL), 2))},
    ),
}  # fmt: skip

NUMERICS: Mapping[str, Query] = {**ROUNDING, **RANDOM}
