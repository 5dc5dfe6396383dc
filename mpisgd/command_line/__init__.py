"""The words of a run's command line, read: its configuration, and what a command takes besides."""
