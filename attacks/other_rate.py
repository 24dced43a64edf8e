"""Raises the learning rate by half in one step and claims the honest rate."""

from stage import main, run_cheat

attack = run_cheat("other_rate", verdicts={"mismatch", "log_violation"})

if __name__ == "__main__":
    main(attack, __doc__)
