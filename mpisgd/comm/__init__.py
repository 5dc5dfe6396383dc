"""Communicator interface, vocabulary of messages, and signals; below: two worlds, MPI and virtual."""
