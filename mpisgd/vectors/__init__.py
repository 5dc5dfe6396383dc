"""The model as one flat vector, its slices, and how a slice crosses to MPI."""
