"""Keys at rest: private ones readable by their owner alone, or taken from the environment.

A key is named by a path or by ``env:NAME``. A password for either comes from the environment
variable TALLYSTICK_KEY_PASSWORD; it is never an argument, which every user of the machine could read.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tallystick.errors import InvalidInput, StoreError
from tallystick.signing.keys import KEY_LIMIT, PublicKey, SigningKey, parse_public_key, parse_signing_key
from tallystick.store.files import storing

PASSWORD_VARIABLE = "TALLYSTICK_KEY_PASSWORD"
ENVIRONMENT = "env:"


def write_key(path: Path, key: SigningKey, password: bytes | None = None) -> Path:
    """Write the private key to ``path`` (mode 0600) and its public key to ``path`` + ".pub"; return the latter.

    Raises:
        StoreError: one of the two is there already (a key is never overwritten), or the disk refused.
    """
    public = path.with_name(path.name + ".pub")
    for file in (path, public):
        if file.exists() or file.is_symlink():
            raise StoreError(f"{file}: is there already, and a key is never overwritten")
    with storing(str(path)):
        _write_new(path, key.pem(password), 0o600)
        _write_new(public, key.public_key.pem(), 0o644)
    return public


def load_key(source: str) -> SigningKey:
    """Return the private key at the path ``source``, or in the variable named by ``env:NAME``.

    Raises:
        StoreError: there is none, or it cannot be read.
        InvalidInput: others than the owner may read or write the file, or it is no key.
    """
    if (password := os.environ.get(PASSWORD_VARIABLE)) is not None:
        secret: bytes | None = password.encode()
    else:
        secret = None
    if source.startswith(ENVIRONMENT):
        name = source.removeprefix(ENVIRONMENT)
        text = os.environ.get(name)
        if text is None:
            raise StoreError(f"key {source}: the environment has no variable {name!r}")
        return parse_signing_key(text.encode(), secret, what=f"key {source}")
    path = Path(source)
    data, mode = _read(path)
    if mode & 0o077:
        raise InvalidInput(
            f"key {path}: mode {mode:04o} lets others at it; must be 0600 (chmod 600 {path.name})"
        )
    return parse_signing_key(data, secret, what=f"key {path}")


def load_public_key(path: Path) -> PublicKey:
    """Return the public key in the PEM or DER file ``path``.

    Raises:
        StoreError: it cannot be read.
        InvalidInput: it is no public key.
    """
    return parse_public_key(_read(path)[0], what=f"key {path}")


def _read(path: Path) -> tuple[bytes, int]:
    try:
        with path.open("rb") as file:
            data = file.read(KEY_LIMIT + 1)
            return data, stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    except FileNotFoundError:
        raise StoreError(f"key {path}: there is no such file") from None
    except OSError as problem:
        raise StoreError(f"key {path}: cannot be read ({problem.strerror})") from problem


def _write_new(path: Path, data: bytes, mode: int) -> None:
    """Write a file that nobody else could open in between; it must not exist."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
