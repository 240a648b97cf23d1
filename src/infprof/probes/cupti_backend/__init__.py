"""CUPTI, NVIDIA's own source of timelines, as the recorder of a run: for Python programs, on machines without nsys.

Experimental: not yet run on a GPU. ``CuptiBackend`` drives it from infprof; ``inside`` is what runs in the target;
``layout`` and ``decoding`` know CUPTI's records, ``recording`` puts together what a process left of them, and ``writing``,
with the tables of ``gpu_tables`` and ``host_tables``, makes an SQLite file of nsys's form of it.
"""

from infprof.probes.cupti_backend.backend import CuptiBackend

__all__ = ["CuptiBackend"]
