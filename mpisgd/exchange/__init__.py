"""Push and pull over any communicator."""
