"""tally chip and tally monitor: made, run, shown, verified; wrong arguments are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tallystick.cli.main import main
from tallystick.store.chips import ChipDirectory


@pytest.fixture
def chip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["key", "generate", str(tmp_path / "owner")]) == 0
    assert main(["chip", "init", str(tmp_path / "chip"), "--owner", str(tmp_path / "owner.pub")]) == 0
    assert main(["chip", "agent", str(tmp_path / "chip"), "--for", "0"]) == 0
    capsys.readouterr()
    return tmp_path / "chip"


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    return json.loads(capsys.readouterr().out)


def test_a_log_is_shown_attested_and_verified(chip: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chip", "precommit", str(chip), "7" * 64]) == 0
    assert main(["chip", "show", str(chip), "--json"]) == 0
    shown = said(capsys)
    assert (shown["verdict"], shown["records"]) == ("consistent", 5)
    nonce, token = "ab" * 16, chip.with_name("token")
    assert main(["chip", "attest", str(chip), "--nonce", nonce, "--out", str(token)]) == 0
    log, key = str(chip / "log.journal"), str(chip / "chip.key.pub")
    attested = ["--attestation", str(token), "--nonce", nonce]
    assert main(["chip", "verify", log, "--key", key, *attested, "--json"]) == 0
    assert said(capsys)["assurance"]["level"] == 1  # pyright: ignore[reportIndexIssue]
    assert main(["chip", "verify", log, "--key", key, "--json"]) == 0
    assert said(capsys)["assurance"]["level"] == 0  # pyright: ignore[reportIndexIssue]


def test_a_shortened_log_is_a_violation(chip: Path, capsys: pytest.CaptureFixture[str]) -> None:
    early = chip.with_name("early")
    early.write_bytes((chip / "log.journal").read_bytes())
    assert main(["chip", "agent", str(chip), "--for", "0"]) == 0
    now = str(chip / "log.journal")
    key = ["--key", str(chip / "chip.key.pub")]
    assert main(["chip", "verify", now, *key, "--earlier", str(early), "--json"]) == 0
    capsys.readouterr()
    assert main(["chip", "verify", str(early), *key, "--earlier", now, "--json"]) == 1
    assert [f["rule"] for f in said(capsys)["findings"]] == [11]  # pyright: ignore[reportGeneralTypeIssues]


def test_secrets_are_their_owners_alone(chip: Path) -> None:
    assert (chip / "chip.key").stat().st_mode & 0o077 == 0
    assert (chip / "log.journal").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["chip", "show", "{}/nothing"], "no chip lies there"),
        (["chip", "init", "{}/chip", "--owner", "{}/owner.pub"], "not empty"),
        (["chip", "init", "{}/c2", "--owner", "{}/owner.pub", "--page-bytes", "100"], "page size 100"),
        (["chip", "init", "{}/c2", "--owner", "{}/owner.pub", "--snapshots-per-day", "0"], "out of range"),
        (["chip", "init", "{}/c2", "--owner", "{}/owner.pub", "--collector", "http://x:1"], "go together"),
        (
            ["chip", "init", "{}/c2", "--owner", "{}/owner.pub", "--algorithm", "ecdsa-p521"],
            "is ed25519, ecdsa-p256 or ecdsa-p384",
        ),
        (["chip", "precommit", "{}/chip", "12"], "64 lower-case"),
        (["chip", "verify", "{}/owner", "--key", "{}/owner.pub"], "does not begin as a journal"),
        (["monitor", "verify", "{}/none", "--chip", "x", "--beacon", "0" * 64], "no such folder"),
        (["monitor", "verify", "{}", "--chip", "x", "--beacon", "0" * 64], "UEID=FILE"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    chip: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    if arguments[0] == "monitor":
        pytest.importorskip("torch")
    assert main([text.format(chip.parent) for text in arguments]) == 2
    error = capsys.readouterr().err.replace("\n", " ")
    assert any(part in error for part in reason.split("|"))
    assert not (chip.parent / "c2").exists()


def test_an_agent_that_runs_keeps_others_out(chip: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = ChipDirectory(chip)
    directory.open()
    try:
        assert main(["chip", "agent", str(chip), "--for", "0"]) == 2
        assert "another process is writing it" in capsys.readouterr().err
    finally:
        directory.close()
