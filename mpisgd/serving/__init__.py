"""What the loop of a shard is made of besides the rules: answers, snapshots, faults, refusals."""
