"""The serving engine's own numbers: its metrics endpoint, found in the target's process tree and read every second.

What is recorded: the signals of ``engines.SIGNALS`` per parallel engine (scope ``engine/0``, ``engine/1``, …; what the
front end counts for all of them stands under the first), facts about engine and settings, the events ``scrape`` (the
first and the last text, without private parts), ``engine_restart``, ``metrics_unreachable``, ``metrics_answering``, and
those of the log with their number in the last second (``engine_ready``, ``engine_preemption``,
``engine_out_of_memory``, ``engine_died``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import httpx

from infprof.probes import ProbeContext, Signal, Task
from infprof.probes.listening import ListeningPorts
from infprof.probes.recorder import Recorder
from infprof.probes.serving import dcgm
from infprof.probes.serving.endpoint import (
    HOW_TO_ENABLE,
    SCRAPE_TIMEOUT,
    Endpoint,
    NoMetrics,
    NoServer,
    engine_of_command,
    examine,
    get,
    new_client,
    ports_of_command,
    usual_first,
)
from infprof.probes.serving.engines import SIGNALS
from infprof.probes.serving.exposition import Exposition, Key, Scrape
from infprof.probes.serving.settings import (
    known_settings,
    plain_model,
    read_log,
    settings_of_command,
    without_private,
)

__all__ = ["EngineScraper", "ServingProbe"]

PERIOD_S = 1.0
_EAGER_SEARCHES = 10
# A server without metrics may still be starting up. A port that the command does not name gets few questions, and ever
# longer rests between them: they are lines in the log of a server that is no engine, and no friends to a rendezvous port.
_ASK_AGAIN = 120
_UNNAMED_TIMES_ANSWERED, _UNNAMED_TIMES_SILENT, _UNNAMED_REST_S = 2, 6, 10


class EngineScraper:
    """Reads one endpoint and records what it says; remembers the last values to see restarts and new series."""

    def __init__(self, client: httpx.Client, endpoint: Endpoint) -> None:
        self._client, self.endpoint = client, endpoint
        self._exposition = Exposition()
        self._series: dict[Key, int] = {}
        self._last: Scrape | None = None
        self._last_ns = 0
        self._unreachable_since: int | None = None
        self._texts = 0
        self._reported: set[str] = set()
        self.last_text = ""

    def scrape(self, out: Recorder) -> None:
        """One read: samples of all signals at one time, or the note that nothing answered."""
        answer = get(self._client, self.endpoint.url, text_only=True, timeout=SCRAPE_TIMEOUT)
        now = out.now_ns()
        if answer.status != 200 or answer.kind.endswith("json"):
            self._failed(out, now, answer.status)
            return
        self._answered(out, now)
        self._first_text(out, answer.text)
        found = self._exposition.read(answer.text)
        self._restarts(out, found)
        self._record(out, now, found)
        self._facts(out, found)
        self._last, self._last_ns = found, now

    def _failed(self, out: Recorder, now: int, status: int) -> None:
        if self._unreachable_since is None:
            self._unreachable_since = now
            out.event("metrics_unreachable", f"HTTP {status}" if status else "no answer", time_ns=now)

    def _answered(self, out: Recorder, now: int) -> None:
        if self._unreachable_since is not None:
            gap_s = (now - self._unreachable_since) / 1e9
            out.event("metrics_answering", "the metrics endpoint answers again", value=gap_s, time_ns=now)
            self._unreachable_since = None

    def _first_text(self, out: Recorder, text: str) -> None:
        self._texts += 1
        self.last_text = text
        if self._texts == 1:
            out.event("scrape", without_private(text))

    def _restarts(self, out: Recorder, found: Scrape) -> None:
        last = self._last
        if last is None:
            return
        if None not in (last.start_time, found.start_time) and last.start_time != found.start_time:
            out.event("engine_restart", "the server's start time changed")
            return
        for key, value in found.values.items():
            if value < last.values.get(key, value) and SIGNALS[key.signal].kind == "counter":
                out.event("engine_restart", f"{found.names[key.signal]} fell")
                return

    def _record(self, out: Recorder, now: int, found: Scrape) -> None:
        series = self._series
        for key in found.values.keys() - series.keys():
            series[key] = out.series(key.signal, f"engine/{key.engine}", dict(key.labels))
        if self._last is not None:
            # Label sets appear on first use: until then the count was 0.
            new = [k for k in found.values.keys() - self._last.values.keys() if SIGNALS[k.signal].kind == "counter"]
            out.samples([(series[key], 0.0) for key in new], self._last_ns)
        out.samples([(series[key], value) for key, value in found.values.items()], now)

    def _facts(self, out: Recorder, found: Scrape) -> None:
        if found.engines and self._once("engine"):
            out.fact("engine", self.endpoint.engine or found.engines[0])
        if found.names and (self._last is None or found.names != self._last.names):
            out.fact("signal_sources", found.names)
        if found.repeated and self._once("repeated"):
            out.fact("merged_over_processes", sorted(found.repeated))
        for engine, labels in found.info.items():
            if self._once(f"settings {engine}"):
                out.fact("engine_settings", known_settings(labels), f"engine/{engine}")
        if not found.engines and self._texts == 30:
            how = HOW_TO_ENABLE.get(self.endpoint.engine or "")
            out.missing(
                "engine", "the metrics endpoint has no series of a serving engine" + (f": {how}" if how else "")
            )

    def _once(self, what: str) -> bool:
        new = what not in self._reported
        self._reported.add(what)
        return new

    def finish(self, out: Recorder) -> None:
        """Keep the last text."""
        if self._texts > 1:
            out.event("scrape", without_private(self.last_text))


class ServingProbe:
    """Finds the target's metrics endpoint and reads it every second; a DCGM exporter beside it as well."""

    name = "serving"
    signals: Mapping[str, Signal] = {**SIGNALS, **dcgm.SIGNALS}

    def __init__(self) -> None:
        self._client = new_client()
        self._context = ProbeContext(0)
        self._ports = ListeningPorts(0)
        self._scraper: EngineScraper | None = None
        self._named_exporter: dcgm.DcgmExporter | None = None
        self._asked: dict[str, int] = {}
        self._rests_until: dict[str, int] = {}
        self._why_not = "no port of the target answers as a serving engine: name its metrics with --metrics-url"
        self._log_lines = 0
        self._searches = 0

    def start(self, context: ProbeContext, out: Recorder) -> Sequence[Task]:
        """Never fails: a server may start to listen minutes later, or never."""
        self._context = context
        self._ports = ListeningPorts(context.pid, context.root)
        settings = settings_of_command(context.command)
        if settings:
            out.fact("engine_arguments", settings)
        tasks = [Task("scrape", PERIOD_S, self._tick, at_end=True)]
        if context.log_lines is not None:
            tasks.append(Task("log", PERIOD_S, self._read_log))
        exporter = self._exporter()
        if exporter is not None:
            tasks.append(Task("dcgm", PERIOD_S, exporter.sample))
        return tasks

    def _exporter(self) -> dcgm.DcgmExporter | None:
        """The machine's DCGM exporter, where one runs at the usual port."""
        client = new_client()  # of its own: tasks run at the same time
        if dcgm.is_dcgm(get(client, dcgm.USUAL_URL, text_only=True).text):
            return dcgm.DcgmExporter(client, dcgm.USUAL_URL)
        client.close()
        return None

    def _tick(self, out: Recorder) -> None:
        if self._scraper is None and self._is_time_to_search():
            self._search(out)
        if self._scraper is not None:
            self._scraper.scrape(out)
        if self._named_exporter is not None:
            self._named_exporter.sample(out)

    def _is_time_to_search(self) -> bool:
        """Each second at first, then each third: a target without a server is looked through for as long as it runs."""
        self._searches += 1
        return self._searches <= _EAGER_SEARCHES or self._searches % 3 == 0

    def _search(self, out: Recorder) -> None:
        hint = engine_of_command(self._context.command)
        for base, path in self._candidates():
            if self._asked.get(base, 0) >= _ASK_AGAIN or self._searches < self._rests_until.get(base, 0):
                continue
            try:
                endpoint = examine(self._client, base, path, hint)
            except NoServer as error:
                weight = int(error.answered) if self._is_named else self._weight_of_unnamed(base, error.answered)
            except NoMetrics as error:
                weight = _ASK_AGAIN if error.never_again else 1
                self._why_not = str(error)
            else:
                if self._awaits_named and dcgm.is_dcgm(get(self._client, endpoint.url).text):
                    # What the user named is a DCGM exporter: the engine is still to be looked for.
                    self._named_exporter = dcgm.DcgmExporter(self._client, endpoint.url)
                    return
                self._found(out, endpoint)
                return
            self._asked[base] = self._asked.get(base, 0) + weight

    def _weight_of_unnamed(self, base: str, answered: bool) -> int:
        weight = _ASK_AGAIN // (_UNNAMED_TIMES_ANSWERED if answered else _UNNAMED_TIMES_SILENT)
        times = self._asked.get(base, 0) // weight
        self._rests_until[base] = self._searches + _UNNAMED_REST_S * 2**times
        return weight

    @property
    def _awaits_named(self) -> bool:
        return self._context.metrics_url is not None and self._named_exporter is None

    @property
    def _is_named(self) -> bool:
        return bool(self._context.metrics_url or ports_of_command(self._context.command))

    def _candidates(self) -> list[tuple[str, str | None]]:
        url = self._context.metrics_url
        if url and self._awaits_named:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            return [(f"{parts.scheme}://{parts.netloc}", parts.path if len(parts.path) > 1 else None)]
        named = ports_of_command(self._context.command)
        ports = named or usual_first(self._ports.now())
        return [(f"http://127.0.0.1:{port}", None) for port in ports]

    def _found(self, out: Recorder, endpoint: Endpoint) -> None:
        self._scraper = EngineScraper(self._client, endpoint)
        out.event("metrics_found", endpoint.place)
        for name, value in (("engine", endpoint.engine), ("engine_version", endpoint.version)):
            if value:
                out.fact(name, value)
        if endpoint.model:
            out.fact("model", plain_model(endpoint.model))
        settings = known_settings(endpoint.settings)
        if settings:
            out.fact("engine_settings", settings)

    def _read_log(self, out: Recorder) -> None:
        lines = self._context.log_lines() if self._context.log_lines is not None else ()
        fresh, self._log_lines = lines[self._log_lines :], len(lines)
        happened: Counter[tuple[str, str]] = Counter()
        for found in read_log(fresh):
            if found.is_event:
                happened[found.name, str(found.value)] += 1
            else:
                out.fact(f"log_{found.name}", found.value)
        for (name, text), count in happened.items():
            out.event(f"engine_{name}", text, value=count)

    def stop(self, out: Recorder) -> None:
        """Keep the last text, or say why there was none."""
        if self._scraper is not None:
            self._scraper.finish(out)
        else:
            out.missing("engine", self._why_not)
        self._client.close()
