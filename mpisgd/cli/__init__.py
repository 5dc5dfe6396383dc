"""The commands: each reads its words, calls the rest, and says what came of it.

Their `main` returns the exit status, and raises MpisgdError for what is refused; SystemExit is from tyro (usage, help).
"""
