"""Commands that show runs: report, compare, timeline."""
