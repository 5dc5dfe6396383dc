"""Is a log possible at all? Row by row, beside the rules that the shards followed."""
