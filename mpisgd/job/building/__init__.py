"""The roles of a job's ranks, each built once for both worlds: of MPI (`job/run/`) and virtual (`simulate/`)."""
