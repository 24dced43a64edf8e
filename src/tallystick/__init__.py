"""Training runs of PyTorch models that somebody else can check, on other hardware, to the last bit."""

__version__ = "0.1.0"
