"""The command tally: parses, calls, answers; holds no rule."""
