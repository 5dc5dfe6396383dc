"""Batch optimisation [Dean12 4.2]: a coordinator commands, shards keep vectors, learners evaluate."""
