"""The format of a recorded run: its documents, transcript, proofs, and what parties state about it; pure."""
