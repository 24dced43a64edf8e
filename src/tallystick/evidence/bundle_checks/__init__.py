"""The numbered checks of a bundle (spec/evidence-bundle.md 4): what holds them in order is ``evidence.bundle_verifier``.

Each takes the facts that those before it established and returns what it saw, or None where only a policy would tell.
It raises InvalidInput where something is malformed and Mismatch where something does not fit.
"""
