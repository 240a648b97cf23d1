"""Two runs beside each other: what got faster, what slower, why, and whether the what-if of the first foretold the second.

``runs.load_run`` makes a ``Run`` of a profile or of a stored diagnosis, ``comparing.compare`` a ``Comparison`` of two runs;
``gates`` judges it for CI, ``reports`` shows it.
"""
