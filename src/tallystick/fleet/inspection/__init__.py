"""An inspection from the drawn sample to its verdict."""
