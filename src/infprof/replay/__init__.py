"""What a trace would have been with other costs: the gain of a fix, and what limits the run then (design: replay)."""
