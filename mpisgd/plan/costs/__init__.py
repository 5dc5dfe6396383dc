"""Costs of a run, fitted from its log for a virtual cluster."""
