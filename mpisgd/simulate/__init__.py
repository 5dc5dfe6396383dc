"""Training on a virtual cluster: `simulate` runs the loops of real ranks on virtual ones, in virtual time (DESIGN 3)."""

from mpisgd.simulate.job import simulate

__all__ = ["simulate"]
