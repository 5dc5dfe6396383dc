"""Tables and figures of runs, for a terminal and for a folder."""
