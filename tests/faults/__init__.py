"""Campaigns of faults: `python -m tests.faults.flips --count 1000 --seed 1 --out results/faults`."""
