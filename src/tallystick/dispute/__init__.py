"""The games of a dispute, their records and verdicts; pure."""
