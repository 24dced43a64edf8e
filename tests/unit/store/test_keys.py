from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tallystick.cli.main import main
from tallystick.errors import InvalidInput, StoreError
from tallystick.signing.keys import generate_key
from tallystick.store.keys import PASSWORD_VARIABLE, load_key, load_public_key, write_key


def test_a_written_key_comes_back_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    key = generate_key()
    public = write_key(tmp_path / "log.key", key)
    assert (tmp_path / "log.key").stat().st_mode & 0o777 == 0o600
    assert load_key(str(tmp_path / "log.key")).public_key == key.public_key == load_public_key(public)


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    write_key(tmp_path / "log.key", generate_key())
    before = (tmp_path / "log.key").read_bytes()
    with pytest.raises(StoreError, match="never overwritten"):
        write_key(tmp_path / "log.key", generate_key())
    assert (tmp_path / "log.key").read_bytes() == before


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "log.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="is there already"):
        write_key(tmp_path / "log.key", generate_key())
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    write_key(tmp_path / "log.key", generate_key())
    (tmp_path / "log.key").chmod(mode)
    with pytest.raises(InvalidInput, match=f"mode 0{mode:o} lets others at it; must be 0600"):
        load_key(str(tmp_path / "log.key"))


def test_a_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    key = generate_key("ecdsa-p256")
    monkeypatch.setenv("RUN_KEY", key.pem(b"secret words").decode())
    monkeypatch.setenv(PASSWORD_VARIABLE, "secret words")
    assert load_key("env:RUN_KEY").public_key == key.public_key
    monkeypatch.delenv("RUN_KEY")
    with pytest.raises(StoreError, match="the environment has no variable 'RUN_KEY'"):
        load_key("env:RUN_KEY")


def test_the_command_makes_a_key_and_shows_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, "secret words")
    file = tmp_path / "log.key"
    assert main(["key", "generate", str(file), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["encrypted"] is True
    secret = file.read_text().splitlines()[1]
    assert b"ENCRYPTED" in file.read_bytes()
    for shown in (str(file), str(file) + ".pub"):
        assert main(["key", "show", shown]) == 0
        page = capsys.readouterr()
        assert made["key_id"] in page.out.replace("\n", "").replace(" ", "")
        assert secret not in page.out + page.err
        assert "secret words" not in page.out + page.err
    monkeypatch.delenv(PASSWORD_VARIABLE)
    assert main(["key", "show", str(file)]) == 2
    assert "is encrypted and no password was given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["generate", "DIR/k", "--algorithm", "rsa"], "must be one of ed25519"),
        (["generate", "DIR/absent/k"], "No such file|there is no"),
        (["show", "DIR/absent"], "there is no such file"),
        (["show", "DIR"], "cannot be read"),
    ],
)
def test_wrong_arguments_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert main(["key", *(part.replace("DIR", str(tmp_path)) for part in arguments)]) == 2
    assert re.search(reason, capsys.readouterr().err.replace("\n", " "))
    assert list(tmp_path.iterdir()) == []
