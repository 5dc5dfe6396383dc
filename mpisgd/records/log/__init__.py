"""The run log: its tables, written by one rank each and read by anybody."""
