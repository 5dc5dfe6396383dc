"""What a run costs in seconds, fitted from its log, as a virtual cluster that runs as fast."""
