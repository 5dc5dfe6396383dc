"""Learners that are groups of ranks, each with one stage of the model [Dean12 3]: passes, what passes on, and pulls."""
