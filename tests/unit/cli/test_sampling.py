from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tallystick.run.sample import LogPosition, parse_announcement, parse_draw

VALUE = "33" * 32
PLAN = ("--sample", "--detect", "0.6", "--fraction", "0.5", "--round", "some/beacon:41:1700003600")


@pytest.fixture
def published(tally, recorded: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The run's proof from a log, and the policy that names it."""
    log, key = tmp_path / "log", tmp_path / "log.key"
    tally("key", "generate", key)
    tally("log", "init", log, "--origin", "log.example/runs", "--key", key)
    tally("log", "add", log, recorded)
    tally("log", "checkpoint", log, "--key", key)
    proof, policy = tmp_path / "run.tlog-proof", tmp_path / "policy"
    assert tally("log", "prove", log, recorded, "--out", proof).code == 0
    policy.write_text(f"log {(log / 'log.vkey').read_text().strip()}\nquorum none\n")
    assert tally("log", "verify", proof, recorded, "--policy", policy).code == 0
    return proof, policy


def test_a_sample_is_planned_published_drawn_and_repeated(
    tally, recorded: Path, tmp_path: Path, published: tuple[Path, Path]
) -> None:
    proof, policy = published
    announced, drawn = tmp_path / "announcement.json", tmp_path / "draw.json"
    first = tally(
        "audit",
        recorded,
        *PLAN,
        "--log-proof",
        proof,
        "--log-policy",
        policy,
        "--announce",
        announced,
        "--json",
    )
    assert first.code == 0
    assert json.loads(first.out)["samples"] == 1
    answer = tally(
        "audit",
        recorded,
        "--sample",
        "--announcement",
        announced,
        "--beacon",
        VALUE,
        "--draw",
        drawn,
        "--json",
    )
    fields = json.loads(answer.out)
    assert (answer.code, fields["verdict"]) == (0, "match")
    assert fields["steps"] == 2
    assert fields["sample"]["power"] == "0.666666"
    assert fields["sample"]["log"] == "log.example/runs"
    record = parse_draw(drawn.read_bytes())
    assert [(s["start"], s["end"]) for s in fields["segments"]] == list(record.segments)
    assert json.loads(announced.read_bytes()) == record.announcement.fields()


def test_a_publication_is_the_announcements_word_until_a_log_proof_shows_it(
    tally, recorded: Path, tmp_path: Path, published: tuple[Path, Path]
) -> None:
    proof, policy = published
    checks = ("--log-proof", proof, "--log-policy", policy)
    announced, invented = tmp_path / "announcement.json", tmp_path / "invented.json"
    assert tally("audit", recorded, *PLAN, *checks, "--announce", announced).code == 0
    honest = parse_announcement(announced.read_bytes())
    log = LogPosition("log.example.org/honest", 123456, b"\7" * 32, 1700000000)
    invented.write_bytes(replace(honest, log=log).encode())

    def ask(announcement: Path, *more: str | Path) -> tuple[int, str]:
        given = ("--sample", "--announcement", announcement, "--beacon", VALUE, *more)
        answer = tally("audit", recorded, *given)
        return answer.code, " ".join((answer.out + answer.err).split())

    code, page = ask(invented)
    assert code == 0
    assert "so says the announcement: log.example.org/honest, 123456 entries, seen by a quorum at" in page
    assert "that was not checked here" in page
    code, page = ask(invented, *checks)
    assert code == 1
    assert "announcement: says log.example.org/honest, 123456 entries" in page
    assert "the log proof shows log.example/runs, 1 entries" in page
    code, page = ask(announced, *checks)
    assert code == 0
    assert "published log.example/runs, 1 entries" in page
    assert "so says the announcement" not in page
    fields = [
        json.loads(tally("audit", recorded, *PLAN, "--beacon", VALUE, "--json", *more).out)["sample"]
        for more in ((), checks)
    ]
    assert [field["published_checked"] for field in fields] == [False, True]


def test_a_beacon_that_has_not_spoken_is_refused_and_nothing_is_signed(
    tally, recorded: Path, tmp_path: Path
) -> None:
    announced, key, statement = (tmp_path / name for name in ("announcement.json", "key", "statement.json"))
    late = (*PLAN[:-1], "some/beacon:1:4102444800")
    assert tally("audit", recorded, *late, "--announce", announced).code == 0
    tally("key", "generate", key)
    for given in (late, ("--sample", "--announcement", announced)):
        answer = tally("audit", recorded, *given, "--beacon", VALUE, "--key", key, "--statement", statement)
        assert answer.code == 2
        assert "--beacon: round 1 speaks at 4102444800, now is" in answer.err
    assert not statement.exists()


def test_the_page_states_the_power_and_what_was_not_published(tally, recorded: Path) -> None:
    answer = tally("audit", recorded, *PLAN, "--beacon", VALUE)
    assert answer.code == 0
    assert "every byte of the sample is the same" in answer.out
    assert (
        "if at least 50 % of the steps (3 of 6) are false, this audit finds one with probability 0.666666"
        in " ".join(answer.out.split())
    )
    assert "nothing shows that the run was fixed before" in answer.out


def test_a_false_step_in_the_sample_is_found_and_no_power_is_stated(tally, edited: Path) -> None:
    answer = tally("audit", edited, *PLAN[:4], "0.1", *PLAN[5:], "--detect", "0.999", "--beacon", VALUE)
    assert answer.code == 1
    assert "3 of 3 segments" in answer.out
    assert "if at least" not in answer.out


def test_an_announcement_of_another_run_is_refused(
    tally, recorded: Path, edited: Path, tmp_path: Path
) -> None:
    announced = tmp_path / "announcement.json"
    assert tally("audit", recorded, *PLAN, "--announce", announced).code == 0
    answer = tally("audit", edited, "--sample", "--announcement", announced, "--beacon", VALUE)
    assert answer.code == 1
    assert "announcement: is about run" in answer.err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--detect", "0.9"), "--detect: belongs to --sample"),
        (("--sample",), "give --detect, --fraction and --round"),
        (("--sample", "--detect", "0.9"), "--detect needs --fraction F"),
        (PLAN, "either --beacon HEX, or --announce"),
        ((*PLAN, "--beacon", VALUE, "--steps", "0:2"), "leave out --steps"),
        ((*PLAN, "--beacon", VALUE[2:]), "--beacon: must be 64 lower-case"),
        ((*PLAN, "--beacon", VALUE, "--log-proof", "x"), "needs --log-policy"),
        ((*PLAN[:-1], "drand:41", "--beacon", VALUE), "must be SOURCE:ROUND:TIME"),
        ((*PLAN[:2], "99%", *PLAN[3:], "--beacon", VALUE), "must be a decimal number"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tally, recorded: Path, options: tuple[str, ...], reason: str
) -> None:
    answer = tally("audit", recorded, *options)
    assert answer.code == 2
    assert reason in answer.err
