"""Has the attestation key of a TPM that the owner controls enrolled under the certificate of a genuine TPM's endorsement key."""

import tempfile
from dataclasses import replace
from pathlib import Path

from scene import Scene, caught, main

from tallystick.errors import StoreError
from tallystick.fleet.agent.chip_log import ChipHead
from tallystick.fleet.attestation.enrolment import (
    EnrolmentRequest,
    answer_to,
    challenge_request,
    enrol,
    enrolled_key,
    verify_request,
)
from tallystick.fleet.attestation.tpm import DECRYPT, RESTRICTED
from tallystick.integrations.tpm import (
    activate,
    attestation_key,
    endorsement_key,
    gather_evidence,
    make_tpm_key,
)
from tallystick.signing.keys import P256
from tallystick.testing.attacks import must, must_refuse
from tallystick.testing.devices import NOW
from tallystick.testing.software_tpm import missing_for_tpm, software_tpm
from tallystick.testing.tpm_makers import TpmMaker


def attack(scene: Scene) -> str:
    del scene
    if missing := missing_for_tpm():
        raise StoreError(f"this attack needs two software TPMs: {missing}")
    with (
        tempfile.TemporaryDirectory(prefix="tpm-") as folder,
        software_tpm(Path(folder) / "a") as genuine,
        software_tpm(Path(folder) / "b") as own,
    ):
        return _enrol(genuine, own)


def _enrol(genuine: str, own: str) -> str:
    maker, enroller = TpmMaker("maker"), "11" * 32
    chain, roots = maker.chain(endorsement_key(genuine)), [maker.root]

    def signed(request: EnrolmentRequest, at: str):
        verify_request(request, roots, at=NOW)
        challenge, kept = challenge_request(request)
        answer = answer_to(request.digest(), activate(at, P256, challenge.credential))
        return enrol(request, answer, kept, roots, at=NOW, revocation="not checked", enroller=enroller)

    mine, foreign = attestation_key(genuine), attestation_key(own)
    honest = signed(EnrolmentRequest(mine, chain), genuine)
    must(honest.attestation_key == mine, "the genuine TPM's own key is not enrolled")

    bad = EnrolmentRequest(foreign, chain)
    refused: list[str] = []
    for at in (genuine, own):  # neither has both keys
        try:
            signed(bad, at)
        except StoreError as problem:
            refused.append(str(problem))
    must(
        len(refused) == 2 and all("integrity check failed" in text for text in refused),
        f"the foreign key is enrolled, or refused for another reason: {refused}",
    )
    _, kept = challenge_request(bad)
    must_refuse(
        lambda: enrol(bad, answer_to(bad.digest(), bytes(32)), kept, roots, at=NOW, revocation="not checked", enroller=enroller),
        naming="the answer is not that of the TPM",
    )  # fmt: skip
    forged = EnrolmentRequest(foreign, TpmMaker("another").chain(endorsement_key(own)))
    must_refuse(lambda: verify_request(forged, roots, at=NOW), naming="is not signed by")
    for attributes in (
        mine.attributes & ~RESTRICTED,
        mine.attributes | DECRYPT,
    ):  # a key that signs whatever it is given
        loose = EnrolmentRequest(replace(mine, attributes=attributes), chain)
        must_refuse(lambda request=loose: verify_request(request, roots, at=NOW), naming="attributes are")
    chip = make_tpm_key(own)
    shown = gather_evidence(chip, ueid=bytes(17), head=ChipHead(1, bytes(48)), nonce=bytes(32))
    said = must_refuse(lambda: enrolled_key(honest, shown), naming="is of attestation key")
    return caught(
        "credential activation: no TPM reads the secret, as none has both keys (integrity check failed); another maker's "
        f"certificate by the pinned root; its evidence by the enrolment ({said.split(': ', 1)[1][:48]}..). Limit: the "
        "genuine TPM answers for whoever reaches it: in which machine it sits, an inspection says"
    )


if __name__ == "__main__":
    main(attack, __doc__)
