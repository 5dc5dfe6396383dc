"""A run's log, what needs no rerun to be seen in it, and the result of a replay."""
