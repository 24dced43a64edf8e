"""A model on the disk: its files, their digests, and its weights written from a committed state."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput, StoreError
from tallystick.protocol.model_signature import EXCLUDED, SIGNATURE_FILE, Manifest
from tallystick.store.files import storing, weights_pieces

WEIGHTS_FILE = "model.safetensors"
_READ = 1 << 20


def read_manifest(directory: Path, *, signature: str = SIGNATURE_FILE) -> Manifest:
    """Return every file below ``directory`` with its SHA-256, but the signature and what git keeps at the top.

    Raises:
        StoreError: it is no directory or cannot be read.
        InvalidInput: a symbolic link, a name that is not UTF-8, something that is no file, or no file at all.
    """
    if not directory.is_dir():
        raise StoreError(f"{directory}: there is no such directory")
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
    found = hashlib.sha256()
    for piece in weights_pieces(state):
        found.update(piece)
    return Manifest({WEIGHTS_FILE: found.hexdigest()})


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
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_READ):
            found.update(piece)
    return found.hexdigest()
