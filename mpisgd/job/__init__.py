"""A job from a configuration: parts, places of ranks, roles built once for both worlds, end."""
