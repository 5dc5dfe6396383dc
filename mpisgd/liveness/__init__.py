"""Whether all ranks live and answer, and how a job ends when one does not."""
