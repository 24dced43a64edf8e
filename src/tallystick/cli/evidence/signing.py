"""tally sign and tally export: weights that leave a run, and what their trainer signs; without torch."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from tallystick.cli.options import AsJson, OwnKey, argument, option
from tallystick.cli.terminal import done
from tallystick.errors import StoreError
from tallystick.reports.layout import Row
from tallystick.roles.statements import sign_run
from tallystick.signing.model_signature import SIGNATURE_FILE, sign_model
from tallystick.store.files import RunDirectory, write_whole
from tallystick.store.keys import load_key
from tallystick.store.models import WEIGHTS_FILE, read_manifest, write_weights

PROVENANCE_FILE = "provenance.intoto.json"


def register(parent: typer.Typer) -> None:
    """Add ``tally sign`` and ``tally export`` to ``parent``."""
    parent.command()(sign)
    parent.command()(export)


def sign(
    directory: Annotated[Path, argument("DIR", "A finished run, or a model's directory.")],
    key: OwnKey,
    out: Annotated[
        Path | None, option("--out", "FILE", f"By default DIR/{PROVENANCE_FILE} or DIR/{SIGNATURE_FILE}.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Sign a run's provenance (in-toto, SLSA v1), or a model's files (OpenSSF Model Signing v1.0)."""
    signer = load_key(key)
    run = RunDirectory(directory)
    if not directory.is_dir():
        raise StoreError(f"{directory}: there is no such directory")
    if os.path.lexists(run.specification_path):
        kind, target = "provenance of run", out or directory / PROVENANCE_FILE
        data = sign_run(run, signer, int(time.time()))
        root: str | None = run.load_transcript().root().hex()
        digest: str | None = None
    else:
        kind, target = "files of model", out or directory / SIGNATURE_FILE
        manifest = read_manifest(directory, signature=SIGNATURE_FILE)
        data = sign_model(manifest, directory.resolve().name, signer)
        root, digest = None, manifest.root_digest()
    write_whole(target, data)
    values: dict[str, object] = {
        "file": str(target), "key_id": signer.public_key.key_id, "run": root, "root_digest": digest,
    }  # fmt: skip
    rows: list[Row] = [("signature", str(target)), ("key id", signer.public_key.key_id)]
    rows.append(("run", root) if root is not None else ("root digest", str(digest)))
    return done(f"signed: {kind} {directory}", values, rows, as_json=as_json)


def export(
    run: Annotated[Path, argument("DIR", "A finished run.")],
    out: Annotated[Path, option("--out", "DIR", f"Where to write {WEIGHTS_FILE}.")],
    as_json: AsJson = False,
) -> int:
    """Write a run's final weights as safetensors; one run makes one file, byte for byte."""
    directory = RunDirectory(run)
    final = directory.load_transcript().statement()
    manifest = write_weights(out, directory.load_committed(final.steps, final.final_state).values())
    values: dict[str, object] = {
        "file": str(out / WEIGHTS_FILE), "sha256": manifest.files[WEIGHTS_FILE], "root_digest": manifest.root_digest(),
    }  # fmt: skip
    rows: list[Row] = [("sha256", manifest.files[WEIGHTS_FILE]), ("root digest", manifest.root_digest())]
    return done(f"weights after {final.steps} steps: {out / WEIGHTS_FILE}", values, rows, as_json=as_json)
