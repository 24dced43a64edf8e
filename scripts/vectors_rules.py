"""Write the test vectors of rules, opened batches and neutral orders: files with their digests, batches with their records.

Documents, digests and bits are put together here from hashlib, json and fractions, straight from spec/rules.md and
spec/neutral-run.md; nothing here imports the package.

    python scripts/vectors_rules.py vectors
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

from vector_cases import Case, canonical, write_cases

FAILURES = 4


def write(root: Path) -> None:
    """Write every case below ``root``, the vectors folder; what stood there goes."""
    write_cases(root / "rules", rules_cases())
    write_cases(root / "neutral-order", order_cases())
    write_cases(root / "neutral-output", output_cases())
    write_cases(root / "batch-opening", batch_cases())


def named(tag: str, data: bytes) -> str:
    framed = bytes([len(tag)]) + tag.encode() + len(data).to_bytes(8, "little") + data
    return hashlib.sha256(framed).hexdigest()


# ------------------------------------------------------------------------------------------------ rules

A, B = "aa" * 32, "bb" * 32
HEAD = 'format = "tallystick/rules/1"\nname = "Example"\n'
COMPUTE = '\n[[rule]]\nid = "flop"\nkind = "compute"\nscope = "lineage"\nmost_flop = 1e25\n'
EVERY = f"""
[[rule]]
id = "flop"
kind = "compute"
scope = "run"
most_flop = 10000000000000000000000000

[[rule]]
id = "data"
kind = "data"
unit = "batch"
forbidden = ["{A}"]
required = ["{B}"]

[[rule]]
id = "rate"
kind = "hyperparameter"
name = "lr"
where = "schedule"
least = 0
most = 0.01

[[rule]]
id = "benchmark"
kind = "evaluation"
above_flop = 1e22
program = "{A}"
output = "score"
places = ["{B}"]
most = 0.5

[[rule]]
id = "reported"
kind = "reporting"
data_precommitted = true
least_snapshots = 1

[[rule]]
id = "licence"
kind = "licence"
above_flop = 1e23
licensors = ["{B}"]

[[rule]]
id = "harmless"
kind = "mitigation"
required = ["{B}"]
program = "{A}"
output = "harmless"
places = ["{B}"]
one_of = ["pass"]

[[rule]]
id = "pause"
kind = "no-training"
chips = ["{"01" * 17}"]
least_snapshots = 3
"""


RECORDS = f"""
[[rule]]
id = "letters"
kind = "data"
unit = "record"
forms = ["{B}"]
forbidden = ["{A}"]
"""


def rules(text: str) -> Case:
    ids = [line.split('"')[1] for line in text.splitlines() if line.startswith("id =")]
    kinds = [line.split('"')[1] for line in text.splitlines() if line.startswith("kind =")]
    return {
        "text": text,
        "digest": named("tallystick/rules/1", text.encode()),
        "rules": [list(r) for r in zip(ids, kinds, strict=True)],
    }


def refused(text: str, reason: str) -> Case:
    return {"text": text, "error": "InvalidInput", "reason": reason}


def rules_cases() -> dict[str, tuple[str, Case]]:
    one = HEAD + COMPUTE
    return {
        "one-rule": ("A limit on the FLOP of a lineage.", rules(one)),
        "every-kind": ("Each of the eight kinds, with every field that it has.", rules(HEAD + EVERY)),
        "records": (
            "Digests of single records, and the form that they were made for.",
            rules(HEAD + RECORDS),
        ),
        "records-without-form_fail": (
            "In another layout their absence says nothing.",
            refused(
                (HEAD + RECORDS).replace(f'forms = ["{B}"]\n', ""), "forms must be named for unit record"
            ),
        ),
        "form-of-batches_fail": (
            "A batch is named whole.",
            refused((HEAD + RECORDS).replace('"record"', '"batch"'), "forms must be named for unit record"),
        ),
        "records-of-a-mitigation_fail": (
            "It goes by batches or data sets.",
            refused(
                (HEAD + EVERY).replace('kind = "mitigation"', 'kind = "mitigation"\nunit = "record"'),
                "unit must be one of",
            ),
        ),
        "comment": ("Another digest for the same rules: it is of the bytes.", rules(f"# version 2\n{one}")),
        "unknown-field_fail": (
            "A field might ask for something.",
            refused(f"{one}scale = 2\n", "is unknown to kind compute"),
        ),
        "unknown-kind_fail": (
            "Kinds are eight.",
            refused(one.replace('"compute"', '"energy"'), "kind must be one of"),
        ),
        "other-format_fail": ("Version 2.", refused(one.replace("rules/1", "rules/2"), "format must be")),
        "no-rules_fail": ("Nothing is asked.", refused(f"{HEAD}rule = []\n", "must have 1 to 1000 rules")),
        "name-twice_fail": ("Two rules of one name.", refused(one + COMPUTE, "two rules are called")),
        "key-twice_fail": ("TOML has each key once.", refused(f"{one}most_flop = 1e24\n", "not TOML")),
        "infinite_fail": (
            "A limit that limits nothing.",
            refused(one.replace("1e25", "inf"), "must be a finite number"),
        ),
        "text-for-number_fail": (
            "A number is not a text.",
            refused(one.replace("1e25", '"1e25"'), "must be a finite number"),
        ),
        "negative_fail": ("Less than nothing.", refused(one.replace("1e25", "-1"), "must not be negative")),
        "no-bound_fail": (
            "A hyper-parameter that may be anything.",
            refused(
                HEAD + '\n[[rule]]\nid = "r"\nkind = "hyperparameter"\nname = "lr"\nwhere = "schedule"\n',
                "must have least or most",
            ),
        ),
        "upper-case-digest_fail": (
            "One value has one spelling.",
            refused((HEAD + EVERY).replace(A, A.upper()), "lower-case hexadecimal digits"),
        ),
        "forbidden-and-required_fail": (
            "No run can obey.",
            refused(
                (HEAD + EVERY).replace(f'required = ["{B}"]', f'required = ["{A}"]', 1), "and not the same"
            ),
        ),
        "one-snapshot_fail": (
            "One snapshot shows no rest.",
            refused(
                (HEAD + EVERY).replace("least_snapshots = 3", "least_snapshots = 1"),
                "one snapshot shows no rest",
            ),
        ),
        "not-utf-8_fail": (
            "Latin-1.",
            {"hex": HEAD.encode().hex() + "ff", "error": "InvalidInput", "reason": "is not UTF-8"},
        ),
    }


# ---------------------------------------------------------------------------------------- opened batches


def framed(tag: str, *parts: bytes) -> bytes:
    return bytes([len(tag)]) + tag.encode() + b"".join(len(p).to_bytes(8, "little") + p for p in parts)


def sha(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def piece(where: str, dtype: str, shape: list[int], data: bytes) -> bytes:
    return framed("tallystick/batch/1", where.encode(), canonical([dtype, shape]), data)


ROWS = [b"\x01\x02", b"\x03\x04", b"\x05\x06"]
LABELS = [7, 8, 9]
PAIR = framed("tallystick/batch/1", b"batch", b"2")


def three(rows: list[bytes], labels: list[int]) -> bytes:
    """A batch (bytes of two, a number of 64 bits), as its digest hashes it."""
    numbers = b"".join(label.to_bytes(8, "little") for label in labels)
    count = len(rows)
    return (
        PAIR
        + piece("batch[0]", "uint8", [count, 2], b"".join(rows))
        + piece("batch[1]", "int64", [count], numbers)
    )


def opened(batch: bytes, step: int = 1, **changes: Any) -> tuple[bytes, str]:
    """The opening of ``batch`` as step 1 of 3, and the root that a report commits to."""
    salts = [sha(b"salt" + bytes([at])) for at in range(3)]
    others = [sha(b"other" + bytes([at])) for at in range(3)]
    digests = [sha(batch) if at == 1 else others[at] for at in range(3)]
    leaves = [
        sha(b"\0" + sha(framed("tallystick/hiding/1", salt, d)))
        for salt, d in zip(salts, digests, strict=True)
    ]
    root = sha(b"\1" + sha(b"\1" + leaves[0] + leaves[1]) + leaves[2])
    head = {
        "proof": [leaves[0].hex(), leaves[2].hex()], "run": "12" * 32, "salt": salts[1].hex(), "step": step, "steps": 3,
        **changes,
    }  # fmt: skip
    return framed("tallystick/batch-opening/1", canonical(head), batch), root.hex()


def in_report(batch: bytes, **more: Any) -> Case:
    data, root = opened(batch)
    return {
        "opening": data.hex(),
        "run": "12" * 32,
        "steps": 3,
        "data": root,
        "batch": sha(batch).hex(),
        **more,
    }


def spoiled(data: bytes, error: str, reason: str) -> Case:
    case = in_report(three(ROWS, LABELS), error=error, reason=reason)
    return {**case, "opening": data.hex()}


def batch_cases() -> dict[str, tuple[str, Case]]:
    batch = three(ROWS, LABELS)
    good, _ = opened(batch)
    flipped = three([b"\x01\x02", b"\x03\x05", b"\x05\x06"], LABELS)
    heads = (
        b"batch",
        b"2",
        b"batch[0]",
        canonical(["uint8", [1, 2]]),
        b"batch[1]",
        canonical(["int64", [1]]),
    )
    form = sha(framed("tallystick/record-form/1", *heads)).hex()
    records = [sha(three([row], [label])).hex() for row, label in zip(ROWS, LABELS, strict=True)]
    uneven = piece("batch.a", "uint8", [2], b"\1\2") + piece("batch.b", "uint8", [3], b"\1\2\3")
    return {
        "three-records": (
            "Each record has the digest of a batch with it alone.",
            in_report(batch, form=form, records=records),
        ),
        "record-elsewhere": (
            "The second record, in a batch of its own: the same digest.",
            in_report(three(ROWS[1:2], LABELS[1:2]), form=form, records=records[1:2]),
        ),
        "one-bit": (
            "The second record with one bit changed: a record that no list knows.",
            in_report(flipped, form=form, records=[records[0], sha(three([b"\x03\x05"], [8])).hex(), records[2]]),
        ),
        "uneven": (
            "Two and three of something: bound to the report, and no records.",
            in_report(uneven, form=None, records=[]),
        ),
        "other-batch_fail": (
            "One bit of the batch, against the report of the true one.",
            spoiled(good[:-1] + b"\1", "Mismatch", "leads to"),
        ),
        "other-salt_fail": ("A salt of another step.", spoiled(opened(batch, salt="00" * 32)[0], "Mismatch", "leads to")),
        "other-step_fail": ("The batch of step 1, as that of step 0.", spoiled(opened(batch, 0)[0], "Mismatch", "leads to")),
        "other-run_fail": ("Another run's.", spoiled(opened(batch, run="13" * 32)[0], "Mismatch", "is of run 1313")),
        "other-length_fail": ("Another run's length.", spoiled(opened(batch, steps=4)[0], "Mismatch", "with 4 steps")),
        "short-proof_fail": ("A node is missing.", spoiled(opened(batch, proof=["00" * 32])[0], "InvalidInput", "needs 2 nodes")),
        "step-beyond_fail": ("Step 3 of 3.", spoiled(opened(batch, 3)[0], "InvalidInput", "out of range")),
        "bytes-follow_fail": ("Something behind it.", spoiled(good + b"\0", "InvalidInput", "1 bytes follow")),
        "cut-short_fail": ("The last byte is missing.", spoiled(good[:-1], "InvalidInput", "are possible")),
        "other-spelling_fail": (
            "Whitespace in its head.",
            spoiled(framed("tallystick/batch-opening/1", b"{ }", batch), "InvalidInput", "canonical"),
        ),
        "unknown-dtype_fail": (
            "How long is one?",
            spoiled(opened(piece("batch", "complex64", [1], bytes(8)))[0], "InvalidInput", "a dtype that has a digest"),
        ),
        "other-size_fail": (
            "Two numbers of 64 bits have 16 bytes.",
            spoiled(opened(piece("batch", "int64", [2], bytes(15)))[0], "InvalidInput", "has 15 bytes"),
        ),
        "huge-shape_fail": (
            "A declared size is never trusted.",
            spoiled(opened(piece("batch", "uint8", [2**62, 2**62], b""))[0], "InvalidInput", "has 0 bytes"),
        ),
        "no-batch_fail": ("Other bytes than a digest hashes.", spoiled(opened(b"data")[0], "InvalidInput", "does not begin a")),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------- neutral orders

VERDICT = {"high": "", "kind": "verdict", "levels": 2, "low": "", "name": "good"}
INTEGER = {"high": "1000", "kind": "integer", "levels": 1001, "low": "0", "name": "rows"}
SCALAR = {"high": (1.0).hex(), "kind": "scalar", "levels": 11, "low": (0.0).hex(), "name": "share"}
FILE = {"binding": "file", "digest": "11" * 32, "label": "", "name": "data"}
STATE = {"binding": "state", "digest": "22" * 32, "label": "checkpoint/40", "name": "weights"}


def order(**changes: Any) -> Case:
    made = {
        "budget": 64,
        "constant_time": False,
        "format": "tallystick/neutral-order/1",
        "inputs": [FILE, STATE],
        "memory": 1 << 30,
        "nonce": "33" * 16,
        "outputs": [VERDICT, INTEGER, SCALAR],
        "owner": "44" * 32,
        "program": "55" * 32,
        "repeats": 2,
        "scratch": 1 << 20,
        "seconds": 600,
        "verifier": "66" * 32,
    }
    return {**made, **changes}


def bits(made: Case) -> int:
    """log2 of all answers there are, rounded up: the smallest b with 2**b answers or more."""
    answers = math.prod(output["levels"] for output in made["outputs"]) + FAILURES
    return next(b for b in range(5000) if 2**b >= answers)


def agreed(**changes: Any) -> Case:
    made = order(**changes)
    data = canonical(made)
    return {"order": data.decode(), "digest": named("tallystick/neutral-order/1", data), "bits": bits(made)}


def no_order(reason: str, data: bytes | None = None, **changes: Any) -> Case:
    made = canonical(order(**changes)) if data is None else data
    return {"order": made.decode(), "error": "InvalidInput", "reason": reason}


def order_cases() -> dict[str, tuple[str, Case]]:
    exactly = {**INTEGER, "high": str(2**16 - 5), "levels": 2**16 - 4}
    over = {**INTEGER, "high": str(2**16 - 4), "levels": 2**16 - 3}
    return {
        "three-outputs": ("2 * 1001 * 11 answers and four failures: 15 bits.", agreed()),
        "one-verdict": (
            "Pass, fail and four failures: six answers, 3 bits.",
            agreed(outputs=[VERDICT], budget=3),
        ),
        "budget-met": (
            "65532 integers and four failures: 16 bits and not one answer more.",
            agreed(outputs=[exactly], budget=16),
        ),
        "constant-time": ("The result is held back until the time limit.", agreed(constant_time=True)),
        "budget-exceeded_fail": (
            "One integer more than 16 bits hold.",
            no_order("can tell 17 bits, the budget is 16", outputs=[over], budget=16),
        ),
        "verdict-over-budget_fail": (
            "Failures are answers too.",
            no_order("can tell 3 bits, the budget is 2", outputs=[VERDICT], budget=2),
        ),
        "one-party_fail": ("Verifier and owner are one.", no_order("are one key", owner="66" * 32)),
        "one-run_fail": ("Chance shows only in two runs.", no_order("repeats must be 2 to 16", repeats=1)),
        "outputs-out-of-order_fail": (
            "Rows before good.",
            no_order("ascending by name", outputs=[INTEGER, VERDICT]),
        ),
        "input-twice_fail": ("One name twice.", no_order("none twice", inputs=[FILE, FILE])),
        "no-outputs_fail": ("Nothing would come out.", no_order("outputs must be 1 to 64", outputs=[])),
        "path-for-name_fail": (
            "A name that leads out of /in.",
            no_order("name '../x' must be", inputs=[{**FILE, "name": "../x"}]),
        ),
        "false-levels_fail": (
            "Levels that its bounds do not make.",
            no_order("its bounds make 1001", outputs=[{**INTEGER, "levels": 2}]),
        ),
        "empty-scalar_fail": (
            "From 1 to 0.",
            no_order("is empty", outputs=[{**SCALAR, "low": SCALAR["high"], "high": SCALAR["low"]}]),
        ),
        "infinite-scalar_fail": (
            "Up to infinity.",
            no_order("must be finite", outputs=[{**SCALAR, "high": "inf"}]),
        ),
        "file-with-label_fail": (
            "A file has no salt.",
            no_order("a file has no label", inputs=[{**FILE, "label": "meta"}]),
        ),
        "state-without-label_fail": (
            "A commitment has one.",
            no_order("a commitment one of", inputs=[{**STATE, "label": ""}]),
        ),
        "unknown-field_fail": (
            "A field that the page does not have.",
            no_order("field 'note' is unknown", note=1),
        ),
        "whitespace_fail": (
            "The same value, spelt with spaces.",
            no_order("not the canonical encoding", json.dumps(order(), sort_keys=True).encode()),
        ),
    }


def printed(text: str, values: dict[str, str | int]) -> Case:
    return {"order": canonical(order()).decode(), "printed": text, "values": values}


def no_output(text: str, reason: str) -> Case:
    return {"order": canonical(order()).decode(), "printed": text, "error": "InvalidInput", "reason": reason}


def output_cases() -> dict[str, tuple[str, Case]]:
    good = '{"good":"pass","rows":7,"share":0.2}'
    value: dict[str, str | int] = {"good": "pass", "rows": 7, "share": 2}
    refused = (
        ("missing_fail", "A name is missing.", '{"good":"pass","rows":7}', "field 'share' is missing"),
        ("further-name_fail", "A name too many.", good[:-1] + ',"x":1}', "field 'x' is unknown"),
        ("name-twice_fail", "Which of the two?", good[:-1] + ',"rows":8}', "duplicate key"),
        (
            "other-verdict_fail",
            "A verdict is pass or fail.",
            good.replace("pass", "Pass"),
            "must be pass or fail",
        ),
        (
            "verdict-as-boolean_fail",
            "It is no boolean.",
            good.replace('"pass"', "true"),
            "must be pass or fail",
        ),
        (
            "integer-beyond_fail",
            "1001 of 1000.",
            good.replace("7", "1001"),
            "must be an integer from 0 to 1000",
        ),
        (
            "float-for-integer_fail",
            "7.0 is another spelling.",
            good.replace("7", "7.0"),
            "must be an integer from 0 to 1000",
        ),
        ("scalar-beyond_fail", "Above its range.", good.replace("0.2", "1.0000001"), "must lie from 0 to 1"),
        ("not-a-number_fail", "NaN.", good.replace("0.2", "NaN"), "not JSON"),
        ("two-values_fail", "Something behind it.", good + "1", "not JSON"),
        ("a-list_fail", "No object.", f"[{good}]", "must be an object"),
    )
    return {
        "as-agreed": ("A value for each name.", printed(good, value)),
        "other-spelling": (
            "Order, whitespace and escapes tell nothing.",
            printed('  {"share": 2e-1,\n"rows":7,"good":"p\\u0061ss"}', value),
        ),
        "rounded": ("To the nearest of eleven levels.", printed(good.replace("0.2", "0.2499999"), value)),
        "tie": (
            "Between two levels the lower: 0.25 is 2.5 tenths exactly.",
            printed(good.replace("0.2", "0.25"), value),
        ),
        "bounds": (
            "Both ends are levels.",
            printed('{"good":"fail","rows":1000,"share":1}', {"good": "fail", "rows": 1000, "share": 10}),
        ),
        **{name: (why, no_output(text, reason)) for name, why, text, reason in refused},
    }


if __name__ == "__main__":
    write(Path(sys.argv[1]))
