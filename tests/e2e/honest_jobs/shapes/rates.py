"""How fast."""

LEARNING_RATE = 0.003
