"""The real world: ranks started by MPI; the only place that imports mpi4py."""
