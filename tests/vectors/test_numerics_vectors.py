"""Every case of vectors/{rounding,nearest,rounding-log,philox,fingerprint,optimizers}, and the pages that draw their bytes."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tallystick.errors import InvalidInput
from tallystick.numerics import log, nearest, random
from tallystick.numerics.dense import decode_dense, encode_dense
from tallystick.numerics.grid_table import GridTable, SiteGrid
from tallystick.numerics.log import Frame, SiteAddress, SparseEntries
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

if TYPE_CHECKING:
    from collections.abc import Callable

REPOSITORY = Path(__file__).parents[2]
ROOMS = ("rounding", "nearest", "rounding-log", "philox", "fingerprint", "optimizers")
CASES = sorted(folder for room in ROOMS for folder in (REPOSITORY / "vectors" / room).iterdir())
Json = dict[str, Any]


def hexes(values: list[float]) -> list[str]:
    return [value.hex() for value in values]


def floats(values: list[str]) -> list[float]:
    return [float.fromhex(value) for value in values]


def band_of(case: Json) -> ScaledBand | RelativeBand:
    band = case["band"]
    if band["kind"] == "scaled":
        return ScaledBand(band["exponent"], band["floor"], tuple(band["scales"]))
    return RelativeBand(tuple(floats(band["olds"])), band["exponent"])


def recorded(case: Json) -> tuple[list[float], list[LoggedElement]]:
    return record(floats(case["xs"]), case["precision"], band_of(case), case["words"])


def followed(case: Json, ys: str) -> tuple[list[float], list[int]]:
    entries = [LoggedElement(*entry) for entry in case["used"]]
    return follow(floats(case[ys]), entries, case["precision"], band_of(case), case["words"])


def record_and_follow(case: Json) -> None:
    values, entries = recorded(case)
    assert hexes(values) == case["values"]
    assert [[entry.index, entry.side] for entry in entries] == case["entries"]
    seen, violations = followed(case, "ys")
    assert (hexes(seen), violations) == (case["followed"], case["violations"])


def residues_of(case: Json) -> tuple[list[float], list[int]]:
    band = band_of(case)
    assert isinstance(band, ScaledBand)
    return record_residues(floats(case["xs"]), band, case["words"], case["bits"])


def followed_residues(case: Json, ys: str) -> tuple[list[float], list[tuple[int, int]], list[int]]:
    band = band_of(case)
    assert isinstance(band, ScaledBand)
    return follow_residues(floats(case[ys]), case["used"], band, case["words"], case["bits"])


def record_and_follow_residues(case: Json) -> None:
    values, residues = residues_of(case)
    assert (hexes(values), residues) == (case["values"], case["residues"])
    seen, moved, violations = followed_residues(case, "ys")
    assert (hexes(seen), [list(each) for each in moved]) == (case["followed"], case["moved"])
    assert violations == case["violations"]


def residues_bytes(case: Json) -> None:
    found = log.decode_residues(bytes.fromhex(case["data"]), case["n"], case["bits"])
    assert found.values.tolist() == case["residues"]
    assert log.encode_residues(log.Residues.of(case["residues"], case["bits"])).hex() == case["data"]


def nearest_grid(case: Json) -> NearestGrid:
    grid = case["grid"]
    margin = None if grid["tau"] is None else round(math.log2(0.5 - Fraction(grid["tau"])))
    return NearestGrid(grid["b_r"], grid["scale"] + grid["floor"], grid["scale"] + grid["band"], margin)


def nearest_recorded(case: Json) -> tuple[list[float], list[LoggedElement]]:
    return nearest.record(floats(case["xs"]), nearest_grid(case))


def nearest_followed(case: Json) -> None:
    values, entries = nearest_recorded(case)
    assert hexes(values) == case["values"]
    assert [[entry.index, entry.side] for entry in entries] == case["entries"]
    found = nearest.follow(
        floats(case["ys"]), [LoggedElement(*entry) for entry in case["used"]], nearest_grid(case)
    )
    assert (hexes(found.values), found.violations) == (case["followed"], case["violations"])


def dense_entries(case: Json) -> SparseEntries:
    return decode_dense(bytes.fromhex(case["data"]), case["n"])


def dense_bytes(case: Json) -> None:
    found = dense_entries(case)
    assert (found.indexes.tolist(), found.symbols.tolist()) == (case["indexes"], case["symbols"])
    assert encode_dense(found).hex() == case["data"]


def entries_bytes(case: Json) -> None:
    entries = log.decode(bytes.fromhex(case["data"]), case["n"], case["width"])
    assert (entries.indexes.tolist(), entries.symbols.tolist()) == (case["indexes"], case["symbols"])
    written = SparseEntries(
        case["n"], case["width"], np.array(case["indexes"], dtype=np.int64), entries.symbols
    )
    assert log.encode(written).hex() == case["data"]


def decision_bytes(case: Json) -> None:
    data = bytes.fromhex(case["data"])
    band, entries = log.decode_decision(data, case["n"], case["width"])
    assert band == case["band"]
    assert (entries.indexes.tolist(), entries.symbols.tolist()) == (case["indexes"], case["symbols"])
    assert log.encode_decision(band, entries) == data
    assert log.read_decision_head(data) == (case["band"], case["width"])


def frame_bytes(case: Json) -> None:
    frame = log.decode_frame(bytes.fromhex(case["data"]))
    assert [[list(address.fields), payload.hex()] for address, payload in frame] == case["sites"]
    again = Frame(tuple((SiteAddress(*fields), bytes.fromhex(payload)) for fields, payload in case["sites"]))
    assert log.encode_frame(again).hex() == case["data"]


def table_of(sites: list[Json]) -> GridTable:
    return GridTable(
        {
            (site["key"][0], site["key"][1]): SiteGrid(
                site["precision"],
                site["band"],
                site["floor"],
                site["dithered"],
                site["scales"],
                residue_bits=site.get("residue_bits", 0),
            )
            for site in sites
        }
    )


def table_bytes(case: Json) -> None:
    assert table_of(case["sites"]).encode().hex() == case["data"]
    assert GridTable.decode(bytes.fromhex(case["data"])) == table_of(case["sites"])


def change_bytes(case: Json) -> None:
    old, new = table_of(case["old"]), table_of(case["new"])
    assert old.diff(new).hex() == case["data"]
    assert old.apply(bytes.fromhex(case["data"])) == new


def block(case: Json) -> None:
    assert list(random.philox4x32(tuple(case["counter"]), tuple(case["key"]))) == case["output"]


def stream_key(case: Json) -> tuple[int, int]:
    names = ("seed", "purpose", "step", "rank", "micro_batch", "call")
    return random.stream_key(**{name: case[name] for name in names})


def key(case: Json) -> None:
    assert list(stream_key(case)) == case["key"]


def draw(case: Json) -> list[Any]:
    place = tuple(case["key"]), case["start"], case["count"]
    if case["operation"] == "words":
        return random.words(*place).tolist()
    if case["operation"] == "uniform01":
        return hexes(random.uniform01(*place).tolist())
    if case["operation"] == "bernoulli":
        return random.bernoulli(*place, float.fromhex(case["p"])).tolist()
    if case["operation"] == "randint":
        return random.randint(*place, case["low"], case["high"]).tolist()
    if case["operation"] == "normal":
        return hexes(random.normal(*place).tolist())
    assert case["operation"] == "permutation"
    return random.permutation(tuple(case["key"]), case["count"]).tolist()


def drawn(case: Json) -> None:
    assert draw(case) == case["values"]


def quantiles(case: Json) -> None:
    values = random.inverse_normal(np.array(floats(case["u"])))
    assert values.tolist() == pytest.approx(floats(case["values"]), rel=4e-15)


def normal_at(case: Json) -> None:
    assert hexes(random.inverse_normal(np.array(floats(case["u"]))).tolist()) == case["values"]


def fingerprint_of(case: Json) -> int:
    return fingerprint({name: floats(values) for name, values in case["tensors"].items()})


def fingerprint_digits(case: Json) -> None:
    assert f"{fingerprint_of(case):016x}" == case["fingerprint"]


def adam_rows(case: Json) -> None:
    numbers = [float.fromhex(case[name]) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")]
    rule = AdamRule(*numbers, case["decoupled"])
    for before, after in zip(case["before"], case["after"], strict=True):
        p, g, m, v = floats(before)
        assert hexes(list(adam(rule, case["step"], p, g, m, v))) == after


def sgd_rows(case: Json) -> list[list[str | None]]:
    numbers = [float.fromhex(case[name]) for name in ("lr", "momentum", "dampening", "weight_decay")]
    rule = SgdRule(*numbers, case["nesterov"])
    found: list[list[str | None]] = []
    for p, g, buffer in case["before"]:
        held = None if buffer is None else float.fromhex(buffer)
        after = sgd(rule, float.fromhex(p), float.fromhex(g), held)
        found.append([None if value is None else value.hex() for value in after])
    return found


def sgd_after(case: Json) -> None:
    assert sgd_rows(case) == case["after"]


ACCEPTED: dict[str, Callable[[Json], None]] = {
    "record-and-follow": record_and_follow,
    "residues": record_and_follow_residues,
    "parities": residues_bytes,
    "nearest": nearest_followed,
    "dense": dense_bytes,
    "entries": entries_bytes,
    "decision": decision_bytes,
    "frame": frame_bytes,
    "table": table_bytes,
    "change": change_bytes,
    "block": block,
    "key": key,
    "words": drawn,
    "uniform01": drawn,
    "bernoulli": drawn,
    "randint": drawn,
    "permutation": drawn,
    "quantiles": quantiles,
    "normal": drawn,
    "normal-at": normal_at,
    "fingerprint": fingerprint_digits,
    "adam": adam_rows,
    "sgd": sgd_after,
}
REFUSED: dict[str, Callable[[Json], object]] = {
    "record": recorded,
    "nearest": nearest_recorded,
    "dense": dense_entries,
    "follow": lambda case: followed(case, "xs"),
    "residues": lambda case: followed_residues(case, "xs"),
    "parities": lambda case: log.decode_residues(bytes.fromhex(case["data"]), case["n"], case["bits"]),
    "entries": lambda case: log.decode(bytes.fromhex(case["data"]), case["n"], case["width"]),
    "decision": lambda case: log.decode_decision(bytes.fromhex(case["data"]), case["n"], case["width"]),
    "frame": lambda case: log.decode_frame(bytes.fromhex(case["data"])),
    "table": lambda case: GridTable.decode(bytes.fromhex(case["data"])),
    "change": lambda case: table_of(case["old"]).apply(bytes.fromhex(case["data"])),
    "key": stream_key,
    "words": draw,
    "bernoulli": draw,
    "randint": draw,
    "fingerprint": fingerprint_of,
    "sgd": sgd_rows,
}


@pytest.mark.parametrize("folder", CASES, ids=lambda folder: f"{folder.parent.name}/{folder.name}")
def test_vector(folder: Path) -> None:
    assert (folder / "README.md").read_text(encoding="utf-8").strip()
    case = json.loads((folder / "input.json").read_text(encoding="utf-8"))
    assert folder.name.endswith("_fail") == ("reason" in case)
    if "reason" not in case:
        ACCEPTED[case["operation"]](case)
        return
    assert case["error"] == "InvalidInput"
    with pytest.raises(InvalidInput, match=re.escape(case["reason"])):
        REFUSED[case["operation"]](case)


def test_the_vectors_are_what_the_script_writes(tmp_path: Path) -> None:
    script = REPOSITORY / "scripts" / "vectors_numerics.py"
    subprocess.run([sys.executable, script, tmp_path], check=True)
    for room in ROOMS:
        assert files_under(tmp_path / room) == files_under(REPOSITORY / "vectors" / room)


def files_under(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def blocks_of(page: str) -> list[bytes]:
    """Return what the hex blocks of a page draw, without comments."""
    text = (REPOSITORY / "spec" / page).read_text(encoding="utf-8")
    found = re.findall(r"```hex\n(.*?)```", text, flags=re.DOTALL)
    return [
        bytes.fromhex("".join(line.partition("#")[0] for line in drawing.splitlines())) for drawing in found
    ]


def example(room: str, name: str) -> bytes:
    case = json.loads((REPOSITORY / "vectors" / room / name / "input.json").read_text(encoding="utf-8"))
    return bytes.fromhex(case["data"])


def test_the_rounding_log_page_draws_the_bytes_of_the_codec() -> None:
    names = (
        "entries-example",
        "frame-example",
        "table-example",
        "change-example",
        "decision-example",
        "parities-example",
        "dense-example",
    )
    assert blocks_of("rounding-log.md") == [example("rounding-log", name) for name in names]


def log_of(entries: list[LoggedElement], n: int) -> bytes:
    indexes, sides = [each.index for each in entries], [each.side for each in entries]
    return log.encode(SparseEntries(n, 1, np.array(indexes), np.array(sides)))


def test_the_rounding_page_draws_what_the_reference_gives() -> None:
    xs, values, logged, ys, back = blocks_of("rounding.md")[:5]
    band = ScaledBand(-6, 0, (0,))
    recorded_values, entries = record(np.frombuffer(xs).tolist(), 0, band)
    assert np.array(recorded_values).tobytes() == values
    assert log_of(entries, len(recorded_values)) == logged
    assert follow(np.frombuffer(ys).tolist(), entries, 0, band) == (np.frombuffer(back).tolist(), [])
    assert back == values
    assert np.array(record(np.frombuffer(ys).tolist(), 0, band)[0]).tobytes() != values


def test_the_rounding_page_draws_a_cancellation_as_the_reference_gives_it() -> None:
    xs, values_and_log, ys = blocks_of("rounding.md")[5:8]
    band = RelativeBand((1.0, 1.0, 1.0))
    values, entries = record(np.frombuffer(xs).tolist(), 24, band)
    assert np.array(values).tobytes() + log_of(entries, 3) == values_and_log
    assert values == [0.0, 2.0**-39, 0.0]
    assert follow(np.frombuffer(ys).tolist(), entries, 24, band) == (values, [])
    assert record(np.frombuffer(ys).tolist(), 24, band)[0] == [2.0**-42, 7 * 2.0**-42, 0.0]


def test_the_rounding_page_draws_parities_as_the_reference_gives_them() -> None:
    xs, values_and_bits, ys_and_values = blocks_of("rounding.md")[8:]
    band = ScaledBand(-1, 0, (0,))
    values, parities = record_residues(np.frombuffer(xs).tolist(), band)
    assert np.array(values).tobytes() + log.encode_residues(log.Residues.of(parities)) == values_and_bits
    ys = np.frombuffer(ys_and_values[:32]).tolist()
    assert follow_residues(ys, parities, band) == (values, [(0, -1), (1, 1), (2, -1)], [])
    assert np.array(values).tobytes() == ys_and_values[32:]
    assert record_residues(ys, band)[0] == [1.0, 3.0, 0.0, 1.0]


def test_the_transcript_page_shows_the_fingerprint_of_its_example() -> None:
    text = (REPOSITORY / "spec" / "transcript.md").read_text(encoding="utf-8")
    terms, shown = re.findall(
        r"^    ([0-9a-f]{8} \* .*)  =  ([0-9a-f]{16})    mod 2\^64$", text, re.MULTILINE
    )[0]
    products = [[int(part, 16) for part in term.split(" * ")] for term in terms.split("  +  ")]
    assert f"{sum(left * right for left, right in products) % 2**64:016x}" == shown
    assert f"{fingerprint({'a': [1.0, -2.0], 'b': [0.5]}):016x}" == shown
    name = REPOSITORY / "vectors" / "fingerprint" / "worked-example" / "input.json"
    assert json.loads(name.read_text(encoding="utf-8"))["fingerprint"] == shown


def test_the_random_page_draws_what_the_streams_give() -> None:
    message, digest, words, uniforms, normals = blocks_of("random.md")
    key = random.stream_key(1, "example", 2, 0, 0, 3)
    assert random.hashlib.sha256(message).digest() == digest
    assert np.frombuffer(digest[:8], dtype="<u4").tolist() == list(key)
    assert random.words(key, 0, 8).astype("<u4").tobytes() == words
    assert random.uniform01(key, 0, 2).astype("<f8").tobytes() == uniforms
    assert random.normal(key, 0, 2).astype("<f8").tobytes() == normals
