"""The workload's server inside the test's process: its engine can be looked into while real clients talk to it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import torch

from infprof.workload.engine import Engine
from infprof.workload.presets import ModelShape
from infprof.workload.server.serving import PolicyOptions, ServeOptions, WorkloadServer, engine_settings, listening

# Small enough for a millisecond per step, with room for the special tokens in its vocabulary.
SHAPE = ModelShape(vocabulary=300, hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, context=4096)
MODEL = "infprof-tiny"
DEADLINE_S = 60.0

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
LONG = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}


class Bench:
    """A running server, its engine, and clients for it. ``said`` is what it told its user."""

    def __init__(self, engine: Engine, server: WorkloadServer, url: str, said: list[str]) -> None:
        self.engine, self.server, self.url, self.said = engine, server, url, said
        self.stop: Callable[[], None] = lambda: None
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=DEADLINE_S)

    def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=headers, timeout=DEADLINE_S, trust_env=False)

    def metric(self, name: str, **labels: str) -> float:
        """A sample of /metrics: the one that has these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        text = httpx.get(f"{self.url}/metrics", timeout=DEADLINE_S, trust_env=False).text
        found = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert len(found) == 1, (name, labels, found)
        return float(found[0])

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that other threads bring about."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "it never happened"
            threading.Event().wait(0.005)

    def is_empty(self) -> bool:
        """Nobody runs or waits, and every block is free."""
        stats, snapshot = self.engine.stats(), self.server.service.engine.snapshot()
        self.engine.check_blocks()
        return stats.running_requests + stats.waiting_requests + snapshot.waiting == 0 and (
            stats.free_kv_blocks == stats.kv_blocks
        )


@contextmanager
def served(policies: PolicyOptions | None = None, **options: Any) -> Iterator[Bench]:
    """A server for the block's time. It must end gracefully, without a request or a block left over."""
    asked = ServeOptions(port=0, dtype="float64", policies=policies or PolicyOptions(), **options)
    settings, repeat_prompt = engine_settings(asked, SHAPE, "cpu")
    engine = Engine(SHAPE, replace(settings, block_size=4))
    said: list[str] = []
    with listening("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = WorkloadServer(asked, engine, repeat_prompt, said.append)
        bench = Bench(engine, server, url, said)
        loop = asyncio.new_event_loop()
        ended: list[BaseException | None] = []

        def run() -> None:
            try:
                loop.run_until_complete(server.run(listener))
                ended.append(None)
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=run, name="server")
        thread.start()
        bench.stop = lambda: None if ended else _tell(loop, server)
        try:
            bench.until(lambda: any("serving" in text for text in said) or bool(ended))
            yield bench
        finally:
            bench.stop()
            thread.join(DEADLINE_S)
            loop.close()
        assert not thread.is_alive()
        if ended[0] is not None:
            raise ended[0]
        assert bench.is_empty()


def _tell(loop: asyncio.AbstractEventLoop, server: WorkloadServer) -> None:
    loop.call_soon_threadsafe(server.stop)


def held_open(bench: Bench, **fields: Any) -> Any:
    """A streamed request of which the first token has come."""
    stream = bench.client.completions.create(prompt="x", stream=True, **{**GREEDY, **LONG, **fields})
    next(iter(stream))
    return stream


@contextmanager
def one_thread() -> Iterator[None]:
    """Small tensors; more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
