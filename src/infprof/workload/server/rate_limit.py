"""How many requests a client may send: a token bucket for each."""

from __future__ import annotations

from collections import OrderedDict

_SECOND_NS = 1_000_000_000
# Beyond it the client that was longest silent is forgotten: its bucket is the likeliest to be full.
_MOST_CLIENTS = 10_000


class TokenBuckets:
    """Lets each client send ``burst`` requests at once and ``rate_per_s`` on average: in any T seconds at most
    burst + rate_per_s × T. Not safe for several threads.
    """

    def __init__(self, rate_per_s: float, burst: int, most_clients: int = _MOST_CLIENTS) -> None:
        if rate_per_s <= 0 or burst < 1:
            raise ValueError("a bucket needs a rate above 0 and room for one token")
        self._rate, self._burst, self._most_clients = rate_per_s, burst, most_clients
        # Tokens in the bucket, and when that was so.
        self._buckets: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, client: str, now_ns: int) -> float:
        """Take a token: 0 where there was one, else the seconds until there will be one, and nothing is taken."""
        tokens = self._tokens(client, now_ns)
        # The sum of what trickled in is off by rounding; a request that came just in time is not refused for it.
        allowed = tokens >= 1 - 1e-9
        self._buckets[client] = (max(0.0, tokens - 1) if allowed else tokens, now_ns)
        self._buckets.move_to_end(client)
        if len(self._buckets) > self._most_clients:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - tokens) / self._rate

    def _tokens(self, client: str, now_ns: int) -> float:
        tokens, since_ns = self._buckets.get(client, (float(self._burst), now_ns))
        return min(self._burst, tokens + max(0, now_ns - since_ns) / _SECOND_NS * self._rate)
