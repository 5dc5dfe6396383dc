"""Decisions of a shard, in integers: verdicts, staleness weights, admission, membership, portions."""
