"""How often infprof is right: a labelled corpus, and the figures of its verdicts and rules on it.

    python -m benchmarks.accuracy                      # the whole corpus but the held-out part
    python -m benchmarks.accuracy --part ci            # a small, representative part
    python -m benchmarks.accuracy --part held-out      # seeds, devices and sizes kept apart: never look at single cases of it
    python -m benchmarks.accuracy --json figures.json

``labels`` is what a right answer is; ``sweep``, ``injected``, ``public`` and ``cases`` are the corpus, ``truth`` the
reckoning behind the labels of simulated runs; ``judging`` asks infprof, ``scoring`` counts. Run from the repository's
root.
"""
