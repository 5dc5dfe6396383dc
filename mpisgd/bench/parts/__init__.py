"""What the benches share: cases, loops, launches, the shape of their files."""
