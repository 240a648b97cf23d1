"""Where an engine's metrics are: which port, which engine, which path, without disturbing either of them.

TensorRT-LLM answers ``/metrics`` with a queue that reading empties, so who a server is gets asked before that path is
touched. Ports that the command names are the only ones asked where it names any: a connection with an HTTP request in
it is no friend to a rendezvous port.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx

# Well-known ports of the engines, asked first among several.
_USUAL_PORTS = (8000, 30000, 8080, 3000, 23333, 8002, 9000, 80)
_PORT_FLAGS = ("--port", "--http-port", "--http_port", "--metrics-port", "--metrics_port", "--prometheus-port")
_MAX_BYTES = 16_000_000
TIMEOUT = httpx.Timeout(2.0, connect=0.5)
# A front end that is busy tokenising answers late, and that is just when its numbers matter.
SCRAPE_TIMEOUT = httpx.Timeout(5.0, connect=0.5)

# owned_by of /v1/models, and words of a command line, to the engine.
# The server of `infprof workload serve` has the metrics of vLLM, and none of its options.
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "lmdeploy": "lmdeploy", "infprof": "infprof"}
_COMMAND_WORDS = (
    ("trtllm-serve", "tensorrt-llm"),
    ("tensorrt_llm", "tensorrt-llm"),
    ("text-generation-launcher", "tgi"),
    ("text-generation-router", "tgi"),
    ("llama-server", "llama.cpp"),
    ("sglang", "sglang"),
    ("lmdeploy", "lmdeploy"),
    ("vllm", "vllm"),
)
HOW_TO_ENABLE = {
    "vllm": "leave out --disable-log-stats",
    "sglang": "start the server with --enable-metrics",
    "tensorrt-llm": "set return_perf_metrics: true and enable_iter_perf_stats: true",
    "llama.cpp": "start the server with --metrics",
    "lmdeploy": "leave out --disable-metrics",
}


class Answer(NamedTuple):
    """An HTTP answer, its body as text; ``status`` 0 means that nothing that speaks HTTP answered."""

    status: int
    kind: str
    text: str

    @property
    def json(self) -> Any:
        """The body as JSON, None where it is none."""
        import json

        try:
            return json.loads(self.text)
        except ValueError:
            return None


@dataclass(frozen=True)
class Endpoint:
    """A place to scrape. ``engine`` is None where the server did not say; its metrics' names will."""

    url: str
    base: str
    engine: str | None
    version: str | None
    model: str | None
    settings: dict[str, Any]

    @property
    def place(self) -> str:
        """Port and path: enough to find it again, without a host's name."""
        parts = urlsplit(self.url)
        return f"port {parts.port or 80}, {parts.path}"


class NoMetrics(Exception):
    """A server answers and has no metrics for us: the sentence says why and what would help.

    ``never_again``: even asking does harm.
    """

    def __init__(self, sentence: str, never_again: bool = False) -> None:
        super().__init__(sentence)
        self.never_again = never_again


class NoServer(Exception):
    """Nothing answers there (yet), or nothing that is an engine; ``answered`` tells the two apart."""

    def __init__(self, sentence: str, answered: bool) -> None:
        super().__init__(sentence)
        self.answered = answered


class _TlsWhenUsed(httpx.BaseTransport):
    """HTTPS that reads the certificates at its first request: that takes 20 ms, and engines are mostly asked without."""

    def __init__(self) -> None:
        self._made: httpx.HTTPTransport | None = None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self._made is None:
            self._made = httpx.HTTPTransport(trust_env=False)
        return self._made.handle_request(request)

    def close(self) -> None:
        if self._made is not None:
            self._made.close()


def new_client() -> httpx.Client:
    """A client that keeps its connection, follows no proxy of the environment, and asks for uncompressed text."""
    return httpx.Client(
        trust_env=False,
        timeout=TIMEOUT,
        headers={"accept-encoding": "identity"},
        # Certificates are checked: whatever is https goes the other way.
        transport=httpx.HTTPTransport(verify=False, trust_env=False),
        mounts={"https://": _TlsWhenUsed()},
    )


def get(client: httpx.Client, url: str, *, text_only: bool = False, timeout: httpx.Timeout = TIMEOUT) -> Answer:
    """GET with a limit on the size. With ``text_only`` a JSON body is left unread. Never raises for the network.

    One redirect is followed, on the same host: a mounted application answers /metrics with one to /metrics/.
    """
    try:
        for _ in range(2):
            with client.stream("GET", url, timeout=timeout) as response:
                following = response.next_request
                if following is None or following.url.host != response.url.host:
                    return _answer(response, text_only)
                url = str(following.url)
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, ValueError):
        pass
    return _NOTHING


def _answer(response: httpx.Response, text_only: bool) -> Answer:
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    unread = text_only and kind.endswith("json")
    return Answer(response.status_code, kind, "" if unread else _body(response))


_NOTHING = Answer(0, "", "")


def _body(response: httpx.Response) -> str:
    parts, size = [], 0
    for part in response.iter_bytes():
        parts.append(part)
        size += len(part)
        if size > _MAX_BYTES:
            break
    return b"".join(parts).decode("utf-8", "replace")


def engine_of_command(command: Sequence[str]) -> str | None:
    """The engine that a command line starts, by the words in it; None for anything else."""
    # Values of flags come last: a model may be called after another engine.
    text = " ".join(word for word in command[:8] if not word.startswith("--"))
    return next((engine for word, engine in _COMMAND_WORDS if word in text), None)


def ports_of_command(command: Sequence[str]) -> list[int]:
    """The ports that a command line names for its HTTP server."""
    ports = []
    for word, following in zip(command, [*command[1:], ""], strict=False):
        flag, equals, value = word.partition("=")
        value = value if equals else following
        # Port 0 is whichever is free.
        if flag in _PORT_FLAGS and value.isdigit() and int(value):
            ports.append(int(value))
    return ports


def usual_first(ports: Sequence[int]) -> list[int]:
    """Ports with those on which engines usually listen first."""
    return sorted(ports, key=lambda port: (_USUAL_PORTS.index(port) if port in _USUAL_PORTS else 99, port))


def examine(client: httpx.Client, base: str, path: str | None = None, hint: str | None = None) -> Endpoint:
    """The metrics endpoint of a server. ``path`` is what the user named, ``hint`` the engine of the command line.

    Raises NoServer where nothing answers or nothing that is an engine, NoMetrics where one has none for us.
    """
    models = get(client, f"{base}/v1/models")
    if models.status == 0:
        raise NoServer("nothing answers", False)
    engine, version, settings = _identify(client, base, models, hint)
    url, engine = _metrics_url(client, base, path, engine)
    return Endpoint(url, base, engine, version, _model(models.json), settings)


def _identify(
    client: httpx.Client, base: str, models: Answer, hint: str | None
) -> tuple[str | None, str | None, dict[str, Any]]:
    """Engine, version and settings, by what the engines answer about themselves."""
    engine = _OWNERS.get(_owner(models.json), hint)
    for known, path in (
        ("sglang", "/server_info"),
        ("sglang", "/get_server_info"),
        ("tgi", "/info"),
        ("llama.cpp", "/props"),
    ):
        if engine in (None, known) and (settings := _settings(client, base + path, known)):
            return known, _text(settings.get("version")), settings
    version = _version(get(client, f"{base}/version").json)
    if engine is None and version is not None:
        # vLLM and TensorRT-LLM both have /version. Where a key keeps the list of models closed, /ping tells them apart.
        engine = "vllm" if get(client, f"{base}/ping").status == 200 else "tensorrt-llm"
    return engine, version, {}


# A key that tells an engine's description of itself from anything else found at the same path.
_OWN_KEYS = {
    "sglang": ("model_path", "tp_size", "max_running_requests"),
    "tgi": ("model_id", "max_total_tokens", "router"),
    "llama.cpp": ("default_generation_settings", "total_slots"),
}


def _settings(client: httpx.Client, url: str, engine: str) -> dict[str, Any]:
    answer = get(client, url)
    found = answer.json if answer.status == 200 else None
    return found if isinstance(found, dict) and any(key in found for key in _OWN_KEYS[engine]) else {}


def _metrics_url(client: httpx.Client, base: str, path: str | None, engine: str | None) -> tuple[str, str | None]:
    """The URL to scrape and the engine, once an answer there has been seen."""
    prometheus = f"{base}/prometheus/metrics"
    if engine in (None, "tensorrt-llm"):
        answer = get(client, prometheus, text_only=True)
        if _is_exposition(answer):
            return prometheus, "tensorrt-llm"
    if engine == "tensorrt-llm":
        raise NoMetrics(_not_enabled(engine))
    url = base + (path or "/metrics")
    answer = get(client, url, text_only=True)
    if answer.status == 200 and (answer.kind.endswith("json") or answer.text.lstrip()[:1] in ("[", "{")):
        raise NoMetrics(
            "/metrics answers with JSON, a queue that reading empties (TensorRT-LLM), so it is not read: "
            f"{HOW_TO_ENABLE['tensorrt-llm']}, then /prometheus/metrics has the numbers",
            never_again=True,
        )
    if not _is_exposition(answer):
        if engine is None and path is None:
            raise NoServer("no metrics there", True)
        raise NoMetrics(_not_enabled(engine) if answer.status in (404, 501) else f"/metrics answers {answer.status}")
    if engine is None and path is None and not _has_known_names(answer.text):
        raise NoServer("metrics of something that is no serving engine", True)
    return url, engine


def _not_enabled(engine: str | None) -> str:
    how = HOW_TO_ENABLE.get(engine or "")
    return f"{engine or 'the server'} serves no metrics" + (f": {how}" if how else "")


def _is_exposition(answer: Answer) -> bool:
    """Whether an answer is the Prometheus text format; an empty text is one (nothing counted yet)."""
    return answer.status == 200 and answer.kind in ("text/plain", "application/openmetrics-text")


def _has_known_names(text: str) -> bool:
    from infprof.probes.serving.engines import split_prefix

    return any(split_prefix(line)[0] for line in text.split("\n") if line[:1].isalpha())


def _owner(models: Any) -> str:
    return str(_first(models).get("owned_by", "")).lower()


def _model(models: Any) -> str | None:
    return _text(_first(models).get("id"))


def _first(models: Any) -> dict[str, Any]:
    data = models.get("data") if isinstance(models, dict) else None
    return data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}


def _version(found: Any) -> str | None:
    return _text(found.get("version")) if isinstance(found, dict) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and re.fullmatch(r"[\w./+:@ -]{1,200}", value) else None
