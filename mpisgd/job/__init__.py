"""A real job from a configuration: roles, start, resume, signals, end."""
