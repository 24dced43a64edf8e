"""tally chip enrol: make a TPM's attestation key known through the certificate of its endorsement key."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tallystick.cli.fleet.chip_evidence import ListFiles, Lists, ListsRequired, Moment, tpm_key_of
from tallystick.cli.options import AsJson, Out, OwnKey, argument, option
from tallystick.cli.terminal import done
from tallystick.errors import InvalidInput
from tallystick.fleet.attestation.certificates import CHAIN_LIMIT, Certificate, parse_chain, parse_root
from tallystick.fleet.attestation.enrolment import (
    EK_UNDERSTOOD,
    WHAT,
    Challenge,
    EnrolmentRequest,
    KeptChallenge,
    TpmAnswer,
    answer_to,
    challenge_request,
    enrol,
    verify_request,
)
from tallystick.signing.dsse import sign_statement
from tallystick.store.chips import ChipDirectory
from tallystick.store.documents import read_document
from tallystick.store.files import read_whole, write_whole
from tallystick.store.keys import load_key

app = typer.Typer(
    help="Enrol a TPM's attestation key under the certificate of its endorsement key.", no_args_is_help=True
)

Chip = Annotated[Path, argument("CHIP", "The chip's directory; its key is in a TPM.")]
RequestFile = Annotated[Path, argument("REQUEST", "What the owner asks to be enrolled.")]
RootFiles = Annotated[
    list[Path], option("--ek-root", "FILE", "A TPM maker's root that you pin, PEM; may be repeated.")
]


@app.command()
def request(
    chip: Chip,
    out: Out,
    certificates: Annotated[
        Path | None,
        option(
            "--certificates",
            "FILE",
            "Certificates of the TPM's endorsement key, PEM, leaf first; by default what its maker left in it.",
        ),
    ] = None,
    issuers: Annotated[
        Path | None, option("--issuers", "FILE", "Issuers to stand above the one in the TPM, PEM.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """As the owner: ask for the attestation key of the chip's TPM to be enrolled."""
    from tallystick.integrations.tpm import attestation_key, read_endorsement_certificate

    if certificates is not None and issuers is not None:
        raise InvalidInput("--issuers goes with the certificate in the TPM, not with --certificates")
    key = tpm_key_of(ChipDirectory(chip))
    if certificates is not None:
        pem = _read(certificates, CHAIN_LIMIT)
    else:
        pem = read_endorsement_certificate(key.tcti) + (
            b"" if issuers is None else _read(issuers, CHAIN_LIMIT)
        )
    chain = parse_chain(pem, what=str(certificates or key.tcti), understood=EK_UNDERSTOOD)
    made = EnrolmentRequest(attestation_key(key.tcti, key.algorithm), chain)
    write_whole(out, made.encode())
    return done(
        f"asked: {out}",
        {
            "request": made.digest().hex(),
            "attestation_key": made.attestation_key.key().key_id,
            "certificates": len(chain),
        },
        as_json=as_json,
    )


@app.command()
def challenge(
    request: RequestFile,
    roots: RootFiles,
    out: Out,
    keep: Annotated[Path, option("--keep", "FILE", "The secret, for you alone, until the answer comes.")],
    lists: ListFiles = None,
    require_lists: ListsRequired = False,
    at: Moment = None,
    as_json: AsJson = False,
) -> int:
    """As the enroller: check the certificates, hide a secret for that TPM; exit code 1 if a certificate does not hold."""
    asked = read_document(EnrolmentRequest, request)
    moment = _moment(at)
    tpm, root = verify_request(asked, _roots(roots), at=moment)
    known = Lists(tuple(lists or ()), require_lists).check(asked.certificates, root, at=moment, what=WHAT)
    made, kept = challenge_request(asked)
    write_whole(keep, kept.encode(), mode=0o600)
    write_whole(out, made.encode())
    values = {
        "request": asked.digest().hex(),
        "tpm": str(tpm),
        "root": root.subject,
        "revocation": str(known),
        "kept": str(keep),
    }
    return done(f"challenge: {out}", values, as_json=as_json)


@app.command("answer")
def answer_challenge(
    chip: Chip,
    challenge: Annotated[Path, argument("CHALLENGE", "What the enroller sent.")],
    out: Out,
    as_json: AsJson = False,
) -> int:
    """As the owner: have the TPM read the secret; it refuses if the challenge is for another TPM or attestation key."""
    from tallystick.integrations.tpm import activate

    key = tpm_key_of(ChipDirectory(chip))
    posed = read_document(Challenge, challenge)
    secret = activate(key.tcti, key.algorithm, posed.credential)
    write_whole(out, TpmAnswer(answer_to(posed.request, secret)).encode())
    return done(f"answered: {out}", {"request": posed.request.hex()}, as_json=as_json)


@app.command()
def sign(
    request: RequestFile,
    given: Annotated[Path, argument("ANSWER", "What the TPM answered.")],
    kept: Annotated[Path, option("--kept", "FILE", "What you kept of the challenge.")],
    roots: RootFiles,
    key: OwnKey,
    out: Out,
    lists: ListFiles = None,
    require_lists: ListsRequired = False,
    at: Moment = None,
    as_json: AsJson = False,
) -> int:
    """As the enroller: sign that the attestation key is in the TPM of that certificate; exit code 1 if it is not shown."""
    asked = read_document(EnrolmentRequest, request)
    signer, moment, pinned = load_key(key), _moment(at), _roots(roots)
    _, root = verify_request(asked, pinned, at=moment)
    known = Lists(tuple(lists or ()), require_lists).check(asked.certificates, root, at=moment, what=WHAT)
    made = enrol(
        asked,
        read_document(TpmAnswer, given).answer,
        read_document(KeptChallenge, kept),
        pinned,
        at=moment,
        revocation=known.status,
        enroller=signer.public_key.key_id,
    )
    write_whole(out, sign_statement(made.statement(), signer))
    return done(f"enrolled: {out}", {**made.fields(), "tpm": str(made.tpm)}, as_json=as_json)


def _roots(paths: Sequence[Path]) -> list[Certificate]:
    return [parse_root(_read(path, CHAIN_LIMIT), what=str(path)) for path in paths]


def _moment(at: int | None) -> int:
    return int(time.time()) if at is None else at


def _read(path: Path, limit: int) -> bytes:
    return read_whole(path, limit=limit, what="a file of an enrolment")
