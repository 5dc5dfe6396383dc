"""Checks of a log, row by row, beside the shards' rules."""
