"""The commands: each reads its words, calls the rest, and says what came of it."""
