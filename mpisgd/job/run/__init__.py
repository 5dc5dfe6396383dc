"""An MPI rank, from the agreement on a job to its end."""

from mpisgd.job.run.rank import run

__all__ = ["run"]
