"""A run's directory: who may write it, what lies in it, when it is DONE."""
