"""What `replay` says it proves, checks, and takes on trust, held to its word: each value is changed, with checksums made anew.

A value that is proved cannot be another by the least bit (norms by 1 %); one that is checked cannot be another by much; one on
trust can. Real runs are played by virtual ones that say they are real: their seconds are those of a job, and nothing simulates
them again.
"""
