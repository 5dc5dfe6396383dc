"""Push and pull over any communicator: the learner's end, the shard's end, by slices, by layers or by collectives."""
