"""What the protocols are made of: what a shard decides, verdicts, staleness rules, who is admitted; integers only."""
