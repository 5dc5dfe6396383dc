"""Gradients into an optimiser step on one slice."""
