"""Gradients into an optimiser step on a slice."""
