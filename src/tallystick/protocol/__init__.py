"""The messages and rules that the parties share: transcript, trace, game, attestation; pure."""
