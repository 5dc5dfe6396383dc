"""Batch scripts from a configuration: what to ask of SLURM or LSF for its shards, learners and evaluator, and the script."""
