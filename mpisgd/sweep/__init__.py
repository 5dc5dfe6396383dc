"""Sweeps: a grid or a list of settings from one file, each a run of its own, and what became of each.

`elements` reads the file, `outcomes` the directory that comes of it.
"""
