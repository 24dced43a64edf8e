"""The dispatch mode that sees every operator of a step, and what it does with each."""
