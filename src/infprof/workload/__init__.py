"""The reference inference workload: a small decoder-only transformer behind a paged KV cache and continuous batching.

A known patient for the diagnosis: ``faults`` creates each bottleneck on purpose and says what must be found.

``presets``, ``faults``, ``settings``, ``planning``, ``requests``, ``blocks`` and ``scheduler`` are plain Python; ``model``, ``sampling``,
``kv_cache``, ``batch``, ``model_runner``, ``engine`` and ``runner`` need PyTorch (the extra ``torch``).
"""
