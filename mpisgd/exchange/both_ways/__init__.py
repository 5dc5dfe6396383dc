"""Push and pull at the same time."""
