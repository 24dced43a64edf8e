"""Rounding, measuring and updating in compiled kernels: C for CPUs, Triton for CUDA devices.

Bit-equal to :mod:`tallystick.numerics.reference`, which is the definition; the tests run all forms on one body.
"""
