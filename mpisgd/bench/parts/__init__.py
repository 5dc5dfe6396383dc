"""Shared by the benches: cases, loops, launches, the shape of their files."""
