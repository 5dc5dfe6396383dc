"""One rank of MPI's, from the agreement of all on a job to its end."""

from mpisgd.job.run.rank import run

__all__ = ["run"]
