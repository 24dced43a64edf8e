"""What runs of one order come to, and what the two parties sign: pure, no enclosure needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tallystick.commit.encoding import canonical_json
from tallystick.errors import InvalidInput, Mismatch
from tallystick.fleet.enclave.neutral import NeutralInput, NeutralOrder, integer_output, sign_order
from tallystick.fleet.enclave.neutral_result import NeutralOutcome, judge, result_statement, verify_result
from tallystick.fleet.enclave.sandbox import End
from tallystick.fleet.enclave.sealed_job import parse_index
from tallystick.signing.dsse import sign_statement
from tallystick.signing.keys import ed25519_key

VERIFIER, OWNER = ed25519_key(b"\1" * 32), ed25519_key(b"\2" * 32)
ORDER = NeutralOrder(
    "00" * 16, VERIFIER.public_key.key_id, OWNER.public_key.key_id, "11" * 32, (NeutralInput("a", "file", "22" * 32),),
    (integer_output("n", 0, 5),), 4, 3, 1, 1 << 26, 4096, False,
)  # fmt: skip
GOOD, OTHER = End("ended", b'{"n": 3}'), End("ended", b'{"n": 4}')


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ([GOOD] * 3, "completed"),
        ([GOOD] * 2, "not repeatable"),
        ([GOOD] * 4, "not repeatable"),
        ([GOOD, GOOD, OTHER], "not repeatable"),
        ([GOOD, GOOD, End("failed", b"")], "not repeatable"),
        ([End("too slow", b""), GOOD, GOOD], "not repeatable"),
        ([End("failed", b"")] * 3, "program failed"),
        ([End("too slow", b"")] * 3, "time limit"),
        ([End("too much output", b"")] * 3, "malformed output"),
        ([End("ended", b'{"n": 6}')] * 3, "malformed output"),
    ],
)
def test_an_order_completes_only_if_all_its_runs_print_one_thing(ends: list[End], status: str) -> None:
    assert judge(ORDER, ends) == NeutralOutcome(status, {"n": 3} if status == "completed" else {})


def test_a_second_signature_stands_under_the_same_order_only() -> None:
    drawn_up = sign_order(ORDER, VERIFIER)
    assert sign_order(ORDER, OWNER, drawn_up)
    with pytest.raises(Mismatch, match="the envelope holds another one"):
        sign_order(replace(ORDER, budget=5), OWNER, drawn_up)


@pytest.mark.parametrize(
    ("high", "reason"), [((1 << 32) - 1, ""), (1 << 32, "must be equal, and 2 to 4294967296")]
)
def test_an_output_has_no_more_levels_than_can_be_counted(high: int, reason: str) -> None:
    if reason:
        with pytest.raises(InvalidInput, match=reason):
            integer_output("n", 0, high)
        return
    order = replace(ORDER, outputs=(integer_output("n", 0, high),), budget=40)
    assert NeutralOrder.parse(order.encode()) == order


def test_a_sealed_job_is_as_long_as_its_index_says() -> None:
    members = [
        ["order", "order", 3, "00" * 32],
        ["program", "program", 4, "00" * 32],
        ["input", "a", 5, "00" * 32],
    ]
    head = canonical_json({"format": "tallystick/neutral-job/1", "members": members, "salts": {}}) + b"\n"
    size = len(head) + 12
    assert [member.start - len(head) for member in parse_index(head, size, Path("job")).members] == [0, 3, 7]
    for other in (size - 1, size + 1):
        with pytest.raises(InvalidInput, match=f"speaks of {size} bytes, there are {other}"):
            parse_index(head, other, Path("job"))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("order", {"nonce": "01" * 16}),
        ("program", {"program": "33" * 32}),
        ("inputs", {"inputs": (NeutralInput("a", "file", "44" * 32),)}),
        ("schema", {"outputs": (integer_output("n", 0, 6),)}),
    ],
)
def test_a_result_is_of_its_order_program_inputs_and_schema(name: str, changes: dict[str, object]) -> None:
    place = ed25519_key(b"\3" * 32)
    done = NeutralOutcome("completed", {"n": 3})

    def signed(order: NeutralOrder, named: str) -> bytes:
        statement = result_statement(order, done, started="2026-01-01T00:00:00Z", versions={}, refused=())
        subject = replace(statement.subject[0], digest={"tallystickNeutralOrder": named})
        return sign_statement(replace(statement, subject=(subject,)), place)

    assert verify_result(signed(ORDER, ORDER.digest()), ORDER, place.public_key).outcome == done
    other = replace(ORDER, **changes)  # pyright: ignore[reportArgumentType]
    stated = other.digest() if name == "order" else ORDER.digest()
    with pytest.raises(Mismatch, match=f"result: {name} is "):
        verify_result(signed(other, stated), ORDER, place.public_key)
