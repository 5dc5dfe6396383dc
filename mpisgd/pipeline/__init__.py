"""Learners as groups of ranks, a stage of the model each [Dean12 3]."""
