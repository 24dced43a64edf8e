"""Shows the evidence of another, genuine accelerator for a log that a chip without one writes."""

from scene import Scene, caught, main

from tallystick.fleet.agent.chip_log import ChipHead
from tallystick.fleet.attestation.spdm import DeviceQuestion, device_nonce, verify_device
from tallystick.signing.keys import generate_key
from tallystick.testing.attacks import must, must_refuse
from tallystick.testing.devices import NOW, FakeMaker


def attack(scene: Scene) -> str:
    del scene
    maker, key, head = FakeMaker("maker"), generate_key("ecdsa-p384").public_key, ChipHead(9, bytes(48))
    mine, genuine = maker.device("0001"), maker.device("0002")
    ueid = verify_device(mine.answer(bytes(32)), DeviceQuestion(maker.root, bytes(32), NOW)).ueid
    asked = device_nonce(ueid, key, head, b"reader")
    question = DeviceQuestion(maker.root, asked, NOW)
    must(verify_device(mine.answer(asked), question).ueid == ueid, "the chip's own device is refused")
    other = verify_device(genuine.answer(asked), question)
    must(other.ueid != ueid, "another device passes for the chip's own")
    stale = must_refuse(lambda: verify_device(mine.answer(bytes(32)), question), naming="answers nonce")
    return caught(
        f"the UEID: a log names the device whose key it was made with, the other is {other.ueid.hex()[:12]}..; an old answer by "
        f"its nonce ({stale.split(': ', 2)[2][:60]}). Limit: the chip's own device answers for whoever asks it: it is "
        "there and genuine, never that the log's snapshots are of its memory"
    )


if __name__ == "__main__":
    main(attack, __doc__)
