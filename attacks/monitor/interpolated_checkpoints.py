"""Declares checkpoints that lie on a straight line between the first weights and the last: nothing was trained between."""

from scene import EVERY, STEPS, Scene, caught, interpolate, lose_logs, main

from tallystick.fleet.provenance.verification import RATIO_LIMIT
from tallystick.testing.attacks import must


def attack(scene: Scene) -> str:
    borders = list(range(0, STEPS + 1, EVERY))
    honest = scene.trained()
    forged = scene.trained("forged")
    interpolate(forged, borders)
    exact = [scene.replayer(forged).repeat(a, a + EVERY).verdict for a in borders[:-1]]
    must(set(exact) == {"mismatch"}, f"repeated under the logs: {exact}")
    lose_logs(forged)
    lose_logs(honest)
    ratios = [scene.replayer(forged).repeat(a, a + EVERY).ratio or 0.0 for a in borders[:-1]]
    control = [scene.replayer(honest).repeat(a, a + EVERY) for a in borders[:-1]]
    must(all(o.verdict == "match" for o in control), f"the honest run without its logs: {control}")
    must(min(ratios) > RATIO_LIMIT, f"ratios {ratios}")
    return caught(
        f"repetition: all {len(exact)} segments differ under their logs; without logs the ratio test finds {min(ratios):.2f} "
        f"to {max(ratios):.2f} (limit {RATIO_LIMIT}, the honest run at most {max(o.ratio or 0.0 for o in control):.1e})"
    )


if __name__ == "__main__":
    main(attack, __doc__)
