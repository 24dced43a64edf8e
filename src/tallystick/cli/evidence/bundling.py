"""tally bundle and tally policy: one file with everything a stranger needs, and what to ask of it; without torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.models import OptionInfo

from tallystick.cli.options import AsJson, argument, option
from tallystick.cli.terminal import done, say
from tallystick.errors import InvalidInput, Mismatch, StoreError
from tallystick.evidence.bundle import Member, make_bundle
from tallystick.evidence.files import verify_bundle_file
from tallystick.evidence.policy import parse_evidence_policy, policy_template
from tallystick.reports.layout import Row
from tallystick.roles.statements import gather, log_proof_of
from tallystick.store.files import RunDirectory, read_whole, write_whole
from tallystick.store.keys import load_public_key
from tallystick.tlog.publication import DOCUMENT_LIMIT
from tallystick.tlog.tree import LOG_PROOF_LIMIT

PolicyFile = Annotated[
    Path | None,
    option(
        "--policy",
        "FILE",
        "For a bundle: whose keys, what was to be trained, how much freedom; tally policy init writes one.",
    ),
]
ModelDirectory = Annotated[
    Path | None, option("--model", "DIR", "For a bundle: the weights' files, to be compared.")
]

BundleFile = Annotated[
    Path | None, option("--bundle", "FILE", "For weights: the bundle that they should be the result of.")
]


policies = typer.Typer(help="What is asked of a bundle of evidence.", no_args_is_help=True)


def _keys_of(role: str) -> OptionInfo:
    return typer.Option(f"--{role}", metavar="PUB", help=f"A public key of the {role}; may be repeated.")


def register(parent: typer.Typer) -> None:
    """Add ``tally bundle`` and ``tally policy`` to ``parent``."""
    parent.command()(bundle)
    parent.add_typer(policies, name="policy")


@policies.callback()
def policy() -> None:
    """What is asked of a bundle of evidence."""


@policies.command()
def init(
    out: Annotated[
        Path | None, option("--out", "FILE", "Where to write it; by default stdout.", short="-o")
    ] = None,
    trainer: Annotated[list[Path] | None, _keys_of("trainer")] = None,
    auditor: Annotated[list[Path] | None, _keys_of("auditor")] = None,
    judge: Annotated[list[Path] | None, _keys_of("judge")] = None,
    bundle: Annotated[
        Path | None, option("--bundle", "FILE", "Pin what this bundle states; see that it is what you want.")
    ] = None,
) -> int:
    """Write an evidence policy with a comment about every field, to be edited."""
    roles: dict[str, str] = {}
    for role, files in (("trainer", trainer), ("auditor", auditor), ("judge", judge)):
        for file in files or []:
            key_id = load_public_key(file).key_id
            if roles.setdefault(key_id, role) != role:
                raise InvalidInput(f"{file}: is given as {roles[key_id]} and as {role}; one party, one role")
    notes: list[str] = []
    stated = None
    if bundle is not None:
        found = verify_bundle_file(bundle, None, None)
        if found.stated is None or found.verdict != "unjudged":
            failed = next(check for check in found.checks if check.outcome == "failed")
            raise Mismatch(
                f"{bundle}: states nothing that could be pinned: check {failed.number}: {failed.detail}"
            )
        stated = found.stated.fields()
        notes = [
            "What it pins is what one bundle stated. See that this is what you want:",
            "a policy copied from a bundle accepts whatever that bundle says.",
            f"The provenance is signed by key {found.stated.trainer};",
            "whose that is, its owner must tell you.",
        ]
        for audited in found.audits:
            numbers = audited.measured().items()
            notes.append(f"Auditor {audited.key_id} says {audited.claim.result} and measured")
            notes.append(
                "  "
                + ", ".join(f"{n} {'nothing' if v is None else format(float(v), '.4g')}" for n, v in numbers)
            )
    text = policy_template(roles, stated, notes)
    parse_evidence_policy(text.encode())
    if out is None:
        sys.stdout.write(text)
        return 0
    if out.exists():
        raise StoreError(f"{out}: is there already, and a policy is not overwritten")
    write_whole(out, text.encode())
    say(f"{out}: edit it, then tally verify BUNDLE --policy {out}")
    return 0


def bundle(
    paths: Annotated[
        list[str],
        argument(
            "PATH...",
            "Run directories, statements, model.sig, public keys, draws, records; log proofs as DOCUMENT@PROOF.",
        ),
    ],
    out: Annotated[Path, option("--out", "FILE", "Where to write the bundle.", short="-o")],
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
    return done(
        f"bundle {out}: {len(made.members)} members, {len(data):,} bytes", values, rows, as_json=as_json
    )


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
