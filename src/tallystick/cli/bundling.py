"""tally bundle: one file with everything a stranger needs; and how tally verify checks one; without torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from tallystick.cli.options import AsJson
from tallystick.cli.terminal import answer
from tallystick.errors import InvalidInput
from tallystick.protocol.bundle import BUNDLE_LIMIT, Member, make_bundle
from tallystick.protocol.evidence_policy import POLICY_LIMIT, parse_evidence_policy
from tallystick.protocol.published import DOCUMENT_LIMIT
from tallystick.protocol.tlog import LOG_PROOF_LIMIT
from tallystick.reports.layout import DonePage, Row
from tallystick.roles.evidence import gather, log_proof_of
from tallystick.roles.verifier import Verification
from tallystick.store.files import RunDirectory, read_whole, write_whole
from tallystick.store.models import read_manifest

PolicyFile = Annotated[
    Path | None,
    typer.Option(
        "--policy",
        metavar="FILE",
        help="For a bundle: which keys, how many auditors, which freedom, how old.",
    ),
]
ModelDirectory = Annotated[
    Path | None,
    typer.Option("--model", metavar="DIR", help="For a bundle: the weights' files, to be compared."),
]


def register(parent: typer.Typer) -> None:
    """Add ``tally bundle`` to ``parent``."""
    parent.command()(bundle)


def bundle(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...",
            help="Run directories, statements, model.sig, public keys, draws, records; log proofs as DOCUMENT@PROOF.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where to write the bundle.")],
    as_json: AsJson = False,
) -> int:
    """Put statements, proofs and records into one file that verifies offline."""
    members = [member for path in paths for member in _members(path)]
    made = make_bundle(members)
    data = made.encode()
    write_whole(out, data)
    listed = [
        {"kind": m.kind, "name": m.name, "bytes": len(m.data), "sha256": m.digest} for m in made.members
    ]
    rows: list[Row] = [(m.kind, f"{m.name} ({len(m.data):,} bytes)") for m in made.members]
    rows.append(("next", f"tally verify {out} --policy FILE"))
    values: dict[str, object] = {"bundle": str(out), "bytes": len(data), "members": listed}
    answer(
        DonePage(f"bundle {out}: {len(made.members)} members, {len(data):,} bytes", values, rows),
        as_json=as_json,
    )
    return 0


def verify_file(path: Path, data: bytes, policy: Path | None, model: Path | None) -> Verification:
    """Return the checks of the bundle in ``data``."""
    from tallystick.roles.bundle_verifier import verify_bundle

    rules = None
    if policy is not None:
        text = read_whole(policy, limit=POLICY_LIMIT, what="a policy")
        rules = parse_evidence_policy(text, what=str(policy))
    files = None if model is None else read_manifest(model)
    return verify_bundle(data, rules, now=int(time.time()), model=files, name=f"bundle {path}")


def is_bundle(path: Path) -> bool:
    """Return whether the file ``path`` says that it is a bundle; only so much of it is read."""
    head = b'{"format":"tallystick/bundle/'
    try:
        with path.open("rb") as file:
            return file.read(len(head)) == head
    except OSError:
        return False


def load_bundle(path: Path) -> bytes:
    """Return the bytes of a bundle's file."""
    return read_whole(path, limit=BUNDLE_LIMIT, what="a bundle")


def _members(text: str) -> list[Member]:
    path = Path(text)
    if not path.exists() and "@" in text:
        document, _, proof = text.rpartition("@")
        if not document or not proof:
            raise InvalidInput(f"{text}: a log proof is given as DOCUMENT@PROOF")
        at = Path(document)
        data = (
            RunDirectory(at).load_statement()
            if at.is_dir()
            else read_whole(at, limit=DOCUMENT_LIMIT, what="a document of a log proof")
        )
        return [log_proof_of(data, read_whole(Path(proof), limit=LOG_PROOF_LIMIT, what="a log proof"))]
    return gather(path)
