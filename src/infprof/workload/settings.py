"""What a run of the workload is asked to do: the engine's settings and the requests it gets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineSettings:
    """How the engine runs. The defaults are those of a healthy run; the second half is there to spoil it.

    ``dtype`` None = bfloat16 on a GPU, float32 on the CPU. ``block_size`` and ``context`` count tokens. ``kv_blocks`` None
    = as many as ``max_batch`` requests of ``context`` tokens need, within the GPU's memory. ``step_tokens`` bounds what
    one step computes: longer prompts go in pieces, beside the decodes. ``cuda_graphs`` replays decode steps as graphs
    (GPU only); ``static_decode`` pads them to fixed shapes in fixed buffers as graphs need it, on any device.
    """

    device: str = "cpu"
    dtype: str | None = None
    seed: int = 0
    block_size: int = 16
    kv_blocks: int | None = None
    max_batch: int = 32
    step_tokens: int = 2048
    context: int = 2048
    cuda_graphs: bool = True
    static_decode: bool = False
    # Every matrix product in this many slices, each a kernel of its own.
    pieces: int = 1
    # Asks after each layer whether all values are finite, which waits for the device.
    check_layers: bool = False
    # Every n-th layer's weights stay in host memory and come over for each use; 0 = none.
    offload_every: int = 0
    offload_pinned: bool = True
    # The next token is chosen in Python from logits that are copied to the host.
    host_sampling: bool = False
    # Gives the caching allocator's memory back to the driver after each layer.
    empty_cache: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "max_batch", "step_tokens", "context", "pieces"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.step_tokens < self.max_batch:
            raise ValueError("step_tokens must leave each of max_batch requests a token")


@dataclass(frozen=True)
class RequestsSettings:
    """The requests of a run, all there at the start: lengths vary by a half around the means, so that they leave at
    different times and others join. Prompts are random tokens."""

    count: int = 32
    prompt_tokens: int = 128
    output_tokens: int = 64
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the largest request that can come of it."""
        return longest_of(self.prompt_tokens) + longest_of(self.output_tokens)


def longest_of(mean: int) -> int:
    """The largest length around a mean."""
    return mean + mean // 2


def shortest_of(mean: int) -> int:
    """The smallest length around a mean."""
    return max(1, mean - mean // 2)
