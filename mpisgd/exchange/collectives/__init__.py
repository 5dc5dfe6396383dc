"""Both ends in one, where learners double as shards: collectives over messages, or memory that a node shares."""
