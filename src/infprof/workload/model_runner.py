"""Runs steps on the device: eagerly, or decode steps in fixed shapes and as CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from infprof.errors import InfprofError
from infprof.workload.batch import Batch, PackedStep, pack, to_device
from infprof.workload.kv_cache import KvCache
from infprof.workload.model import Model
from infprof.workload.planning import padded, padded_sizes
from infprof.workload.presets import ModelShape
from infprof.workload.sampling import choose
from infprof.workload.scheduler import Step
from infprof.workload.settings import EngineSettings
from infprof.workload.spans import span

# Of the free memory once the weights are there; the rest is for activations and graphs.
_KV_MEMORY_RATIO = 0.8


@dataclass(frozen=True)
class Prepared:
    """A step made ready: nothing in it changes any more. ``is_static``: its shape is one of the fixed ones."""

    step: Step
    packed: PackedStep
    is_static: bool


@dataclass
class _StaticDecode:
    """Decode of one fixed shape: the buffer that holds its numbers, its logits, and the graph where there is one."""

    buffer: Tensor
    batch: Batch
    logits: Tensor | None = None
    graph: Any = None


class ModelRunner:
    """The model with its KV cache on one device.

    Raises InfprofError where the device's memory does not hold the weights and a cache for one request.
    """

    def __init__(self, shape: ModelShape, settings: EngineSettings) -> None:
        self.settings = settings
        self.device = torch.device(settings.device)
        self.dtype = _dtype(settings)
        self._uses_graphs = settings.cuda_graphs and self.device.type == "cuda"
        self._static: dict[tuple[int, int], _StaticDecode] = {}
        self._pool: Any = None
        self.graph_replays = 0
        try:
            with torch.inference_mode():
                self._check_weights(shape)
                self._model = Model(shape, settings, self.dtype)
                self.block_count = settings.kv_blocks or self._affordable_blocks(shape)
                self._cache = KvCache(shape, self.block_count, settings.block_size, self.dtype, self.device)
        except torch.cuda.OutOfMemoryError:
            raise self._too_small(shape) from None

    def _check_weights(self, shape: ModelShape) -> None:
        """On the CPU nothing else says no before the machine swaps; offloaded weights of a GPU stay out of the sum."""
        if self.device.type == "cpu" and shape.parameters * self.dtype.itemsize > _free_bytes(self.device):
            raise self._too_small(shape)

    def _affordable_blocks(self, shape: ModelShape) -> int:
        settings = self.settings
        per_request = -(-settings.context // settings.block_size)
        block = shape.kv_bytes_per_token(self.dtype.itemsize) * settings.block_size
        affordable = int(_free_bytes(self.device) * _KV_MEMORY_RATIO) // block
        if affordable <= per_request:
            raise self._too_small(shape)
        return min(settings.max_batch * per_request + 1, affordable)

    def _too_small(self, shape: ModelShape) -> InfprofError:
        weights = shape.parameters * self.dtype.itemsize / 1e9
        cache = shape.kv_bytes_per_token(self.dtype.itemsize) * self.settings.context / 1e9
        return InfprofError(
            f"{_free_bytes(self.device) / 1e9:.1f} GB of free memory do not hold the model ({weights:.1f} GB) and a KV "
            f"cache for one request ({cache:.1f} GB): choose a smaller --preset, or shorter requests."
        )

    def prepare(self, step: Step) -> Prepared:
        """Everything of a step that depends on requests, as plain numbers: quick, to be called under the lock."""
        with span("workload: prepare"):
            fixed = self._fixed_shape(step)
            return Prepared(step, pack(step, self.settings.block_size, *fixed), bool(fixed))

    def execute(self, prepared: Prepared) -> list[int]:
        """Compute a step. Returns the next token of each chunk that reaches the end of its request, in their order."""
        packed = prepared.packed
        with torch.inference_mode():
            with span(f"workload: {prepared.step.kind}"):
                logits = self._replay(packed) if prepared.is_static else self._eager(packed)
            with span("workload: sample"):
                return choose(logits, packed.draws, self.settings.host_sampling) if packed.draws else []

    def warm_up(self) -> None:
        """Capture the graphs of all shapes that decode steps can have; nothing where there are none."""
        if not self._uses_graphs:
            return
        with torch.inference_mode(), span("workload: capture"):
            for rows in padded_sizes(self.settings.max_batch):
                for width in padded_sizes(-(-self.settings.context // self.settings.block_size)):
                    self._static_decode(rows, width)

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _fixed_shape(self, step: Step) -> tuple[int, int] | tuple[()]:
        """Rows and blocks per request that a decode step is padded to; empty where it runs as it is."""
        if step.kind != "decode" or not (self._uses_graphs or self.settings.static_decode):
            return ()
        widest = max(len(chunk.request.blocks) for chunk in step.decodes)
        return padded(len(step.decodes), self.settings.max_batch), padded(widest, self.block_count)

    def _eager(self, packed: PackedStep) -> Tensor:
        batch = Batch(packed, to_device(packed.numbers, self.device), self._cache)
        hidden = self._model.forward(batch.ids, batch.positions, batch.attend)
        return self._model.logits(hidden[batch.sampled])

    def _replay(self, packed: PackedStep) -> Tensor:
        static = self._static_decode(packed.decode_count, packed.width)
        # A padded step also names the rows to sample; in fixed buffers all rows are computed and the first are taken.
        to_device(packed.numbers[: packed.sampled.start], self.device, into=static.buffer)
        if static.graph is None:
            logits = self._decode(static)
        else:
            static.graph.replay()
            self.graph_replays += 1
            logits = static.logits
        return logits[: len(packed.draws)]

    def _decode(self, static: _StaticDecode) -> Tensor:
        batch = static.batch
        return self._model.logits(self._model.forward(batch.ids, batch.positions, batch.attend))

    def _static_decode(self, rows: int, width: int) -> _StaticDecode:
        """The fixed buffers of a shape, made and captured at its first use."""
        static = self._static.get((rows, width))
        if static is None:
            empty = pack(Step((), ()), self.settings.block_size, rows, width)
            buffer = to_device(empty.numbers, self.device)
            static = self._static[rows, width] = _StaticDecode(buffer, Batch(empty, buffer, self._cache))
            if self._uses_graphs:
                self._capture(static)
        return static

    def _capture(self, static: _StaticDecode) -> None:
        """Record the kernels of a shape. Runs before on another stream load modules and fill the libraries' workspaces,
        which may not happen during a capture."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._decode(static)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        static.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(static.graph, pool=self._pool):
            static.logits = self._decode(static)
        self._pool = self._pool or static.graph.pool()


def _free_bytes(device: torch.device) -> int:
    """Memory of the device that nobody uses."""
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    return int(torch.cuda.mem_get_info(device)[0])


def _dtype(settings: EngineSettings) -> torch.dtype:
    name = settings.dtype or ("bfloat16" if torch.device(settings.device).type == "cuda" else "float32")
    return {
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float32": torch.float32,
        "float64": torch.float64,
    }[name]
