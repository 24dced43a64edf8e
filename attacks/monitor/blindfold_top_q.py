"""Makes the largest update honestly and interpolates all others: whoever repeats the largest alone sees an honest run."""

from scene import BEACON, EVERY, STEPS, Scene, caught, interpolate, main

from tallystick.commit.encoding import digest
from tallystick.fleet.provenance.verification import choose_segments
from tallystick.testing.attacks import must, must_refuse
from tallystick.testing.sampling_formulas import segments_to_check

DRAWS = 120


def attack(scene: Scene) -> str:
    run = scene.trained("forged")
    interpolate(
        run, list(range(EVERY, STEPS + 1, EVERY))
    )  # the first segment, the largest, stays as it was trained
    replayer = scene.replayer(run)
    changes = replayer.changes()
    largest = max(changes, key=lambda segment: changes[segment])
    must(largest == (0, EVERY), f"the largest update is {largest}")
    must(replayer.repeat(*largest).verdict == "match", "the largest update is not honest")
    root = replayer.transcript.root().hex()
    refusal = must_refuse(
        lambda: choose_segments(replayer.borders, run=root, beacon=BEACON, random_segments=0, largest=1),
        naming="must be random",
    )
    missed = 0
    for number in range(DRAWS):
        beacon = digest("attack/beacon", number.to_bytes(4, "little"))
        chosen = choose_segments(
            replayer.borders, run=root, beacon=beacon, random_segments=1, changes=changes, largest=1
        )
        missed += all((s.start, s.end) == largest for s in chosen)
    expected = DRAWS / 6
    must(abs(missed - expected) < 5 * (expected * 5 / 6) ** 0.5, f"{missed} of {DRAWS} draws miss")
    forged = [replayer.repeat(a, a + EVERY).verdict for a in (EVERY, STEPS - EVERY)]
    must(set(forged) == {"mismatch"}, f"forged segments: {forged}")
    return caught(
        f"random segments ({refusal.split(': ', 1)[1]}); one random segment of 6 finds one of the 5 forged in "
        f"{DRAWS - missed} of {DRAWS} draws; for a forged share of 1 % {segments_to_check(0.01, 0.99)} find it with 99 %"
    )


if __name__ == "__main__":
    main(attack, __doc__)
