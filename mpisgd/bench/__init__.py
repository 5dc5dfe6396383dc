"""What `mpisgd bench` measures on the user's own machine: ratios, side by side, in one run."""
