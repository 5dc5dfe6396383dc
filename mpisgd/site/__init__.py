"""Help for a cluster: the check of a machine, and batch scripts."""
