"""The model of rings.py."""

from shapes.rates import LEARNING_RATE

__all__ = ["LEARNING_RATE"]
