"""What recording, auditing, disputing and monitoring cost: the commands ``tally bench ...``."""
