"""The rounding reference and its kernels, the rounding log, portable randomness."""
