"""Checkpoints and snapshots of a shard: written beside training, read to go on."""
