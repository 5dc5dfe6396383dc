"""Costs of a run in seconds, fitted from its log, as a virtual cluster that runs as fast."""
