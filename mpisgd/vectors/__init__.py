"""The model as one flat vector, its slices, and the memory in which they lie and cross to MPI."""
