"""The real world: ranks that MPI has started; the only place that imports mpi4py."""
