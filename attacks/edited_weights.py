"""Trains honestly and changes five weights of the final state."""

from stage import main, run_cheat

attack = run_cheat("edited_weights", verdicts={"mismatch"})

if __name__ == "__main__":
    main(attack, __doc__)
