"""The commands that show what runs have done: report, compare, timeline."""
