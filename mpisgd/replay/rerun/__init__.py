"""The run made again by its own loops, in the order of its log."""
