"""Directory of a run: lock, files, end in DONE."""
