"""Tools of every room: errors and checks, named randomness, files that last, the user's objects by name, a rank's words."""
