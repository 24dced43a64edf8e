from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import safetensors

from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput, StoreError
from tallystick.store.models import (
    WEIGHTS_FILE,
    compare_model,
    read_manifest,
    weights_manifest,
    write_weights,
)

STATE = [
    Entry("model/head.weight", "F32", (2, 3), bytes(range(24))),
    Entry("model/buffer/mean", "F32", (2,), bytes(8)),
    Entry("optimizer/head.weight/exp_avg", "F32", (2, 3), bytes(24)),
    Entry("document/cursor", "U8", (2,), b"{}"),
]


def test_the_weights_are_the_models_entries_under_its_own_names(tmp_path: Path) -> None:
    manifest = write_weights(tmp_path / "out", STATE)
    data = (tmp_path / "out" / WEIGHTS_FILE).read_bytes()
    assert manifest.files == {WEIGHTS_FILE: hashlib.sha256(data).hexdigest()}
    tensors = dict(safetensors.deserialize(data))
    assert {name: bytes(t["data"]) for name, t in tensors.items()} == {
        "head.weight": bytes(range(24)),
        "mean": bytes(8),
    }
    assert manifest == weights_manifest(reversed(STATE)) == read_manifest(tmp_path / "out")


def test_weights_are_not_overwritten_and_never_empty(tmp_path: Path) -> None:
    write_weights(tmp_path, STATE)
    with pytest.raises(StoreError, match="is there already"):
        write_weights(tmp_path, STATE)
    with pytest.raises(InvalidInput, match="0 parameters"):
        weights_manifest(STATE[2:])


def test_a_parameter_and_a_buffer_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidInput, match="two of one name"):
        weights_manifest([*STATE, Entry("model/mean", "F32", (2,), bytes(8))])


def test_every_file_counts_but_the_signature_and_what_git_keeps_at_the_top(tmp_path: Path) -> None:
    for name in (
        "a.bin",
        "sub/b.bin",
        "sub/.gitignore",
        "sub/model.sig",
        ".gitignore",
        ".git/config",
        "model.sig",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name.encode())
    assert sorted(read_manifest(tmp_path).files) == ["a.bin", "sub/.gitignore", "sub/b.bin", "sub/model.sig"]


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_a_signature_that_is_no_regular_file_hides_nothing(tmp_path: Path, kind: str) -> None:
    write_weights(tmp_path, STATE)
    path = tmp_path / "model.sig"
    if kind == "folder":
        path.mkdir()
        (path / "pickle.bin").write_bytes(b"x")
    elif kind == "link":
        path.symlink_to(tmp_path / WEIGHTS_FILE)
    else:
        os.mkfifo(path)
    with pytest.raises(InvalidInput, match=r"model\.sig: must be a regular file"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["__init__.py", "sub/model.safetensors", "model.safetensors"])
def test_the_result_in_a_directory_has_its_name(tmp_path: Path, name: str) -> None:
    write_weights(tmp_path, STATE)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / WEIGHTS_FILE).rename(tmp_path / name)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hook").write_bytes(b"x")
    weights = weights_manifest(STATE).root_digest()

    is_result, why = compare_model(tmp_path, weights, "00" * 32)

    assert is_result == (name == WEIGHTS_FILE)
    assert (
        "not looked at: .git" if is_result else f"the directory: has {name!r}, the result is one file"
    ) in why
    (tmp_path / "more").write_bytes(b"")
    is_result, why = compare_model(tmp_path, weights, "00" * 32)
    assert not is_result
    assert "root digest is" in why


@pytest.mark.parametrize("target", ["a.bin", "sub", "nowhere"])
def test_a_link_in_a_model_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.bin").write_bytes(b"x")
    (tmp_path / "sub" / "link").symlink_to(tmp_path / target)
    with pytest.raises(InvalidInput, match="is a symbolic link"):
        read_manifest(tmp_path)


def test_a_model_without_files_is_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="has no file"):
        read_manifest(tmp_path)
    with pytest.raises(StoreError, match="no such directory"):
        read_manifest(tmp_path / "missing")
