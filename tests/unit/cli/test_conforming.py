"""tally conformance asks about every case, finds the implementation that errs, and says where."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from tallystick.cli.evidence.conforming import ASKED, schema_text
from tallystick.cli.main import main
from tallystick.errors import InvalidInput
from tallystick.evidence.conformance import ConformanceCase, answer, load_questions
from tallystick.evidence.questions import ASKED_AS

REPOSITORY = Path(__file__).resolve().parents[3]
VECTORS = REPOSITORY / "vectors"
CASES = {f"{path.parent.parent.name}/{path.parent.name}" for path in VECTORS.glob("*/*/input.json")}
QUESTIONS = load_questions(VECTORS, ASKED, ASKED_AS)
PROGRAM = """
import json, sys
answers = open({answers!r}).read().splitlines()
for number, line in enumerate(sys.stdin):
    asked, said = json.loads(line), json.loads(answers[number])
    {body}
    print(json.dumps({{"id": asked["id"], **said}}), flush=True)
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of this package's answers, one a line in the order of the questions."""
    path = tmp_path_factory.mktemp("conformance") / "answers"
    lines = (json.dumps(answer(json.loads(question.line()), ASKED)) for question in QUESTIONS)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def outcome(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["conformance", "run", "--vectors", str(VECTORS), "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def program(own: Path, body: str = "pass") -> list[str]:
    return ["--", sys.executable, "-c", PROGRAM.format(answers=str(own), body=body)]


def number_of(case: str, operation: str | None = None) -> int:
    """The number of the question about a case."""
    return next(q.number for q in QUESTIONS if q.name == case and operation in (None, q.operation))


def test_every_case_of_every_suite_is_asked_about() -> None:
    assert {question.name for question in QUESTIONS} == CASES
    assert {question.suite for question in QUESTIONS} == {folder.name for folder in VECTORS.iterdir()}
    assert {question.operation for question in QUESTIONS} == ASKED.keys()
    # The others are accepted or refused, and that is all there is to say of them.
    assert len({question.name for question in QUESTIONS if question.values}) > 250


def test_an_accepted_case_has_every_value_of_its_operation() -> None:
    for question in QUESTIONS:
        if question.accepted:
            assert question.values.keys() == ASKED[question.operation].values.keys(), question.name


def test_this_package_conforms(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = outcome(capsys, "--", sys.executable, "-m", "tallystick", "conformance", "serve")

    assert (code, found["conforms"], found["answers"]) == (0, True, [])
    assert (found["cases"], found["asked"]) == (len(CASES), len(QUESTIONS))
    assert (found["agreed"], found["unsupported"], found["wrong"]) == (len(QUESTIONS), 0, 0)
    assert sum(suite["cases"] for suite in found["suites"].values()) == len(CASES)


@pytest.mark.parametrize("accepts", [True, False])
def test_who_accepts_or_refuses_everything_does_not_conform(
    accepts: bool, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = outcome(capsys, *program(own, f"said = {{'accepted': {accepts}}}"))

    wrong = [q for q in QUESTIONS if q.accepted != accepts or q.values]
    assert code == 1
    assert [each["case"] for each in found["answers"]] == [question.name for question in wrong]
    assert {each["said"].partition(" ")[0] for each in found["answers"]} == {
        "accepted" if accepts else "refused"
    }


@pytest.mark.parametrize(
    ("operation", "value", "change", "said"),
    [
        ("state", "root", "'00' * 32", "accepted with root"),
        ("state", "tensor_roots", "found[::-1] + ['']", "accepted with tensor_roots"),
        ("words", "values", "[float(each) for each in found]", "accepted with values"),
        ("bernoulli", "values", "[int(each) for each in found]", "accepted with values"),
        (
            "record-and-follow",
            "followed",
            "['0x0.0p+0' for each in found] + ['nan']",
            "accepted with followed",
        ),
        (
            "quantiles",
            "values",
            "[(float.fromhex(found[0]) + 1e-13).hex(), *found[1:]]",
            "accepted with values",
        ),
        ("quantiles", "values", "found[1:]", "accepted with values"),
        ("quantiles", "values", "5", "accepted with values 5, must be"),
        ("bundle", "members", "None", "accepted with members null, must be"),
    ],
)
def test_a_value_that_is_not_the_vectors_is_found_and_named(
    operation: str, value: str, change: str, said: str, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number = next(q.number for q in QUESTIONS if q.operation == operation and q.accepted)
    only, place = own_of(own, number)
    read = f"found = said.get('values', {{}}).get({value!r})"
    body = f"{read}; number == {place} and said['values'].update({{{value!r}: {change}}})"

    code, found = outcome(capsys, "--suite", QUESTIONS[number].suite, *program(only, body))

    assert code == 1
    (wrong,) = found["answers"]
    assert (wrong["case"], wrong["operation"]) == (QUESTIONS[number].name, operation)
    assert wrong["said"].startswith(said)


def own_of(own: Path, number: int) -> tuple[Path, int]:
    """The answers to the questions of one question's suite alone, in a file of their own, and its number there."""
    lines, asked = own.read_text().splitlines(), QUESTIONS[number]
    suite = [question for question in QUESTIONS if question.suite == asked.suite]
    path = own.with_name(f"answers-{asked.suite}")
    path.write_text("".join(f"{lines[question.number]}\n" for question in suite))
    return path, suite.index(asked)


def test_a_dispute_that_fails_at_another_check_is_a_wrong_answer(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = next(q.number for q in QUESTIONS if q.operation == "dispute" and q.values.get("check") == 6)
    only, place = own_of(own, at)
    body = f"number == {place} and said['values'].update(check=5)"

    code, found = outcome(capsys, "--suite", "dispute", *program(only, body))

    assert code == 1
    assert [each["said"] for each in found["answers"]] == ["refused with check 5, must be 6"]


def test_numbers_of_another_method_may_be_off_in_their_last_bits(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = next(q.number for q in QUESTIONS if q.operation == "quantiles")
    only, place = own_of(own, at)
    near = "[(float.fromhex(v) * (1 + 2**-50)).hex() for v in said['values']['values']]"
    body = f"number == {place} and said.update(values={{'values': {near}}})"

    code, found = outcome(capsys, "--suite", "philox", *program(only, body))

    assert (code, found["wrong"]) == (0, 0)


def test_what_is_unsupported_is_counted_and_is_no_pass(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = "said = {'unsupported': True} if asked['operation'] in ('note', 'table') else said"
    left = [q for q in QUESTIONS if q.operation in ("note", "table")]

    code, found = outcome(capsys, *program(own, body))

    assert (code, found["conforms"], found["wrong"]) == (3, False, 0)
    assert (found["unsupported"], found["agreed"]) == (len(left), len(QUESTIONS) - len(left))
    assert {each["said"] for each in found["answers"]} == {"unsupported"}
    assert found["suites"]["transparency-log"]["unsupported"] == sum(q.operation == "note" for q in left)

    code, found = outcome(
        capsys, *program(own, f"{body}; said = {{'accepted': True}} if number == 0 else said")
    )
    assert (code, found["wrong"], found["unsupported"]) == (1, 1, len(left))


def test_the_page_says_what_is_wrong_and_what_is_unsupported(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(body: str) -> str:
        main(["conformance", "run", "--vectors", str(VECTORS), *program(own, body)])
        return " ".join(capsys.readouterr().out.split())

    assert f"conforms: {len(QUESTIONS)} questions about {len(CASES)} cases" in printed("pass")
    left = sum(q.operation == "note" for q in QUESTIONS)
    unsupported = printed("said = {'unsupported': True} if asked['operation'] == 'note' else said")
    assert f"no wrong answer, and {left} of {len(QUESTIONS)} questions" in unsupported
    assert f"{left} unsupported" in unsupported
    assert "does not conform: 1 wrong answer" in printed("said = {'accepted': True} if number == 0 else said")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("sys.exit(3) if number == 5 else None", "ended"),
        ("print('nonsense', flush=True) if number == 5 else None", "malformed (b'nonsense')"),
        ("said = {'accepted': 1} if number == 5 else said", "malformed"),
        ("said = {'accepted': True, 'unsupported': True} if number == 5 else said", "malformed"),
        ("said = {'accepted': True, 'values': []} if number == 5 else said", "malformed"),
        ("said = {'unsupported': False} if number == 5 else said", "malformed"),
        ("asked['id'] = 'other' if number == 5 else asked['id']", "malformed"),
        ("import time; time.sleep(60) if number == 5 else None", "silent"),
    ],
)
def test_who_stops_answering_is_not_asked_further(
    body: str, said: str, own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = outcome(capsys, "--timeout", "1.5", *program(own, body))

    assert code == 1
    assert found["answers"][0]["said"].startswith(said)
    assert len(found["answers"]) == len(QUESTIONS) - 5
    assert found["answers"][-1]["said"].startswith("not asked")


def test_a_long_answer_is_read_whole(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only, _ = own_of(own, number_of("audit-draw/every-segment"))

    code, found = outcome(capsys, "--suite", "audit-draw", *program(only, "print(' ' * 200_000, end='')"))

    assert (code, found["wrong"]) == (0, 0)


def test_no_question_gives_its_answer_away() -> None:
    for question in QUESTIONS:
        assert not {"error", "reason"} & question.fields.keys()
        assert b"_fail" not in question.line()
        for name, value in question.values.items():
            assert name not in question.fields or question.fields[name] is not value, question.name


def test_wrong_arguments_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    there = ["conformance", "run", "--vectors", str(VECTORS)]
    assert main(["conformance", "run", "--vectors", str(tmp_path / "x"), "--", "true"]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert main(["conformance", "run", "--vectors", str(tmp_path), "--", "true"]) == 2
    assert "there is no case" in capsys.readouterr().err
    assert main([*there, "--suite", "merkel", "--", "true"]) == 2
    assert "there is no suite merkel" in capsys.readouterr().err
    assert main([*there, "--", "/no/such/program"]) == 2
    assert "program /no/such/program: cannot be started" in capsys.readouterr().err
    with pytest.raises(InvalidInput, match="operation 'guess': must be one of roots"):
        answer({"operation": "guess"}, ASKED)
    with pytest.raises(InvalidInput, match="summary: must have the fields document, root, has root"):
        answer({"operation": "summary", "root": "00"}, ASKED)


def test_a_case_that_nothing_asks_about_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "clouds" / "cumulus"
    folder.mkdir(parents=True)
    (folder / "input.json").write_text("{}")
    with pytest.raises(InvalidInput, match="clouds/cumulus: no operation 'clouds' asks about it"):
        load_questions(tmp_path, ASKED, ASKED_AS)


# ------------------------------------------------------------------------------------------------------ the schema


def problem(value: object, form: Mapping[str, Any], whole: Mapping[str, Any], at: str = "") -> str | None:
    """Return where ``value`` is not of the schema ``form``, or None; of JSON Schema, what the file uses."""
    known = {
        "$ref", "additionalProperties", "anyOf", "const", "description", "enum", "items", "maxItems", "maxProperties", "minItems",
        "minProperties", "minimum", "oneOf", "pattern", "properties", "required", "type", "$schema", "title", "$defs",
    }  # fmt: skip
    assert form.keys() <= known, form.keys() - known
    if "$ref" in form:
        name = form["$ref"].removeprefix("#/$defs/")
        return problem(value, whole["$defs"][name], whole, at)
    if "const" in form and (type(value), value) != (type(form["const"]), form["const"]):
        return f"{at}: is {value!r}, must be {form['const']!r}"
    if "enum" in form and value not in form["enum"]:
        return f"{at}: is {value!r}"
    for word in ("anyOf", "oneOf"):
        fits = sum(problem(value, each, whole, at) is None for each in form.get(word, ()))
        if word in form and (fits == 0 or (word == "oneOf" and fits > 1)):
            return f"{at}: {fits} of {word} fit"
    kinds = {
        "string": str,
        "integer": int,
        "boolean": bool,
        "object": dict,
        "array": list,
        "null": type(None),
    }
    if "type" in form and type(value) is not kinds[form["type"]]:
        return f"{at}: {value!r} is no {form['type']}"
    if isinstance(value, str) and not re.search(form.get("pattern", ""), value):
        return f"{at}: {value!r} is not {form['pattern']}"
    if isinstance(value, int) and value < form.get("minimum", value):
        return f"{at}: {value} is below {form['minimum']}"
    if isinstance(value, list):
        items = cast("list[object]", value)
        if not form.get("minItems", 0) <= len(items) <= form.get("maxItems", len(items)):
            return f"{at}: has {len(items)} items"
        found = (problem(item, form.get("items", {}), whole, f"{at}[{n}]") for n, item in enumerate(items))
        return next((each for each in found if each), None)
    if isinstance(value, dict):
        return object_problem(cast("dict[str, object]", value), form, whole, at)
    return None


def object_problem(
    value: dict[str, object], form: Mapping[str, Any], whole: Mapping[str, Any], at: str
) -> str | None:
    if missing := set(form.get("required", ())) - value.keys():
        return f"{at}: lacks {sorted(missing)}"
    if not form.get("minProperties", 0) <= len(value) <= form.get("maxProperties", len(value)):
        return f"{at}: has {len(value)} properties"
    others = form.get("additionalProperties", {})
    for name, each in value.items():
        inner = form.get("properties", {}).get(name, others)
        if inner is False:
            return f"{at}: {name} is unknown"
        if found := problem(each, inner, whole, f"{at}.{name}"):
            return found
    return None


SCHEMA = json.loads(schema_text())


def test_the_schema_in_the_specification_is_the_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "schema"]) == 0
    printed = capsys.readouterr().out
    assert printed == schema_text()
    assert printed == (REPOSITORY / "spec" / "vectors.schema.json").read_text(encoding="utf-8")


def of_operation(question: ConformanceCase, kind: str) -> Mapping[str, Any]:
    return SCHEMA["$defs"][f"{kind} {question.operation}"]


def test_every_question_has_the_form_of_its_operation() -> None:
    for question in QUESTIONS:
        asked = json.loads(question.line())
        assert problem(asked, of_operation(question, "question"), SCHEMA) is None, question.name
    assert problem(json.loads(QUESTIONS[0].line()), SCHEMA, SCHEMA) is None
    assert problem({**json.loads(QUESTIONS[0].line()), "more": 1}, SCHEMA, SCHEMA) is not None


def test_every_answer_has_the_form_of_its_operation(own: Path) -> None:
    for question, line in zip(QUESTIONS, own.read_text().splitlines(), strict=True):
        said = {"id": question.asked_as, **json.loads(line)}
        assert problem(said, SCHEMA["$defs"]["answer"], SCHEMA) is None
        if said.get("values"):
            kind = "values" if said["accepted"] else "values of a refusal"
            assert problem(said["values"], of_operation(question, kind), SCHEMA) is None, question.name
    assert problem({"id": "case 1", "unsupported": True}, SCHEMA["$defs"]["answer"], SCHEMA) is None
    assert problem({"id": "case 1", "accepted": 1}, SCHEMA["$defs"]["answer"], SCHEMA) is not None


# -------------------------------------------------------------------------------------------------------- the page


def table_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    section = page.partition(f"\n## {heading}")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in row.split("|")[1:-1]] for row in rows[2:]]


def test_the_page_lists_suites_and_operations_as_they_are() -> None:
    page = (REPOSITORY / "spec" / "vectors.md").read_text(encoding="utf-8")
    suites: dict[str, set[str]] = {}
    for question in QUESTIONS:
        suites.setdefault(question.suite, set()).add(question.operation)
    shown = [[suite, cases, operations] for suite, cases, _, operations in table_of(page, "2.")]
    assert shown == [
        [suite, str(sum(case.startswith(f"{suite}/") for case in CASES)), ", ".join(sorted(operations))]
        for suite, operations in sorted(suites.items())
    ]
    assert f"{len(CASES)} cases" in page
    assert table_of(page, "4.") == [
        [name, each.about, ", ".join(each.fields), ", ".join(each.values) or ", ".join(each.refused)]
        for name, each in ASKED.items()
    ]
    for page_name in {row[2] for row in table_of(page, "2.")}:
        assert all(
            (REPOSITORY / "spec" / part.split("]")[0].strip("[ ")).is_file() for part in page_name.split(",")
        )
