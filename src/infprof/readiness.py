"""When is a server ready? A URL that answers, a port that listens, a line in its log, or an OpenAI endpoint found by itself."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from infprof.errors import UsageError
from infprof.probes.listening import listening_ports

if TYPE_CHECKING:
    import httpx

# A server that loads a model may accept a connection long before it answers.
_ASK_TIMEOUT_S = 2.0


def http_client(timeout_s: float = _ASK_TIMEOUT_S) -> httpx.Client:
    """A client that talks to the target alone: no proxy, no netrc."""
    import httpx

    return httpx.Client(timeout=timeout_s, trust_env=False)


def url_answers(client: httpx.Client, url: str) -> bool:
    """Whether a GET of the URL ends with a status under 400."""
    import httpx

    try:
        return client.get(url).status_code < 400
    except httpx.HTTPError:
        return False


def port_listens(host: str, port: int) -> bool:
    """Whether something accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=_ASK_TIMEOUT_S):
            return True
    except OSError:
        return False


def log_matcher(pattern: str) -> re.Pattern[str]:
    """The pattern of ``--ready-log``. Raises UsageError where it is no regular expression."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UsageError(f"--ready-log {pattern}: not a regular expression ({error}).") from None


def check_url(option: str, url: str) -> None:
    """Raises UsageError where it is no URL of a server."""
    import httpx

    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        httpx.Request("GET", url)
        (parts.hostname or "").encode("idna")
    except (ValueError, httpx.InvalidURL):
        usable = False
    if not usable:
        raise UsageError(f"{option} {url}: give a URL such as http://127.0.0.1:8000.")


def origin(url: str) -> str:
    """Scheme, host and port of a URL."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def find_openai_server(client: httpx.Client, pid: int) -> str | None:
    """The base URL of an OpenAI-compatible server of the process tree that lists its models; None while there is none."""
    import httpx

    for port in listening_ports(pid):
        base = f"http://127.0.0.1:{port}"
        try:
            answer = client.get(f"{base}/v1/models")
            if answer.status_code == 200 and isinstance(answer.json().get("data"), list):
                return base
        except (httpx.HTTPError, ValueError, AttributeError):
            continue
    return None


def seen_in(pattern: re.Pattern[str], lines: Callable[[], Sequence[str]]) -> bool:
    """Whether a line of the log matches."""
    return any(pattern.search(line) for line in lines())
