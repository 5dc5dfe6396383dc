"""Decisions of a shard, in integers: verdicts, staleness weights, admission, attendance, portions."""
