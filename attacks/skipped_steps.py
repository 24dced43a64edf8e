"""Leaves out three optimizer steps and claims to have made them."""

from stage import main, run_cheat

attack = run_cheat("skipped_steps", verdicts={"mismatch", "log_violation"})

if __name__ == "__main__":
    main(attack, __doc__)
