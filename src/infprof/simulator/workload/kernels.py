"""The kernels of a forward pass: what each computes and moves by its shapes, and so how long it takes on a GPU.

Kernels are those of a serving engine (fused norms, paged attention), one per operation; FLOPs count 2 per multiply-add,
bytes each operand once. A kernel takes the GPU's fixed time plus the longer of its FLOPs and its bytes at the rates that
such kernels reach.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from infprof.simulator.operators import Operator, parse_operator
from infprof.simulator.spec import Collective, Copy, Kernel
from infprof.simulator.workload.gpus import Gpu
from infprof.simulator.workload.kernel_names import KernelNames
from infprof.workload.presets import ModelShape

KERNEL_CLASSES = ("gemm", "attention", "norm", "rotary", "cache", "activation", "embedding", "sampling", "check")
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_SPEC_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
# Attention reaches less of the arithmetic peak than matrix products do.
_ATTENTION_REACHED = 0.75
# Few rows leave a matrix product's tiles half empty, and float32 runs outside the tensor cores.
_ISSUE = {"gemm": 30.0, "attention": 40.0, "small": 25.0}
COMPUTE_STREAM, COPY_STREAM = 7, 13


@dataclass(frozen=True)
class Batch:
    """What a step computes, as far as kernels depend on it.

    ``rows``: tokens of the forward pass, padding included; ``prefills``: (tokens, tokens before them) of each prompt;
    ``contexts``: the tokens that each decoding request attends to, padding as 1; ``sampled``: rows that get a next token.
    """

    rows: int
    prefills: tuple[tuple[int, int], ...]
    contexts: tuple[int, ...]
    sampled: int


@dataclass(frozen=True, eq=False)
class ModelKernels:
    """One rank's share of a model on a GPU. ``pieces`` cuts every matrix product; ``factors`` change a class's times."""

    shape: ModelShape
    gpu: Gpu
    dtype: str
    ranks: int = 1
    pieces: int = 1
    factors: dict[str, float] = field(default_factory=dict)

    @cached_property
    def names(self) -> KernelNames:
        return KernelNames(self.gpu.arch, self.dtype)

    @property
    def element(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def layer_bytes(self) -> int:
        """Weights of a layer on this rank."""
        return self.shape.layer_parameters * self.element // self.ranks

    def before(self, batch: Batch) -> list[Kernel]:
        """What comes before the first layer."""
        size, hidden = batch.rows * self.shape.hidden * self.element, self.shape.hidden
        table = f"{self._type}[{self.shape.vocabulary}, {hidden}], i64[{batch.rows}], -1, False, False"
        op = f"aten::embedding({table})"
        return [self._kernel("embedding", self.names.embedding, 2 * size, (), grid=batch.rows, op=op)]

    def layer(self, batch: Batch) -> list[Kernel | Collective]:
        """One layer, with the sums over ranks where there are several."""
        s, rows, tp = self.shape, batch.rows, self.ranks
        heads, kv_heads, inner = s.heads // tp, max(1, s.kv_heads // tp), s.intermediate // tp
        query, key = heads * s.head_size, kv_heads * s.head_size
        gathered: list[Kernel | Collective] = [Collective("allreduce", rows * s.hidden * self.element, COMPUTE_STREAM)]
        sums = gathered if tp > 1 else []
        return [
            self._norm(rows),
            *self.product(rows, s.hidden, query + 2 * key),
            self._rotary(rows, query, key),
            self._cache(rows, kv_heads),
            *self._attention(batch, heads, kv_heads),
            *self.product(rows, query, s.hidden),
            *sums,
            self._norm(rows),
            *self.product(rows, s.hidden, 2 * inner),
            self._activation(rows, inner),
            *self.product(rows, inner, s.hidden),
            *sums,
        ]

    def after(self, batch: Batch) -> list[Kernel | Collective]:
        """The last norm and the logits of the rows that are sampled."""
        items: list[Kernel | Collective] = [self._norm(batch.rows)]
        if batch.sampled:
            items += self.product(batch.sampled, self.shape.hidden, self.shape.vocabulary // self.ranks)
            if self.ranks > 1:
                size = batch.sampled * self.shape.vocabulary * self.element
                items.append(Collective("allgather", size, COMPUTE_STREAM))
        return items

    def sampling(self, rows: int) -> list[Kernel]:
        vocabulary = self.shape.vocabulary
        size = rows * vocabulary * self.element
        op = f"aten::argmax({self._type}[{rows}, {vocabulary}], -1, False)"
        return [self._kernel("sampling", self.names.argmax, size, (), grid=max(1, rows), op=op)]

    def check(self, rows: int) -> list[Kernel]:
        """Whether all values of a layer's output are finite."""
        size, what = rows * self.shape.hidden, f"[{rows}, {self.shape.hidden}]"
        blocks = -(-size // 2048)
        absolute = f"aten::abs({self._type}{what})"
        return [
            self._kernel("check", self.names.is_finite, 2 * size * self.element, (), grid=blocks, op=absolute),
            self._kernel("check", self.names.all_true, size, (), grid=blocks, op=f"aten::all(bool{what})"),
        ]

    def weights(self, pinned: bool, stream: int) -> Copy:
        """A layer's weights on their way from the host."""
        return Copy("h2d", self.layer_bytes, "pinned" if pinned else "pageable", False, stream)

    def product(self, rows: int, inner: int, columns: int) -> list[Kernel]:
        """Matrix product of [rows, inner] and [inner, columns], in as many pieces as asked for, put together again."""
        pieces = min(self.pieces, columns)
        kernels = []
        for piece in range(pieces):
            width = columns * (piece + 1) // pieces - columns * piece // pieces
            op = f"aten::mm({self._type}[{rows}, {inner}], {self._type}[{inner}, {width}].t)"
            size = (rows * inner + inner * width + rows * width) * self.element
            grid = -(-rows // 128) * -(-width // 64) if rows > 1 else -(-width // 16)
            work = (2.0 * rows * inner * width, self.gpu.device.flops_reached)
            kernels.append(self._kernel("gemm", self.names.gemm(rows), size, work, grid=grid, op=op))
        if pieces > 1:
            size = 2 * rows * columns * self.element
            kernels.append(self._kernel("gemm", self.names.concatenate, size, (), grid=pieces * 8))
        return kernels

    def _norm(self, rows: int) -> Kernel:
        hidden = self.shape.hidden
        what = f"{self._type}[{rows}, {hidden}]"
        op = f"_C::fused_add_rms_norm({what}, {what}, {self._type}[{hidden}], 1e-05)"
        return self._kernel("norm", self.names.norm, 4 * rows * hidden * self.element, (), grid=rows, op=op)

    def _rotary(self, rows: int, query: int, key: int) -> Kernel:
        t, size = self._type, self.shape.head_size
        table = f"{t}[{self.shape.context}, {size}]"
        op = f"_C::rotary_embedding(i64[{rows}], {t}[{rows}, {query}], {t}[{rows}, {key}], {size}, {table}, True)"
        moved = 2 * rows * (query + key) * self.element
        return self._kernel("rotary", self.names.rotary, moved, (), grid=rows, op=op)

    def _cache(self, rows: int, kv_heads: int) -> Kernel:
        t, size = self._type, self.shape.head_size
        what, blocks = f"{t}[{rows}, {kv_heads}, {size}]", f"{t}[4096, 16, {kv_heads}, {size}]"
        op = f"_C_cache_ops::reshape_and_cache_flash({what}, {what}, {blocks}, {blocks}, i64[{rows}], _, _, _)"
        moved = 4 * rows * kv_heads * size * self.element
        return self._kernel("cache", self.names.cache, moved, (), grid=rows, op=op)

    def _activation(self, rows: int, inner: int) -> Kernel:
        op = f"_C::silu_and_mul({self._type}[{rows}, {inner}], {self._type}[{rows}, {2 * inner}])"
        return self._kernel("activation", self.names.activation, 3 * rows * inner * self.element, (), grid=rows, op=op)

    def _attention(self, batch: Batch, heads: int, kv_heads: int) -> list[Kernel]:
        """One kernel for all prompts of the batch and one for all that decode, as engines launch them."""
        kernels = []
        for name, parts in (("prefill", batch.prefills), ("decode", tuple((1, c - 1) for c in batch.contexts))):
            if not parts:
                continue
            size, rows = self.shape.head_size, sum(count for count, _ in parts)
            # Query i of a part attends to all before the part and to itself and those before it within.
            pairs = sum(count * before + count * (count + 1) // 2 for count, before in parts)
            keys = sum(count + before for count, before in parts)
            flops = 4.0 * heads * size * pairs
            moved = (2 * rows * heads + 2 * keys * kv_heads) * size * self.element
            query, key = (f"{self._type}[{rows}, {n}, {size}]" for n in (heads, kv_heads))
            op = f"vllm::unified_attention_with_output({query}, {key}, {key}, {query}, _, _, _)"
            grid = -(-rows // 128) * heads if name == "prefill" else len(parts) * kv_heads * 4
            work = (flops, self.gpu.device.flops_reached * _ATTENTION_REACHED)
            title = self.names.attention(size, name == "decode")
            kernels.append(self._kernel("attention", title, moved, work, grid=grid, op=op))
        return kernels

    @property
    def _type(self) -> str:
        return _SPEC_TYPES[self.dtype]

    def _kernel(
        self,
        cls: str,
        name: str,
        moved: float,
        work: tuple[float, float] | tuple[()],
        *,
        grid: int,
        op: str | None = None,
    ) -> Kernel:
        """``moved`` bytes, and ``work``: FLOPs with the share of the peak that this kind reaches."""
        device, peak = self.gpu.device, self.gpu.flops[self.dtype]
        flops, reached = work or (0.0, 1.0)
        seconds = max(flops / (peak * reached), moved / (device.bandwidth * device.bandwidth_reached))
        time_ns = device.kernel_floor_ns + round(seconds * 1e9 * self.factors.get(cls, 1.0))
        share = 100 * flops / peak / (time_ns / 1e9)
        if self.dtype == "float32" or "gemv" in name:
            counters = {"tensor": 0.0, "sm_issue": min(95.0, max(share, _ISSUE["small"]))}
        else:
            counters = {"sm_issue": min(_ISSUE.get(cls, _ISSUE["small"]), 90.0)}
        operators: tuple[Operator, ...] = (parse_operator(op, name),) if op else ()
        return Kernel(
            name=name,
            time_ns=time_ns,
            flops=flops,
            bytes=moved,
            grid=(max(1, grid), 1, 1),
            block=(128 if cls in ("attention", "gemm") else 256, 1, 1),
            counters=counters,
            operators=operators,
        )
