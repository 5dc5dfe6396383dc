"""Both ends of learners doubling as shards: collectives over messages or shared memory."""
