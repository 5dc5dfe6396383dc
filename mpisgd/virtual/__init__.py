"""The virtual cluster: the loops of a real one on virtual ranks, in virtual nanoseconds, and what everything costs there."""
