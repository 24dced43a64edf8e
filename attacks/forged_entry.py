"""Logs a rounding of an element far from any boundary, to move a weight."""

from stage import main, run_cheat

attack = run_cheat("forged_entry", verdicts={"log_violation"})

if __name__ == "__main__":
    main(attack, __doc__)
