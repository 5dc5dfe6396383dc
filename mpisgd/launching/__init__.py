"""Ranks started from a process that is no rank.

`under_way`: a start by this machine's launcher; `job`: `mpisgd run`; `function`: `mpisgd.launch`; `called`: its ranks.
"""
