"""Hardware counters from a DCGM exporter: rank A without a profiler, where a cluster runs one.

Only the profiling ratios (0-1) are read; they have the names of NVML's GPM metrics, which mean the same, with the label
``source``. An exporter repeats a value until it has a new one (every 30 s by default).
"""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from infprof.probes.gpu_signals import SIGNALS as GPU_SIGNALS
from infprof.probes.recorder import Recorder
from infprof.probes.serving.endpoint import get

USUAL_URL = "http://127.0.0.1:9400/metrics"

# Since DCGM 4 the fields have a second name, ending in _UTIL_RATIO.
_FIELDS = {
    "GR_ENGINE_ACTIVE": "gpm_graphics_active_ratio",
    "SM_ACTIVE": "gpm_sm_active_ratio",
    "SM_OCCUPANCY": "gpm_sm_occupancy_ratio",
    "PIPE_TENSOR_ACTIVE": "gpm_tensor_active_ratio",
    "PIPE_FP64_ACTIVE": "gpm_fp64_active_ratio",
    "PIPE_FP32_ACTIVE": "gpm_fp32_active_ratio",
    "PIPE_FP16_ACTIVE": "gpm_fp16_active_ratio",
    "PIPE_INT_ACTIVE": "gpm_integer_active_ratio",
    "DRAM_ACTIVE": "gpm_dram_ratio",
}
SIGNALS = {signal: GPU_SIGNALS[signal] for signal in _FIELDS.values()}
_PREFIX = "DCGM_FI_PROF_"
_LABELS = {"source": "dcgm"}


def is_dcgm(text: str) -> bool:
    """Whether a metrics text is that of a DCGM exporter."""
    return "DCGM_FI_" in text


class DcgmExporter:
    """One exporter, read once a second."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client, self.url = client, url

    def sample(self, out: Recorder) -> None:
        """Record the ratios of every GPU that the exporter watches; a failed read leaves a gap."""
        answer = get(self._client, self.url, text_only=True)
        if answer.status != 200:
            return
        now = out.now_ns()
        lines = [line for line in answer.text.split("\n") if line.startswith(_PREFIX)]
        if not lines:
            out.missing("gpm_sm_active_ratio", "the DCGM exporter is set up without the profiling fields", "dcgm")
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            signal = _FIELDS.get(family.name.removeprefix(_PREFIX).removesuffix("_UTIL_RATIO"))
            for sample in family.samples if signal else ():
                # A MIG slice has its own series beside those of the whole GPU.
                if sample.labels.get("UUID") and not sample.labels.get("GPU_I_ID"):
                    out.sample(str(signal), sample.value, f"gpu/{sample.labels['UUID']}", _LABELS, now)
