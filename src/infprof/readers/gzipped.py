"""The beginning of files that may be compressed: told by their first bytes, not by their names."""

from __future__ import annotations

GZIP_MAGIC = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def unpacked(head: bytes, limit: int) -> bytes:
    """The first bytes of what a file holds, given its own first bytes.

    Of gzip at most ``limit`` bytes, b"" where it is damaged; other bytes as they are.
    """
    import zlib

    if not head.startswith(GZIP_MAGIC):
        return head
    try:
        return zlib.decompressobj(31).decompress(head, limit)
    except zlib.error:
        return b""


def unpacked_text(head: bytes, limit: int) -> bytes:
    """As ``unpacked``, without a byte-order mark and leading space."""
    return unpacked(head, limit).removeprefix(BYTE_ORDER_MARK).lstrip()
