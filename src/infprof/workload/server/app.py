"""The HTTP side: routes, answers as streams or in one piece, and errors as OpenAI's clients expect them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infprof.workload.server.engine_thread import EngineThread
from infprof.workload.server.errors import ApiError, shutting_down
from infprof.workload.server.generation import Event, Failure, Generation, Piece
from infprof.workload.server.metrics import ServerMetrics
from infprof.workload.server.profiling import Profiling
from infprof.workload.server.protocol import Answering, Ask, ServedModel, parse_ask
from infprof.workload.server.rate_limit import TokenBuckets
from infprof.workload.server.tokenizer import STOP_TOKENS, TextStream

# Far above what any context needs.
_LARGEST_BODY = 8_000_000
_OWNER = "infprof"
_NOT_COUNTED = ("/metrics", "/health")
_COUNTED = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/start_profile", "/stop_profile")
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Service:
    """What the routes work with. ``buckets`` None: no rate limit; ``profiling`` None: no profile routes."""

    model: ServedModel
    engine: EngineThread
    metrics: ServerMetrics
    clock: Callable[[], int]
    buckets: TokenBuckets | None = None
    profiling: Profiling | None = None


def build_app(service: Service) -> ASGIApp:
    """The ASGI application."""
    routes = _Routes(service)
    listed = [
        Route("/v1/completions", routes.completions, methods=["POST"]),
        Route("/v1/chat/completions", routes.chat, methods=["POST"]),
        Route("/v1/models", routes.models, methods=["GET"]),
        Route("/v1/models/{name:path}", routes.one_model, methods=["GET"]),
        Route("/health", routes.health, methods=["GET"]),
        Route("/metrics", routes.metrics, methods=["GET"]),
    ]
    if service.profiling is not None:
        listed += [
            Route("/start_profile", routes.start_profile, methods=["POST"]),
            Route("/stop_profile", routes.stop_profile, methods=["POST"]),
        ]
    handlers: dict[Any, Callable[..., Any]] = {ApiError: _api_error, HTTPException: _http_error, Exception: _crash}
    return _Counted(Starlette(routes=listed, exception_handlers=handlers), service.metrics)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such route, no such method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}."
    if request.url.path in ("/start_profile", "/stop_profile"):
        message += " Start the server with --profiler torch or cuda."
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    failure = ApiError(error.status_code, code, message)
    return JSONResponse(failure.body, failure.status, dict(error.headers or {}))


async def _crash(_: Request, error: Exception) -> Response:
    failure = ApiError(500, "internal_error", f"The server failed: {type(error).__name__}.")
    return JSONResponse(failure.body, failure.status)


class _Counted:
    """Counts answers by route and status. Answers to whom has left before count as 499, which is nginx's number."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            if scope["path"] not in _NOT_COUNTED:
                # Names that clients make up would fill the memory.
                handler = scope["path"] if scope["path"] in _COUNTED else "other"
                method = scope["method"] if scope["method"] in ("GET", "POST") else "other"
                self._metrics.answered(handler, method, status)


class _Routes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._started = int(time.time())

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, chat=True)

    async def _generate(self, request: Request, chat: bool) -> Response:
        self._limit(request)
        try:
            ask = parse_ask(await _body(request), chat, self._service.model)
        except ClientDisconnect:
            return Response(status_code=499)
        return _GeneratingResponse(self._service, ask)

    def _limit(self, request: Request) -> None:
        """Raises ApiError where this client has sent too much lately. Who it is says its key, else its address."""
        service = self._service
        if service.buckets is None:
            return
        key = request.headers.get("authorization") or request.headers.get("api-key")
        client = key or (request.client.host if request.client else "")
        # Keys are nobody's business, and may be long.
        wait_s = service.buckets.take(hashlib.sha256(client.encode()).hexdigest(), service.clock())
        if wait_s:
            service.metrics.reject("rate_limit_exceeded")
            raise ApiError(429, "rate_limit_exceeded", "You send too many requests.", retry_after_s=wait_s)

    def _card(self) -> dict[str, Any]:
        model = self._service.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._started,
            "owned_by": _OWNER,
            "max_model_len": model.context,
        }

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._service.model.name:
            raise ApiError(404, "model_not_found", f"There is no model called {name[:100]}.", "model")
        return JSONResponse(self._card())

    async def health(self, _: Request) -> Response:
        if not self._service.engine.accepts:
            raise shutting_down()
        return Response()

    async def metrics(self, _: Request) -> Response:
        return Response(self._service.metrics.text(), media_type=_METRICS_TYPE)

    async def start_profile(self, _: Request) -> Response:
        assert self._service.profiling is not None
        await _result(self._service.engine.call(self._service.profiling.start))
        return Response()

    async def stop_profile(self, _: Request) -> Response:
        assert self._service.profiling is not None
        await _result(self._service.engine.call(self._service.profiling.stop))
        return Response()


async def _result(future: Future[Any]) -> None:
    # Shielded: a client that leaves does not take the trace with it.
    await asyncio.shield(asyncio.wrap_future(future))


async def _body(request: Request) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > _LARGEST_BODY:
            raise ApiError(413, "body_too_large", f"A body of more than {_LARGEST_BODY:,} bytes is not read.")
        parts.append(part)
    return b"".join(parts)


class _GeneratingResponse(Response):
    """Submits the request and answers with what comes of it.

    The status is sent with the first token, so that a request that waited in vain still gets its 503. A client that
    leaves cancels its request, whether it waits or runs.
    """

    def __init__(self, service: Service, ask: Ask) -> None:
        super().__init__()
        self._service, self._ask = service, ask
        self._answering = Answering(ask, service.model)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ask, engine = self._ask, self._service.engine
        generation = Generation(
            id=self._answering.id,
            prompt=ask.prompt,
            max_tokens=ask.max_tokens,
            temperature=ask.temperature,
            seed=ask.seed,
            stop_token_ids=frozenset() if ask.ignore_eos else STOP_TOKENS,
            priority=ask.priority,
            text=TextStream(ask.stops),
            inbox=asyncio.Queue[Event | None](),
        )
        engine.submit(generation)
        watcher = asyncio.create_task(_tell_when_gone(receive, generation))
        try:
            if ask.stream:
                await self._stream(generation, send)
            else:
                await self._whole(generation)(scope, receive, send)
        finally:
            watcher.cancel()
            engine.cancel(generation)

    def _whole(self, generation: Generation) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            pieces: list[Piece] = []
            while not pieces or pieces[-1].finish is None:
                piece = await _next(generation)
                if piece is None:
                    return
                pieces.append(piece)
            text = "".join(piece.text for piece in pieces)
            tokens = [token for piece in pieces for token in piece.tokens]
            body = self._answering.whole(text, tokens, str(pieces[-1].finish))
            await JSONResponse(body)(scope, receive, send)

        return answer

    async def _stream(self, generation: Generation, send: Send) -> None:
        piece = await _next(generation)
        if piece is None:
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        opening = self._answering.opening()
        if opening is not None:
            await _send(send, opening)
        try:
            await self._pieces(generation, piece, send)
        except ApiError as error:
            # The status is out: the failure goes where the next piece would.
            await _send(send, error.body)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _pieces(self, generation: Generation, piece: Piece | None, send: Send) -> None:
        while piece is not None:
            if piece.text or piece.finish is not None or self._ask.token_ids:
                count = piece.output_tokens
                await _send(send, self._answering.chunk(piece.text, piece.tokens, piece.finish, count))
            if piece.finish is not None:
                usage = self._answering.last_usage(piece.output_tokens)
                if usage is not None:
                    await _send(send, usage)
                return
            piece = await _next(generation)


async def _tell_when_gone(receive: Callable[[], Awaitable[Message]], generation: Generation) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.inbox.put_nowait(None)


async def _next(generation: Generation) -> Piece | None:
    """The next piece, None once the client has gone. Raises ApiError where there will be none.

    Tokens that came while the last piece was on its way are one piece: who cannot keep up sends less often.
    """
    inbox: asyncio.Queue[Event | None] = generation.inbox
    event = await inbox.get()
    while isinstance(event, Piece) and event.finish is None and not inbox.empty():
        later = inbox.get_nowait()
        if not isinstance(later, Piece):
            inbox.put_nowait(later)
            break
        event += later
    if isinstance(event, Failure):
        raise event.error
    return event


async def _send(send: Send, data: Mapping[str, Any]) -> None:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})
