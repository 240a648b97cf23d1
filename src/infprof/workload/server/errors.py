"""What goes wrong for a client, as OpenAI's API says it: a status and ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import math
from typing import Any


class ApiError(Exception):
    """A refusal or a failure. ``code`` tells programs which, ``param`` the field of the request that is at fault, and
    ``retry_after_s`` when another try makes sense (None: not by waiting)."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        kind = "rate_limit_error" if self.status == 429 else "server_error"
        if self.status < 500 and self.status != 429:
            kind = "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Retry-After in whole seconds, at least one."""
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(400, code, message, param)


def memory_short(message: str, retry_after_s: float) -> ApiError:
    return ApiError(503, "memory_short", message, retry_after_s=retry_after_s)


def shutting_down() -> ApiError:
    return ApiError(503, "shutting_down", "The server is shutting down.", retry_after_s=30)
