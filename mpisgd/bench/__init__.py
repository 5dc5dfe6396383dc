"""Benches of `mpisgd bench`: ratios on the user's machine, in one run."""
