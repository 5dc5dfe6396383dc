"""Training on a virtual cluster: `simulate` runs the loops of real ranks on virtual ranks, in virtual time (DESIGN 3).

`job.py` is the `job/run/` of virtual ranks; `world.py` has their parts, with time alone or with real gradients.
"""

from mpisgd.simulate.job import simulate

__all__ = ["simulate"]
