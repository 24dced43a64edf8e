"""model.sig: which files make up a model, signed (OpenSSF Model Signing v1.0, method ``key``, serialization ``files``).

    signature = sign_model(Manifest({"model.safetensors": sha256}), "my-model", key)
    parse_model_signature(data).verify(found_manifest, [public_key])

A Sigstore bundle v0.3 in JSON around a DSSE envelope around an in-toto statement. Its *root digest*, SHA-256 over the
files' digests in the order of their names, is what every other statement about the model names as its subject.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tallystick.commit.encoding import HASH_BYTES, canonical_json, parse_hex, parse_json
from tallystick.errors import InvalidInput, Mismatch
from tallystick.signing.dsse import (
    ENVELOPE_LIMIT,
    PAYLOAD_TYPE,
    Envelope,
    Statement,
    Subject,
    envelope_of,
    known_fields,
    pre_authentication_encoding,
)
from tallystick.signing.keys import ED25519, PublicKey, Signer

PREDICATE_TYPE = "https://model_signing/signature/v1.0"
MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
SIGNATURE_FILE = "model.sig"
EXCLUDED = (".git", ".gitattributes", ".github", ".gitignore")  # at the top only, as the format demands


@dataclass(frozen=True)
class Manifest:
    """The files of a model: path below its directory, with ``/``, to the SHA-256 of the contents in hexadecimal.

    Raises:
        InvalidInput: no file, a path that is not plain and relative, or a malformed digest.
    """

    files: Mapping[str, str]

    def __post_init__(self) -> None:
        if not self.files:
            raise InvalidInput("model: has no file")
        for name, found in self.files.items():
            parts = name.split("/")
            if any(part in ("", ".", "..") for part in parts) or "\0" in name:
                raise InvalidInput(f"model: file name {name[:80]!r} must be a plain relative path")
            parse_hex(found, n_bytes=HASH_BYTES, what=f"model: digest of {name[:80]!r}")

    def root_digest(self) -> str:
        """Return the SHA-256 over the files' digests in the order of their names, in hexadecimal."""
        return hashlib.sha256(
            b"".join(bytes.fromhex(self.files[name]) for name in sorted(self.files))
        ).hexdigest()


@dataclass(frozen=True)
class ModelSignature:
    """A parsed model.sig; nothing of it is verified.

    Attributes:
        envelope: with the statement.
        hint: which key, as the signer says: SHA-256 of its PEM text; None in older files.
    """

    envelope: Envelope
    hint: str | None

    def manifest(self, keys: Sequence[PublicKey], *, what: str = SIGNATURE_FILE) -> Manifest:
        """Return the signed manifest, if one of ``keys`` signed it.

        Raises:
            Mismatch: none did, or the subject is not the root digest of the files.
            InvalidInput: not an OMS statement with whole files hashed by SHA-256.
        """
        return _manifest(self.envelope.open(keys, what=what), what)

    def verify(self, found: Manifest, keys: Sequence[PublicKey]) -> None:
        """Return if ``found`` has exactly the files that one of ``keys`` signed.

        Raises:
            Mismatch: a file is missing, added or changed (the first in the order of names is named), or no key signed.
        """
        signed = self.manifest(keys)
        for name in sorted({*signed.files, *found.files}):
            stated, own = signed.files.get(name), found.files.get(name)
            if stated != own:
                raise Mismatch(
                    f"model: file {name[:200]!r} has SHA-256 {own or 'none, it is missing'}, "
                    f"signed is {stated or 'none, it was added'}",
                    where=f"model: file {name[:200]!r}",
                    own=own,
                    stated=stated,
                )


def sign_model(manifest: Manifest, name: str, signer: Signer) -> bytes:
    """Return model.sig for ``manifest``; ``name`` is the model's, for people.

    Raises:
        InvalidInput: an Ed25519 key, which the format does not know.
    """
    key = signer.public_key
    if key.algorithm == ED25519:
        raise InvalidInput(
            f"key {key.key_id[:16]}..: OpenSSF Model Signing knows no {ED25519}; make one with "
            "tally key generate --algorithm ecdsa-p256"
        )
    payload = _statement(manifest, name).encode()
    signature = signer.sign(pre_authentication_encoding(PAYLOAD_TYPE, payload))
    # The format identifies keys by the bundle's hint, so the envelope names none.
    envelope = Envelope(PAYLOAD_TYPE, payload, (("", signature),))
    return canonical_json(
        {
            "dsseEnvelope": envelope.fields(),
            "mediaType": MEDIA_TYPE,
            "verificationMaterial": {"publicKey": {"hint": key_hint(key)}, "tlogEntries": []},
        }
    )


def key_hint(key: PublicKey) -> str:
    """Return the hint by which the reference implementation names a key: SHA-256 of its PEM text."""
    return hashlib.sha256(key.pem()).hexdigest()


def parse_model_signature(data: bytes, *, what: str = SIGNATURE_FILE) -> ModelSignature:
    """Return the signature in ``data``; the method must be ``key``.

    Raises:
        InvalidInput: not a Sigstore bundle v0.3 with a public key and one signature.
    """
    value = parse_json(data, what=what, limit=ENVELOPE_LIMIT)
    fields = known_fields(value, ("mediaType", "verificationMaterial", "dsseEnvelope"), what=what)
    fields.constant("mediaType", MEDIA_TYPE)
    material = known_fields(
        fields.value("verificationMaterial"), ("publicKey",), what=f"{what}: verificationMaterial"
    )
    key = known_fields(
        material.value("publicKey"), (), what=f"{what}: publicKey", optional=("hint", "rawBytes")
    )
    envelope = envelope_of(fields.value("dsseEnvelope"), what=what)
    if len(envelope.signatures) != 1:
        raise InvalidInput(f"{what}: must have one signature, has {len(envelope.signatures)}")
    return ModelSignature(envelope, key.optional_text("hint"))


def _statement(manifest: Manifest, name: str) -> Statement:
    resources = [
        {"algorithm": "sha256", "digest": manifest.files[file], "name": file}
        for file in sorted(manifest.files)
    ]
    serialization = {
        "allow_symlinks": False,
        "hash_type": "sha256",
        "ignore_paths": [*EXCLUDED, SIGNATURE_FILE],
        "method": "files",
    }
    subject = Subject(name or "model", {"sha256": manifest.root_digest()})
    return Statement((subject,), PREDICATE_TYPE, {"resources": resources, "serialization": serialization})


def _manifest(statement: Statement, what: str) -> Manifest:
    if statement.predicate_type != PREDICATE_TYPE:
        raise InvalidInput(
            f"{what}: predicateType must be {PREDICATE_TYPE}, is {statement.predicate_type[:80]!r}"
        )
    predicate = known_fields(statement.predicate, ("resources", "serialization"), what=f"{what}: predicate")
    names = ("method", "hash_type", "allow_symlinks")
    how = known_fields(
        predicate.value("serialization"), names, what=f"{what}: serialization", optional=("ignore_paths",)
    )
    how.constant("method", "files")
    how.constant("hash_type", "sha256")
    if how.boolean("allow_symlinks"):
        raise InvalidInput(f"{what}: follows symbolic links, which this verifier does not")
    files: dict[str, str] = {}
    for item in predicate.items("resources"):
        resource = known_fields(item, ("name", "digest", "algorithm"), what=f"{what}: resource")
        resource.constant("algorithm", "sha256")
        if (name := resource.text("name")) in files:
            raise InvalidInput(f"{what}: file {name[:80]!r} stands there twice")
        files[name] = resource.text("digest")
    if list(files) != sorted(files):
        raise InvalidInput(f"{what}: the files must be in the order of their names")
    manifest = Manifest(files)
    stated = statement.subject[0].digest.get("sha256") if len(statement.subject) == 1 else None
    if stated != manifest.root_digest():
        raise Mismatch(
            f"{what}: the subject is {stated}, the files' root digest is {manifest.root_digest()}",
            where=what,
            own=manifest.root_digest(),
            stated=stated,
        )
    return manifest
