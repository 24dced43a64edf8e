"""Trains one step on other data than the job's and claims the job's own."""

from stage import main, run_cheat

attack = run_cheat("other_data", verdicts={"mismatch"})

if __name__ == "__main__":
    main(attack, __doc__)
