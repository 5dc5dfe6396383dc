"""Help for a cluster: the check of a machine, which launcher fits, the nodes and ranks of a job; `scripts` has batch scripts."""
