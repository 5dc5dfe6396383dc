"""A log that was tampered with is refused, and the first place that cannot be is named (DESIGN 4, law 6)."""
