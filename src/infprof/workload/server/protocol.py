"""OpenAI's two generating endpoints: what a request asks for, checked, and the objects that answer it."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infprof.workload.server.errors import ApiError, bad_request
from infprof.workload.server.tokenizer import ROLES, encode, encode_chat
from infprof.workload.server.waiting_line import PRIORITIES

_COMPLETION_TOKENS, _CHAT_TOKENS = 16, 256
_MOST_STOPS, _LONGEST_STOP = 4, 256
# Fields that would change the answer, and the only value with which they do not.
_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
}


@dataclass(frozen=True)
class ServedModel:
    """What requests are checked against. ``context``: tokens of prompt and output together that one request may have.

    ``repeat_prompt``: how many times each prompt is put before the model.
    """

    name: str
    vocabulary: int
    context: int
    repeat_prompt: int = 1


@dataclass(frozen=True)
class Ask:
    """A request that can be served. ``seed`` is set wherever the client named none."""

    chat: bool
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    stops: tuple[str, ...]
    ignore_eos: bool
    priority: int
    stream: bool
    include_usage: bool
    running_usage: bool
    token_ids: bool


def parse_ask(data: bytes, chat: bool, model: ServedModel) -> Ask:
    """Read a body of /v1/completions, or with ``chat`` of /v1/chat/completions. Raises ApiError."""
    body = _object(data)
    _check_model(body, model)
    for name, harmless in _NOT_SUPPORTED.items():
        value = body.get(name)
        # 0 log probabilities are those of the tokens chosen; false are none.
        if value is not None and not any(value == one and _is_bool(value) == _is_bool(one) for one in harmless):
            raise bad_request(f"{name} is not supported: leave it away.", name, "unsupported_parameter")
    prompt = (_messages(body) if chat else _prompt(body, model)) * model.repeat_prompt
    stream = _flag(body, "stream")
    stream_options = _stream_options(body, stream)
    seed = _whole(body, "seed", -(2**63), 2**63 - 1)
    return Ask(
        chat=chat,
        prompt=tuple(prompt),
        max_tokens=_max_tokens(body, chat, len(prompt), model),
        temperature=_number(body, "temperature", 0, 2, default=1.0),
        seed=secrets.randbits(48) if seed is None else seed,
        stops=_stops(body),
        ignore_eos=_flag(body, "ignore_eos"),
        priority=_whole(body, "priority", PRIORITIES[0], PRIORITIES[-1]) or 0,
        stream=stream,
        include_usage=_flag(stream_options, "include_usage"),
        running_usage=_flag(stream_options, "continuous_usage_stats"),
        token_ids=_flag(body, "return_token_ids"),
    )


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _object(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"The body is not JSON: {error}.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    return body


def _check_model(body: Mapping[str, Any], model: ServedModel) -> None:
    name = body.get("model")
    if not isinstance(name, str) or not name:
        raise bad_request("You must name a model.", "model", "missing_value")
    if name != model.name:
        message = f"There is no model called {name[:100]}; this server has {model.name}."
        raise ApiError(404, "model_not_found", message, "model")


def _prompt(body: Mapping[str, Any], model: ServedModel) -> list[int]:
    """A text or its tokens; a list of one of these is the same."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise bad_request("One prompt per request: send the others on their own.", "prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        tokens = encode(prompt)
    elif isinstance(prompt, list):
        if not all(type(token) is int and 0 <= token < model.vocabulary for token in prompt):
            raise bad_request(f"Tokens are whole numbers from 0 to {model.vocabulary - 1}.", "prompt")
        tokens = prompt
    else:
        raise bad_request("prompt must be a text or a list of tokens.", "prompt", "missing_value")
    if not tokens:
        raise bad_request("The prompt is empty.", "prompt")
    return tokens


def _messages(body: Mapping[str, Any]) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages must be a list with one message or more.", "messages", "missing_value")
    return encode_chat([_message(message, f"messages[{place}]") for place, message in enumerate(messages)])


def _message(message: Any, place: str) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise bad_request(f"{place} must be an object with role and content.", place)
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise bad_request(f"{place}.role must be one of {', '.join(ROLES)}.", f"{place}.role")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise bad_request(f"{place}.content must be a text, or a list of parts of type text.", f"{place}.content")
    return role, "".join(str(text) for text in texts)


def _max_tokens(body: Mapping[str, Any], chat: bool, prompt: int, model: ServedModel) -> int:
    """What the client asks for, where there is room; without a number 16 tokens, of a chat 256, or what is left."""
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    wanted = _whole(body, name, 1, None)
    room = model.context - prompt
    if wanted is None:
        wanted = max(1, min(room, _CHAT_TOKENS if chat else _COMPLETION_TOKENS))
    if wanted > room:
        raise bad_request(
            f"This model takes {model.context} tokens in all. You asked for {prompt + wanted}: {prompt} of the "
            f"{'messages' if chat else 'prompt'} and {wanted} of the answer.",
            "messages" if chat else "prompt",
            "context_length_exceeded",
        )
    return wanted


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) and 0 < len(s) <= _LONGEST_STOP for s in stops):
        raise bad_request(f"stop must be texts of 1 to {_LONGEST_STOP} characters.", "stop")
    if len(stops) > _MOST_STOPS:
        raise bad_request(f"stop takes {_MOST_STOPS} texts at most.", "stop")
    return tuple(stops)


def _stream_options(body: Mapping[str, Any], stream: bool) -> Mapping[str, Any]:
    options = body.get("stream_options")
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise bad_request("stream_options must be an object.", "stream_options")
    if not stream:
        raise bad_request("stream_options goes with stream: true only.", "stream_options")
    return options


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise bad_request(f"{name} must be true or false.", name)


def _whole(body: Mapping[str, Any], name: str, low: int, high: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or value < low or (high is not None and value > high):
        upper = "" if high is None else f" to {high}"
        raise bad_request(f"{name} must be a whole number from {low}{upper}.", name)
    return value


def _number(body: Mapping[str, Any], name: str, low: float, high: float, default: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
        raise bad_request(f"{name} must be a number from {low} to {high}.", name)
    return float(value)


class Answering:
    """Builds the objects of one answer: chunks of a stream, or the whole."""

    def __init__(self, ask: Ask, model: ServedModel) -> None:
        self._ask, self._model = ask, model
        self.id = f"{'chatcmpl' if ask.chat else 'cmpl'}-{secrets.token_hex(16)}"
        self._created = int(time.time())

    def _object(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "choices": list(choices),
        }

    def usage(self, output_tokens: int) -> dict[str, int]:
        prompt = len(self._ask.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": output_tokens, "total_tokens": prompt + output_tokens}

    def opening(self) -> dict[str, Any] | None:
        """A chat's first chunk, which names the role; None for completions."""
        if not self._ask.chat:
            return None
        return self._chunk({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, 0)

    def chunk(self, text: str, tokens: Sequence[int], finish: str | None, output_tokens: int) -> dict[str, Any]:
        """A piece of the answer. ``output_tokens`` counts those so far."""
        content: dict[str, Any] = {"content": text} if text or finish is None else {}
        choice: dict[str, Any] = {"delta": content} if self._ask.chat else {"text": text}
        return self._chunk(choice | {"finish_reason": finish} | self._token_ids(tokens), output_tokens)

    def _chunk(self, choice: Mapping[str, Any], output_tokens: int) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._ask.chat else "text_completion"
        found = self._object(kind, [{"index": 0, "logprobs": None, **choice}])
        if self._ask.running_usage:
            found["usage"] = self.usage(output_tokens)
        elif self._ask.include_usage:
            found["usage"] = None
        return found

    def last_usage(self, output_tokens: int) -> dict[str, Any] | None:
        """The chunk after the last piece, where the client asked for the usage."""
        if not self._ask.include_usage:
            return None
        kind = "chat.completion.chunk" if self._ask.chat else "text_completion"
        return self._object(kind, []) | {"usage": self.usage(output_tokens)}

    def whole(self, text: str, tokens: Sequence[int], finish: str) -> dict[str, Any]:
        """The answer in one piece."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish, **self._token_ids(tokens)}
        if self._ask.chat:
            found = self._object("chat.completion", [choice | {"message": {"role": "assistant", "content": text}}])
        else:
            found = self._object("text_completion", [choice | {"text": text}])
        return found | {"usage": self.usage(len(tokens))}

    def _token_ids(self, tokens: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(tokens)} if self._ask.token_ids else {}
