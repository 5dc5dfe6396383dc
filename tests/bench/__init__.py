"""Benches that only the project runs: `python -m tests.bench WHAT`; those for a user are `mpisgd bench`."""
