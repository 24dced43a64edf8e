"""Claims that the trained weights which a chip logged are nothing but the random initialisation of a new run."""

from scene import Scene, caught, edit_checkpoint, main, weights

from tallystick.testing.attacks import must


def attack(scene: Scene) -> str:
    hidden = weights(scene.trained("hidden", data_seed="7").load_checkpoint(24))
    run = scene.trained("claimed")
    must(scene.replayer(run).initial_difference() == 0.0, "the honest first weights are not the job's own")
    edit_checkpoint(run, 0, hidden)
    share = scene.replayer(run).initial_difference()
    must(share > 0.9, f"{share} of the weights differ")
    first = scene.replayer(run).repeat(0, 4)
    must(first.verdict == "mismatch", f"the first segment: {first}")
    return caught(
        f"rule 107: {100 * share:.1f} % of the first weights are not those that the job's seed gives (honest: none); "
        f"the first segment does not go on from them either ({first.text.partition(':')[0]})"
    )


if __name__ == "__main__":
    main(attack, __doc__)
