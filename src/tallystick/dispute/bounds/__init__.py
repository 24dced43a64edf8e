"""How one element of each operator follows from its inputs, and how far honest arithmetic may be from it."""
