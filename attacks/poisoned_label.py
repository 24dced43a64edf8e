"""Changes one label of one batch (a backdoor needs no more) and claims the honest batch."""

from stage import main, run_cheat

attack = run_cheat("poisoned_label", verdicts={"mismatch", "log_violation"})

if __name__ == "__main__":
    main(attack, __doc__)
