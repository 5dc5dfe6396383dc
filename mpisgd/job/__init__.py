"""A job from a configuration: its parts, where its ranks are, each role built once for both worlds, its end."""
