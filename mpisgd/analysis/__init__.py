"""Numbers from a run's log, as tables: how stale, how fast, how well."""
