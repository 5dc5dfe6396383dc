"""Tools of every room."""
