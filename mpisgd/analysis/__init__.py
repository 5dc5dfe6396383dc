"""Tables from a run's log: staleness, speed, quality."""
