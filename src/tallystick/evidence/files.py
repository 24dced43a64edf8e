"""Bundles and proofs as they lie on the disk, verified."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tallystick.commit.state import CHUNK_BYTES
from tallystick.dispute.terms import Party
from tallystick.errors import InvalidInput
from tallystick.evidence.bundle import BUNDLE_LIMIT
from tallystick.evidence.bundle_verifier import verify_bundle
from tallystick.evidence.policy import POLICY_LIMIT, parse_evidence_policy
from tallystick.evidence.recognition import recognise
from tallystick.evidence.run_verifier import verify_proof
from tallystick.evidence.verification import Verification
from tallystick.signing.keys import PublicKey
from tallystick.store.files import read_whole
from tallystick.store.models import read_manifest, unread_files

PROOF_LIMIT = 1 << 27  # bytes; a proof of a step has a few hundred
CHUNK_SUFFIX = ".chunk"  # of the file with the bytes that a chunk proof beside it speaks of


def verify_bundle_file(
    bundle: Path, policy: Path | None, model: Path | None, *, file: Path | None = None
) -> Verification:
    """Return the checks of the file ``bundle``, and whether ``file`` is the result that it speaks of.

    Raises:
        InvalidInput: it is no bundle, or the policy is malformed.
        StoreError: a file is not there or cannot be read.
    """
    if not (kind := recognise(bundle)).is_bundle:
        raise InvalidInput(f"bundle {bundle}: {kind}")
    rules = None
    if policy is not None:
        if policy.exists() and not policy.is_file():
            raise InvalidInput(f"policy {policy}: is not a regular file")
        text = read_whole(policy, limit=POLICY_LIMIT, what="a policy")
        rules = parse_evidence_policy(text, what=str(policy))
    files = None if model is None else read_manifest(model)
    data = read_whole(bundle, limit=BUNDLE_LIMIT, what="a bundle")
    unread = () if model is None else unread_files(model)
    now, name = int(time.time()), f"bundle {bundle}"
    return verify_bundle(data, rules, now=now, model=files, file=file, unread=unread, name=name)


def verify_proof_file(
    path: Path, root: bytes, *, chunk: Path | None = None, keys: Mapping[Party, PublicKey] | None = None
) -> Verification:
    """Return the checks of a proof's or a dispute record's file against ``root``; see ``verify_proof``.

    The chunk that a proof speaks of is looked for beside it where ``chunk`` names no file.

    Raises:
        InvalidInput: it is no proof, or its chunk is missing.
        StoreError: a file is not there or cannot be read.
    """
    beside = path.with_name(path.name + CHUNK_SUFFIX)
    given = chunk if chunk is not None else (beside if beside.exists() else None)
    return verify_proof(
        read_whole(path, limit=PROOF_LIMIT, what="a proof"),
        root,
        chunk=None if given is None else read_whole(given, limit=CHUNK_BYTES, what="a chunk"),
        keys=keys,
    )
