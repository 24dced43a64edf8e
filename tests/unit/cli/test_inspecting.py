from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PARAMETERS = 8 * 16 + 16 + 16 * 4 + 4

WITHOUT_EXTRAS = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "sklearn", "transformers"):
            raise ModuleNotFoundError(f"{name} is not part of the bare package", name=name)

sys.meta_path.insert(0, Absent())
from tallystick.cli.main import main
print("codes", [main(arguments) for arguments in json.loads(sys.argv[1])])
"""


def test_a_run_is_shown_with_the_fields_that_scripts_rely_on(tally, recorded: Path) -> None:
    answer = tally("show", recorded, "--json")
    fields = json.loads(answer.out)
    statement = json.loads((recorded / "run.json").read_bytes())

    assert answer.code == 0
    assert (fields["policy"], fields["steps"], fields["parameters"]) == ("fp32", 6, PARAMETERS)
    assert (fields["root"], fields["state_root"]) == (statement["root"], statement["final_state"])
    logged = sum(path.stat().st_size for path in (recorded / "logs").iterdir())
    assert fields["log_bytes_per_step"] == logged / 6
    assert fields["log_bits_per_parameter_step"] == 8 * logged / (6 * PARAMETERS)
    assert sum(kind["bytes"] for kind in fields["log_kinds"].values()) == logged


def test_the_page_fits_a_terminal_of_80_columns(
    tally, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("show", "verify"):
        answer = tally(command, recorded)

        assert answer.code == 0
        assert max(map(len, answer.out.splitlines())) <= 80


def test_a_run_without_its_log_is_shown_with_the_reason(tally, copied: Path) -> None:
    (copied / "logs" / "000002.tlog").unlink()

    fields = json.loads(tally("show", copied, "--json").out)

    assert fields["log_kinds"] is None
    assert "000002.tlog: not found" in fields["log_problem"]
    assert "000002.tlog" in tally("show", copied).out.replace("\n", "")


@pytest.mark.parametrize("command", ["show", "prove", "audit"])
def test_a_directory_that_is_not_there_is_refused(tally, tmp_path: Path, command: str) -> None:
    answer = tally(command, tmp_path / "missing")

    assert answer.code == 2
    assert "there is no such run directory" in answer.err


def test_a_malformed_specification_is_refused(tally, copied: Path) -> None:
    (copied / "specification.json").write_bytes(b"{}")

    answer = tally("show", copied, "--json")

    assert answer.code == 2
    assert json.loads(answer.out)["kind"] == "InvalidInput"
    assert "specification" in json.loads(answer.out)["error"]


def test_an_honest_run_verifies_and_says_what_that_does_not_show(tally, recorded: Path) -> None:
    answer = tally("verify", recorded)
    fields = json.loads(tally("verify", recorded, "--json").out)

    assert answer.code == 0
    assert answer.out.startswith("consistent: run ")
    assert "This does not show that the steps were computed" in answer.out
    assert [check["outcome"] for check in fields["checks"]] == ["passed"] * 6
    assert fields["verdict"] == "match"


def test_a_run_verifies_against_its_root_only(tally, recorded: Path) -> None:
    root = json.loads((recorded / "run.json").read_bytes())["root"]

    assert tally("verify", recorded, "--root", root.upper()).code == 0
    other = tally("verify", recorded, "--root", "00" * 32, "--json")
    assert other.code == 1
    assert [check["outcome"] for check in json.loads(other.out)["checks"]] == [
        "passed", "failed", "not reached", "not reached", "not reached", "not reached",
    ]  # fmt: skip


def test_a_changed_log_does_not_verify(tally, copied: Path) -> None:
    log = copied / "logs" / "000002.tlog"
    data = bytearray(log.read_bytes())
    data[-1] ^= 1
    log.write_bytes(data)

    answer = tally("verify", copied)

    assert answer.code == 1
    assert answer.out.startswith("does not fit together: check 3 failed")
    assert "the log's digest is" in answer.out.replace("\n", "")


def test_an_unfinished_run_does_not_verify(tally, copied: Path) -> None:
    (copied / "run.json").unlink()

    answer = tally("verify", copied)

    assert answer.code == 2
    assert "malformed: check 1 failed" in answer.out


def test_a_step_proof_verifies_against_the_run_root_only(tally, recorded: Path, tmp_path: Path) -> None:
    root = json.loads((recorded / "run.json").read_bytes())["root"]
    proof = tmp_path / "step.json"

    assert tally("prove", recorded, "--step", "3", "--out", proof).code == 0
    good = tally("verify", proof, "--root", root, "--json")
    wrong = tally("verify", proof, "--root", "ab" * 32)

    assert (good.code, json.loads(good.out)["verdict"]) == (0, "match")
    assert "step 3" in json.loads(good.out)["subject"]
    assert wrong.code == 1
    assert "does not fit together: check 1 failed" in wrong.out


def test_a_step_proof_on_stdout_is_the_proof_and_nothing_else(tally, recorded: Path, tmp_path: Path) -> None:
    answer = tally("prove", recorded, "--step", "0")
    (tmp_path / "proof").write_text(answer.out)

    root = json.loads((recorded / "run.json").read_bytes())["root"]
    assert root in answer.err
    assert tally("verify", tmp_path / "proof", "--root", root).code == 0


def test_a_chunk_proof_verifies_with_its_bytes_only(tally, recorded: Path, tmp_path: Path) -> None:
    proof, part = tmp_path / "chunk.json", tmp_path / "chunk.json.chunk"
    arguments = ["--checkpoint", "4", "--entry", "model/0.weight", "--chunk", "0", "--out"]
    assert tally("prove", recorded, *arguments, proof).code == 0
    root = next(
        checkpoint["state_root"]
        for checkpoint in json.loads(tally("show", recorded, "--json").out)["checkpoints"]
        if checkpoint["steps"] == 4
    )

    assert tally("verify", proof, "--root", root).code == 0
    assert tally("verify", proof, "--root", root, "--chunk", part).code == 0

    part.write_bytes(bytes(len(part.read_bytes())))
    changed = tally("verify", proof, "--root", root)
    part.unlink()
    missing = tally("verify", proof, "--root", root)

    assert changed.code == 1
    assert missing.code == 2
    assert "the bytes of the chunk are needed" in missing.err


def test_an_unfinished_run_proves_its_committed_states_and_no_steps(tally, copied: Path) -> None:
    (copied / "run.json").unlink()

    assert tally("prove", copied, "--checkpoint", "2", "--entry", "model/0.bias", "--chunk", "0").code == 0
    answer = tally("prove", copied, "--step", "1")
    assert answer.code == 2
    assert "the run is not finished" in answer.err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "give either --step N, or all of"),
        (["--step", "1", "--checkpoint", "2"], "give either --step N, or all of"),
        (["--checkpoint", "2", "--entry", "model/0.bias"], "give either --step N, or all of"),
        (["--step", "6"], "there is no record of step 6"),
        (["--step", "-1"], "--step"),
        (["--checkpoint", "3", "--entry", "model/0.bias", "--chunk", "0"], "no state was committed there"),
        (["--checkpoint", "2", "--entry", "model/0.bia", "--chunk", "0"], "the nearest are model/0.bias"),
        (["--checkpoint", "2", "--entry", "model/0.bias", "--chunk", "1"], "1"),
    ],
)
def test_a_proof_that_cannot_be_made_is_refused_with_its_reason(
    tally, recorded: Path, arguments: list[str], reason: str
) -> None:
    answer = tally("prove", recorded, *arguments)

    assert (answer.code, answer.out) == (2, "")
    assert reason in answer.err


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "proof"),
        (b"[]", "is none of the documents that tally knows"),
        (b'{"format":"tallystick/run/2"}', "is a run's specification; `tally verify DIR`"),
        (b'{"format": "tallystick/step-proof/1"}', "not the canonical encoding"),
        (b'{"format":"tallystick/step-proof/1"}', "is missing"),
        (b'{"format":"tallystick/chunk-proof/1"}', "is missing"),
    ],
)
def test_what_is_no_proof_is_refused_with_its_reason(tally, tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "proof.json"
    path.write_bytes(data)
    (tmp_path / "proof.json.chunk").write_bytes(b"")

    answer = tally("verify", path, "--root", "00" * 32, "--json")

    assert answer.code == 2
    assert reason in json.loads(answer.out)["error"]


def test_a_proof_needs_a_root_of_64_digits(tally, recorded: Path, tmp_path: Path) -> None:
    proof = tmp_path / "step.json"
    tally("prove", recorded, "--step", "3", "--out", proof)

    assert "give it with --root HEX" in tally("verify", proof).err
    for root in ("", "00", "zz" * 32, "00" * 33):
        answer = tally("verify", proof, "--root", root)
        assert answer.code == 2
        assert "must be 64 hexadecimal digits" in answer.err


def test_wrong_arguments_of_verify_are_refused(tally, recorded: Path, tmp_path: Path) -> None:
    assert "there is no such file" in tally("verify", tmp_path / "missing", "--root", "00" * 32).err
    assert "--chunk: for a chunk proof;" in tally("verify", recorded, "--chunk", recorded / "run.json").err
    assert tally("verify").code == 2
    assert tally("show").code == 2


def test_show_verify_and_prove_need_no_extra_and_record_names_the_one_it_needs(
    recorded: Path, tmp_path: Path
) -> None:
    root = json.loads((recorded / "run.json").read_bytes())["root"]
    commands = [
        ["show", str(recorded)],
        ["verify", str(recorded)],
        ["prove", str(recorded), "--step", "1", "--out", str(tmp_path / "step.json")],
        ["verify", str(tmp_path / "step.json"), "--root", root],
        ["prove", str(recorded), "--checkpoint", "2", "--entry", "model/0.bias", "--chunk", "0",
         "--out", str(tmp_path / "chunk.json")],
        ["record", "digits", "--run", str(tmp_path / "run"), "--policy", "fp32"],
        ["audit", str(recorded)],
    ]  # fmt: skip

    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_EXTRAS, json.dumps(commands)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )

    assert child.stdout.splitlines()[-1] == "codes [0, 0, 0, 0, 0, 2, 2]", child.stderr
    assert "torch is not installed and this command needs it: pip install 'tallystick[torch]'" in child.stderr
    assert "Traceback" not in child.stderr
