"""Serving engines for tests: a small HTTP server that speaks any of their shapes, and recordings made through it."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from infprof.probes.recorder import Clock, Recorder, TelemetryFile
from infprof.probes.serving import SIGNALS, EngineScraper, ServingProbe
from infprof.probes.serving.endpoint import Endpoint, new_client
from infprof.telemetry import Telemetry, read_telemetry

SECOND = 1_000_000_000
TEXT = "text/plain; version=0.0.4; charset=utf-8"
JSON = "application/json"
SSE = "text/event-stream"

Reply = tuple[int, str, str | bytes]
Route = Reply | Callable[[dict[str, Any]], Reply]


class Server:
    """Answers by path; what is not there is 404. ``routes`` may be changed at any time, ``asked`` counts the requests."""

    def __init__(self, routes: Mapping[str, Route]) -> None:
        self.routes: dict[str, Route] = dict(routes)
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        bench = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._reply({})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                bench.bodies.append(body)
                self._reply(body)

            def _reply(self, body: dict[str, Any]) -> None:
                bench.asked[self.path] += 1
                route = bench.routes.get(self.path, (404, JSON, '{"detail":"Not Found"}'))
                status, kind, text = route if isinstance(route, tuple) else route(body)
                data = text.encode() if isinstance(text, str) else text
                self.send_response(status)
                if status in (301, 307):
                    self.send_header("location", data.decode())
                    data = b""
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Server:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def models(owned_by: str, model: str = "m") -> Reply:
    """The answer of /v1/models."""
    return 200, JSON, json.dumps({"object": "list", "data": [{"id": model, "object": "model", "owned_by": owned_by}]})


class SetClock(Clock):
    """A clock that stands where the test puts it."""

    def __init__(self) -> None:
        super().__init__()
        self.at_ns = 1_000 * SECOND

    def now_ns(self) -> int:
        return self.at_ns


class Recording:
    """A telemetry file that is being written, with its clock."""

    def __init__(self, folder: Path) -> None:
        self.clock = SetClock()
        self.path = folder / "telemetry.sqlite"
        self.path.unlink(missing_ok=True)
        self._file = TelemetryFile(self.path, self.clock)
        self.out: Recorder = self._file.recorder("serving", ServingProbe.signals)

    def read(self) -> Telemetry:
        self._file.flush()
        return read_telemetry(self.path)

    def close(self) -> None:
        self._file.close()


@contextmanager
def recording(folder: Path) -> Iterator[Recording]:
    """A recording that is closed at the end."""
    made = Recording(folder)
    try:
        yield made
    finally:
        made.close()


def recorded(
    folder: Path, scrapes: Iterable[tuple[float, str | None]], facts: Mapping[str, Any] | None = None
) -> Telemetry:
    """What the scraper records of texts at the given seconds; None is a server that does not answer."""
    with recording(folder) as made, Server({}) as server, new_client() as client:
        endpoint = Endpoint(f"{server.url}/metrics", server.url, None, None, None, {})
        scraper = EngineScraper(client, endpoint)
        for name, value in (facts or {}).items():
            made.out.fact(name, value)
        for second, text in scrapes:
            server.routes["/metrics"] = (503, JSON, "{}") if text is None else (200, TEXT, text)
            made.clock.at_ns = round(second * SECOND)
            scraper.scrape(made.out)
        return made.read()


def held(texts: Iterable[str], seconds: float) -> list[tuple[float, str]]:
    """The texts spread over ``seconds``, each repeated every second until the next: a server that is read at 1 Hz."""
    texts = list(texts)
    steps = max(1, round(seconds))
    return [(float(s), texts[0] if s < steps else texts[-1]) for s in range(steps + 1)]


__all__ = ["JSON", "SECOND", "SIGNALS", "SSE", "TEXT", "Recording", "Server", "held", "models", "recorded", "recording"]
