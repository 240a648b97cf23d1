"""Text to tokens and back without a vocabulary file: bytes are tokens, the rest of the vocabulary is made-up words.

The model's weights are random: what matters is that any text survives the way there and back, that every token it may
choose has a text, and that the text can be streamed.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

END_OF_TEXT, SYSTEM, USER, ASSISTANT, TOOL, END_OF_TURN = range(256, 262)
_FIRST_WORD = 264
_SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwyz" for vowel in "aeiou"]

ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}
STOP_TOKENS = frozenset({END_OF_TEXT, END_OF_TURN})
SMALLEST_VOCABULARY = _FIRST_WORD


def encode(text: str) -> list[int]:
    """A token for each byte of UTF-8. Half a surrogate pair, which JSON can spell, has none and becomes a ``?``."""
    return list(text.encode("utf-8", "replace"))


def encode_chat(messages: Sequence[tuple[str, str]]) -> list[int]:
    """Messages, as pairs of role and text, up to where the assistant's answer begins."""
    tokens: list[int] = []
    for role, text in messages:
        tokens += [ROLES[role], *encode(text), END_OF_TURN]
    return [*tokens, ASSISTANT]


def token_bytes(token: int) -> bytes:
    """The bytes of a token: its own, none for a special one, a word for each other."""
    if token < 256:
        return bytes([token])
    return b"" if token < _FIRST_WORD else _word(token - _FIRST_WORD).encode()


def _word(number: int) -> str:
    """A blank and a syllable or more: the number in bijective base len(_SYLLABLES), so that words differ."""
    syllables = []
    number += 1
    while number:
        number, digit = divmod(number - 1, len(_SYLLABLES))
        syllables.append(_SYLLABLES[digit])
    return " " + "".join(reversed(syllables))


def decode(tokens: Sequence[int]) -> str:
    """The text of tokens; bytes that are no UTF-8 become U+FFFD."""
    return b"".join(map(token_bytes, tokens)).decode("utf-8", "replace")


class TextStream:
    """The text of a growing output: whole characters only, and nothing that may turn out to be a stop string.

    ``stops`` are never part of the text. Pieces joined are ``decode`` of all tokens up to the first stop string.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def add(self, token: int) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop string has ended it."""
        return self._release(self._decoder.decode(token_bytes(token)))

    def end(self) -> tuple[str, bool]:
        """What was held back: half a character as U+FFFD, and the beginning of a stop string that did not come."""
        text, stopped = self._release(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return (text, True) if stopped else (text + held, False)

    def _release(self, fresh: str) -> tuple[str, bool]:
        text = self._held + fresh
        found = [place for place in map(text.find, self._stops) if place >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        kept = self._possible_start(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept], False

    def _possible_start(self, text: str) -> int:
        """How many characters at the end may begin a stop string."""
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        ends = (text[len(text) - count :] for count in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stops)), 0)
