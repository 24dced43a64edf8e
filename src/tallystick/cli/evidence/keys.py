"""tally key: makes signing keys and shows whose they are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from tallystick.cli.options import AsJson, argument, option
from tallystick.cli.terminal import answer
from tallystick.reports.layout import GOOD, Row, page
from tallystick.signing.keys import PublicKey, generate_key
from tallystick.store.keys import PASSWORD_VARIABLE, load_key, load_public_key, write_key

app = typer.Typer(help="Make signing keys and show whose they are.", no_args_is_help=True)
Algorithm = Annotated[
    str, option("--algorithm", "NAME", "ed25519, ecdsa-p256 (model signatures) or ecdsa-p384.")
]


@dataclass(frozen=True)
class KeyPage:
    """A public key and where it and its private half lie."""

    key: PublicKey
    headline: str
    private_file: str | None
    public_file: str | None
    encrypted: bool | None = None

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return {
            "algorithm": self.key.algorithm,
            "key_id": self.key.key_id,
            "public_key": self.key.pem().decode(),
            "private_file": self.private_file,
            "public_file": self.public_file,
            "encrypted": self.encrypted,
        }

    def __rich__(self) -> RenderableType:
        """Return the page for people."""
        rows: list[Row] = [("algorithm", self.key.algorithm), ("key id", self.key.key_id)]
        if self.private_file is not None:
            kept = "encrypted" if self.encrypted else f"not encrypted; set {PASSWORD_VARIABLE} to encrypt it"
            rows.append(("private key", f"{self.private_file} (mode 0600, {kept})"))
        if self.public_file is not None:
            rows.append(("public key", self.public_file))
        return page(self.headline, GOOD, rows)


def register(parent: typer.Typer) -> None:
    """Add ``tally key`` to ``parent``."""
    parent.add_typer(app, name="key")


@app.command()
def generate(
    file: Annotated[Path, argument("FILE", "For the private key; FILE.pub will be the public one.")],
    algorithm: Algorithm = "ed25519",
    as_json: AsJson = False,
) -> int:
    """Make a key pair. With TALLYSTICK_KEY_PASSWORD in the environment the private key is encrypted."""
    password = os.environ.get(PASSWORD_VARIABLE)
    key = generate_key(algorithm)
    public = write_key(file, key, None if password is None else password.encode())
    shown = KeyPage(key.public_key, "new key", str(file), str(public), password is not None)
    answer(shown, as_json=as_json)
    return 0


@app.command()
def show(
    key: Annotated[str, argument("FILE", "A public key's file, a private key's, or env:NAME.")],
    as_json: AsJson = False,
) -> int:
    """Show a key's algorithm and identity; never what is private."""
    if key.startswith("env:") or b"PRIVATE KEY" in _start_of(Path(key)):
        answer(KeyPage(load_key(key).public_key, f"private key {key}", None, None), as_json=as_json)
    else:
        public = load_public_key(Path(key))
        answer(KeyPage(public, f"public key {key}", None, None), as_json=as_json)
    return 0


def _start_of(path: Path) -> bytes:
    """Return the first line of the file, or nothing where the loader will say what is wrong."""
    try:
        with path.open("rb") as file:
            return file.readline(80)
    except OSError:
        return b""
