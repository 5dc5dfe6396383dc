"""Commands. `main` returns the exit status. Raises MpisgdError: a refusal; SystemExit: tyro's usage and help."""
