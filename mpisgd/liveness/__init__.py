"""A watch over all ranks, and a job's end if any dies or hangs."""
