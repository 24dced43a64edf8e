"""What a stranger checks without repeating a step: runs, bundles, policies; needs no torch."""
