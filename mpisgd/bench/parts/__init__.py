"""Parts of the benches."""
