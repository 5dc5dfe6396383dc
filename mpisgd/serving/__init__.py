"""Parts of a shard's loop beside the rules."""
