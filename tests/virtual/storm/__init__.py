"""Faults in the virtual world: real loops, rules, wires and records on a virtual MPI, whose ranks die, hang and are cut off."""
