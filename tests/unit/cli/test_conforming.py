"""tally conformance finds the implementation that errs, and says where."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tallystick.cli.evidence.conforming import ASKED
from tallystick.cli.main import main
from tallystick.errors import InvalidInput
from tallystick.evidence.conformance import answer, load_questions

VECTORS = Path(__file__).resolve().parents[3] / "vectors"
PROGRAM = """
import json, sys
for number, line in enumerate(sys.stdin):
    asked = json.loads(line)
    {body}
    print(json.dumps({{"id": asked["id"], "accepted": {accepted}}}), flush=True)
"""


def outcome(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    code = main(["conformance", "run", "--vectors", str(VECTORS), "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def program(body: str = "pass", accepted: str = "True") -> list[str]:
    return ["--", sys.executable, "-c", PROGRAM.format(body=body, accepted=accepted)]


def test_this_package_conforms(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = outcome(capsys, "--", sys.executable, "-m", "tallystick", "conformance", "serve")

    assert (code, found["wrong"]) == (0, [])
    assert found["asked"] == len(load_questions(VECTORS, ASKED))


@pytest.mark.parametrize(("accepted", "wrong"), [("True", "_fail"), ("False", "worked-example")])
def test_who_accepts_or_refuses_everything_does_not_conform(
    accepted: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = outcome(capsys, *program(accepted=accepted))

    expected = [q.name for q in load_questions(VECTORS, ASKED) if q.accepted != (accepted == "True")]
    assert code == 1
    assert isinstance(found["wrong"], list)
    assert [each["case"] for each in found["wrong"]] == expected
    assert any(name.endswith(wrong) for name in expected)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("sys.exit(3) if number == 5 else None", "ended"),
        ("print('nonsense', flush=True) if number == 5 else None", "malformed (b'nonsense')"),
        (
            "print(json.dumps({'id': 'other', 'accepted': True}), flush=True) if number == 5 else None",
            "malformed",
        ),
        ("import time; time.sleep(60) if number == 5 else None", "silent"),
    ],
)
def test_who_stops_answering_is_not_asked_further(
    body: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    right = [question.accepted for question in load_questions(VECTORS, ASKED)]

    code, found = outcome(capsys, "--timeout", "1.5", *program(body, f"{right!r}[number]"))

    assert code == 1
    assert isinstance(found["wrong"], list)
    assert found["wrong"][0]["said"].startswith(said)
    assert len(found["wrong"]) == len(load_questions(VECTORS, ASKED)) - 5
    assert found["wrong"][-1]["said"].startswith("not asked")


def test_no_question_gives_its_answer_away() -> None:
    for question in load_questions(VECTORS, ASKED):
        assert not {"error", "reason"} & question.fields.keys()
        assert b"_fail" not in question.line()


def test_wrong_arguments_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["conformance", "run", "--vectors", str(tmp_path / "x"), "--", "true"]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert main(["conformance", "run", "--vectors", str(VECTORS), "--", "/no/such/program"]) == 2
    assert "program /no/such/program: cannot be started" in capsys.readouterr().err
    with pytest.raises(InvalidInput, match="operation 'guess': must be one of verify-inclusion"):
        answer({"operation": "guess"}, ASKED)
    with pytest.raises(InvalidInput, match="summary: must have the fields document, root, has root"):
        answer({"operation": "summary", "root": "00"}, ASKED)
