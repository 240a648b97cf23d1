"""``infprof workload serve``: an OpenAI-compatible server over the workload's engine.

Policies (``rate_limit``, ``waiting_line``, ``admission``) know neither HTTP nor the device; ``engine_thread`` drives the
engine by them; ``app`` speaks HTTP; ``serving`` puts all together.
"""
