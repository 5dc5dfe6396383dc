"""Help for a cluster: checks, launchers, nodes and ranks of a job; `scripts` has batch scripts."""
