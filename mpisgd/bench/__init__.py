"""Benches of `mpisgd bench`: ratios on the user's own machine, side by side, in one run."""
