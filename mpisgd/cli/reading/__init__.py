"""Commands that read runs: report, compare, timeline, replay, plan, export."""
