"""A model on the disk: its files, their digests, and its weights written from a committed state."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from tallystick.commit.state import Entry, summarise
from tallystick.errors import InvalidInput, Mismatch, StoreError
from tallystick.signing.model_signature import EXCLUDED, SIGNATURE_FILE, Manifest
from tallystick.store.files import load_state_file, open_regular, storing, tensor_pieces, weights_pieces

WEIGHTS_FILE = "model.safetensors"


def read_manifest(directory: Path, *, signature: str = SIGNATURE_FILE) -> Manifest:
    """Return every file below ``directory`` with its SHA-256, but the signature and what git keeps at the top.

    Raises:
        StoreError: it is no directory or cannot be read.
        InvalidInput: a symbolic link, a name that is not UTF-8, something that is no file (the signature too), or no file
            at all.
    """
    if not directory.is_dir():
        raise StoreError(f"{directory}: there is no such directory")
    held = directory / signature
    if os.path.lexists(held) and (held.is_symlink() or not held.is_file()):
        raise InvalidInput(
            f"{held}: must be a regular file, the model's signature; what it holds would not be looked at"
        )
    excluded = {*EXCLUDED, signature}
    files: dict[str, str] = {}
    with storing(f"{directory}: cannot be read"):
        for folder, folders, names in os.walk(directory, followlinks=False):
            at = Path(folder)
            top = at == directory
            folders[:] = sorted(name for name in folders if not (top and name in excluded))
            for name in sorted([*names, *folders]):
                path = at / name
                if path.is_symlink():
                    raise InvalidInput(f"{path}: is a symbolic link, which a signed model must not hold")
                if name in folders or (top and name in excluded):
                    continue
                files[_name_of(path.relative_to(directory))] = _digest(path)
    return Manifest(files)


def unread_files(directory: Path) -> list[str]:
    """Return what lies in a model's directory and is not looked at: what the format leaves out, and the signature."""
    return sorted(name for name in (*EXCLUDED, SIGNATURE_FILE) if os.path.lexists(directory / name))


def check_result(found: Manifest, weights: str, what: str) -> None:
    """Return if ``found`` is the one file that ``tally export`` writes, under its name, with the root digest ``weights``.

    Raises:
        Mismatch: another root digest, other files, or the file under another name: a root digest says nothing of names.
    """
    own = found.root_digest()
    if own != weights:
        raise Mismatch(
            f"{what}: root digest is {own}, the statements say {weights}", where=what, own=own, stated=weights
        )
    if list(found.files) != [WEIGHTS_FILE]:
        names = ", ".join(repr(name[:80]) for name in list(found.files)[:3])
        raise Mismatch(f"{what}: has {names}, the result is one file, {WEIGHTS_FILE!r}")


def write_weights(directory: Path, state: Iterable[Entry]) -> Manifest:
    """Write ``model.safetensors`` of a committed state into ``directory`` and return the manifest of that one file.

    Raises:
        StoreError: the file is there already, or the disk refused.
    """
    path = directory / WEIGHTS_FILE
    with storing(f"{path}: cannot be written"):
        if path.exists():
            raise StoreError(f"{path}: is there already, and weights are not overwritten")
        directory.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.part")
        found = hashlib.sha256()
        with temporary.open("wb") as file:
            for piece in weights_pieces(state):
                file.write(piece)
                found.update(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    return Manifest({WEIGHTS_FILE: found.hexdigest()})


def weights_manifest(state: Iterable[Entry]) -> Manifest:
    """Return the manifest of the file that ``write_weights`` would write."""
    return _digest_of(weights_pieces(state))


def _digest_of(pieces: Iterable[bytes | memoryview]) -> Manifest:
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return Manifest({WEIGHTS_FILE: found.hexdigest()})


def compare_model(path: Path, weights: str, final_state: str) -> tuple[bool, str]:
    """Return whether the file or directory ``path`` is the result of a run, and why.

    The result is ``model.safetensors``, alone in its directory, with the root digest ``weights``; or one file with
    exactly these tensors, however it is spelled; or the committed state with the root ``final_state``, from which the
    weights are made.

    Raises:
        InvalidInput: it is no regular file and no model's directory.
        StoreError: it cannot be read.
    """
    if path.is_dir():
        try:
            check_result(read_manifest(path), weights, "the directory")
        except Mismatch as problem:
            return False, str(problem)
        unread = ", ".join(unread_files(path)) or "nothing"
        return (
            True,
            f"its one file {WEIGHTS_FILE} has the root digest that the statements name, {weights}; not looked at: {unread}",
        )
    with open_regular(path, "the weights' file", follow=True) as file, storing(f"{path}: cannot be read"):
        found = Manifest({WEIGHTS_FILE: hashlib.file_digest(file, "sha256").hexdigest()}).root_digest()
    if found == weights:
        return True, f"it is, byte for byte, what tally export writes; root digest {weights}"
    differs = f"its root digest is {found}, the statements say {weights}"
    try:
        entries = load_state_file(path)
    except InvalidInput as problem:
        return False, f"{differs}; it is not read as tensors either ({problem})"
    if _digest_of(tensor_pieces(list(entries.values()))).root_digest() == weights:
        return (
            True,
            f"its tensors are those of root digest {weights}, bit for bit, in another spelling of the file",
        )
    if any(name.startswith("document/") for name in entries):
        root = summarise(entries.values()).root().hex()
        if root == final_state:
            return True, f"it is the run's committed final state, root {root}, whole"
        return False, f"it is a state with root {root}, the run's final state has {final_state}"
    return False, f"{differs}; its tensors differ, or their names, types or shapes"


def _name_of(path: Path) -> str:
    name = path.as_posix()
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidInput(f"{name!r}: a file name must be UTF-8") from None
    return name


def _digest(path: Path) -> str:
    if not path.is_file():
        raise InvalidInput(f"{path}: is neither a file nor a directory")
    with open_regular(path, "a model's file", follow=True) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
