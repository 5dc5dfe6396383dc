"""The run log: tables, each written by one rank, read by anybody."""
