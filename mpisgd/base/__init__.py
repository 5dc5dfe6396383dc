"""What everything may use: errors and checks, named randomness, files that last, the objects that a user names."""
