"""The serving probe: names to signals, finding the endpoint without harm, and what is recorded of it."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from conftest import SHARED
from infprof.probes import Probe, ProbeContext
from infprof.probes.runner import ProbeRunner
from infprof.probes.serving import SIGNALS, ServingProbe, dcgm, exposition
from infprof.probes.serving.endpoint import engine_of_command, get, new_client, ports_of_command
from infprof.probes.serving.engines import _TABLE, PREFIXES, sources_of
from infprof.probes.serving.exposition import Exposition, Key, Scrape
from infprof.probes.serving.settings import known_settings, read_log, settings_of_command, without_private
from serving_bench import JSON, SECOND, TEXT, Server, models, recorded, recording

VLLM = 'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_waiting{engine="0"} 1\n'


@pytest.fixture(scope="module", params=["vllm-0.32.0-metrics.txt", "vllm-0.32.0-metrics-mfu.txt"])
def dump(request: pytest.FixtureRequest) -> str:
    path = SHARED / "reference" / "samples" / request.param
    if not path.is_file():
        pytest.skip("needs the shared dumps of a real server, which a clone does not have")
    return path.read_text(encoding="utf-8")


def read(text: str) -> Scrape:
    return Exposition().read(text)


def value(text: str, signal: str, engine: str = "0", **labels: str) -> float | None:
    return read(text).values.get(Key(signal, engine, tuple(sorted(labels.items()))))


# Names


def test_every_name_of_the_table_means_a_signal_that_is_declared() -> None:
    for signal, engines in _TABLE.items():
        base = signal.removesuffix("*")
        assert (f"{base}_sum" if signal.endswith("*") else signal) in SIGNALS
        assert set(engines) <= set(PREFIXES)
    (source,) = sources_of("vllm:num_preemptions_total")
    assert (source.signal, source.is_counter) == ("preemptions", True)
    assert sources_of("vllm:cpu_cache_usage_perc") == ()


def test_the_probe_fits_the_protocol() -> None:
    probe: Probe = ServingProbe()
    assert probe.name == "serving" and set(SIGNALS) < set(probe.signals)


def test_a_real_dump_gives_what_prometheus_client_reads(dump: str) -> None:
    found = read(dump)
    samples = {(s.name, s.labels.get("le")): s.value for f in text_string_to_metric_families(dump) for s in f.samples}
    for signal, name in (
        ("prompt_tokens", "vllm:prompt_tokens_total"),
        ("output_tokens", "vllm:generation_tokens_total"),
        ("ttft_seconds_sum", "vllm:time_to_first_token_seconds_sum"),
        ("iteration_tokens_count", "vllm:iteration_tokens_total_count"),
        ("server_cpu_seconds", "process_cpu_seconds_total"),
    ):
        assert found.values[Key(signal, "0", ())] == samples[name, None] > 0
        assert found.names[signal] == name
    buckets = {k.labels[0][1]: v for k, v in found.values.items() if k.signal == "ttft_seconds_bucket"}
    assert buckets == {le: v for (n, le), v in samples.items() if n == "vllm:time_to_first_token_seconds_bucket"}
    assert found.values[Key("requests_finished", "0", (("reason", "length"),))] == 4
    assert found.engines == ("vllm",)
    assert found.start_time == samples["process_start_time_seconds", None]
    assert found.info["0"]["num_gpu_blocks"] == "8192"


def test_b13_of_several_processes_the_largest_gauge_counts(data: Path) -> None:
    text = (data / "kv-multiproc.prom").read_text(encoding="utf-8")
    found = read(text + 'vllm:kv_cache_usage_perc{engine="1",model_name="m",pid="9"} 0.2\n')
    usage = {key.engine: v for key, v in found.values.items() if key.signal == "kv_cache_usage_ratio"}
    assert usage == {"0": 0.653, "1": 0.2}
    assert found.repeated == {"kv_cache_usage_ratio"}
    assert value(text, "running_requests") == 48


def test_b14_old_new_and_rewritten_names_give_one_value(data: Path) -> None:
    old = (data / "metrics-old-names.prom").read_text(encoding="utf-8")
    both = old + 'vllm:kv_cache_usage_perc{model_name="m"} 0.41\n'
    texts = [old, both, old.replace("vllm:", "vllm_"), 'sglang:token_usage{model_name="m",tp_rank="0"} 0.41\n']
    assert [value(text, "kv_cache_usage_ratio") for text in texts] == [0.41] * 4
    assert read(both).names["kv_cache_usage_ratio"] == "vllm:kv_cache_usage_perc"
    assert read(old).names["kv_cache_usage_ratio"] == "vllm:gpu_cache_usage_perc"
    assert value(old, "inter_token_latency_seconds_count") == 33880
    assert read("myengine:kv_usage 0.41\n").values == {}


def test_sglang_ranks_priorities_and_both_queues() -> None:
    text = """\
sglang:num_running_reqs{tp_rank="0",priority=""} 7.0
sglang:num_running_reqs{tp_rank="0",priority="1"} 3.0
sglang:num_running_reqs{tp_rank="1",priority=""} 7.0
sglang:num_queue_reqs{tp_rank="0"} 2.0
sglang:num_grammar_queue_reqs{tp_rank="0"} 1.0
sglang:num_running_reqs{dp_rank="1",tp_rank="0"} 4.0
sglang:time_to_first_token_seconds_count{is_streaming="true"} 5
sglang:time_to_first_token_seconds_count{is_streaming="false"} 6
sglang:realtime_tokens_total{mode="decode"} 90
sglang:realtime_tokens_total{mode="prefill_compute"} 400
sglang:generation_tokens_total 80
sglang:prefill_effective_tokens_total{mode="input"} 300
sglang:prefill_effective_tokens_total{mode="device_hit"} 100
"""
    assert value(text, "running_requests") == 7
    assert value(text, "running_requests", "1") == 4
    assert value(text, "waiting_requests") == 3
    assert value(text, "ttft_seconds_count") == 11
    assert value(text, "output_tokens") == 90
    assert value(text, "prompt_tokens_by_source", source="prefill_compute") == 400
    assert (value(text, "prefix_cache_hits"), value(text, "prefix_cache_queries")) == (100, 400)


@pytest.mark.parametrize(
    ("text", "signal", "expected"),
    [
        ("tgi_batch_current_size 4", "running_requests", 4),
        ("tgi_request_input_length_sum 900", "prompt_tokens", 900),
        ("tgi_request_queue_duration_sum 1.5", "queue_time_seconds_sum", 1.5),
        ("llamacpp:requests_deferred 2", "waiting_requests", 2),
        ("llamacpp:tokens_predicted_seconds_total 12.5", "inter_token_latency_seconds_sum", 12.5),
        ('lmdeploy:num_api_requests_waiting{engine="0"} 2', "waiting_requests", 2),
        ('lmdeploy:iter_token_latency_sum{engine="0"} 2', "inter_token_latency_seconds_sum", 2),
        ('trtllm_kv_cache_utilization{model_name="undefined"} 0.5', "kv_cache_usage_ratio", 0.5),
        ("trtllm:num_requests_waiting 3", "waiting_requests", 3),
        ('nv_trt_llm_request_metrics{request_type="active"} 6', "running_requests", 6),
        ("dynamo_frontend_queued_requests 5", "waiting_requests", 5),
        ("e2e_request_latency_seconds_sum 3", "e2e_latency_seconds_sum", 3),
    ],
)
def test_names_of_other_engines(text: str, signal: str, expected: float) -> None:
    assert value(text + "\n", signal) == expected


def test_only_generating_routes_count_as_answers() -> None:
    text = """\
http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 8
http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"} 1
http_requests_total{handler="/start_profile",method="POST",status="4xx"} 3
"""
    assert value(text, "http_responses", status="2xx") == 9
    assert value(text, "http_responses", status="4xx") is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("vllm:num_requests_running 2 1700000000000", 2),
        ('vllm:num_requests_running{model_name="a } b {\\" c"} 2', 2),
        ('vllm:num_requests_running{model_name="m"}\t2', 2),
        ("vllm:num_requests_running NaN", None),
        ("vllm:num_requests_running +Inf", None),
        ("vllm:num_requests_running two", None),
        ("# vllm:num_requests_running 2", None),
        ('vllm:num_requests_running{model_name="m" 2', None),
    ],
)
def test_lines_of_every_shape(line: str, expected: float | None) -> None:
    assert value(line + "\n", "running_requests") == expected


@given(st.text(alphabet=st.sampled_from('vllm:num_requests_running{}=", \\\n0123456789.eE+-#\t\u2028'), max_size=80))
def test_no_text_is_an_error(text: str) -> None:
    assert all(isinstance(v, float) for v in read("vllm:num_requests_running" + text).values.values())


def test_what_stands_before_a_number_is_read_once(dump: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Exposition()
    first = reader.read(dump)
    monkeypatch.setattr(exposition, "text_string_to_metric_families", None)
    assert reader.read(dump).values == first.values


def test_a_text_of_the_same_layout_is_not_taken_apart_again(dump: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Exposition()
    first = reader.read(dump)
    monkeypatch.setattr(exposition, "_split", None)
    assert reader.read(dump) == first
    later = reader.read(re.sub(r"(?m)^([^#\s].*) \S+$", r"\1 7", dump))
    assert later.values.keys() == first.values.keys()
    assert later.values[Key("prompt_tokens", "0", ())] == 7


LINES = st.sampled_from(
    [
        "vllm:num_requests_running 3",
        'vllm:num_requests_running{engine="1"} 4',
        'vllm:num_requests_running{engine="1"} 5',
        "vllm:num_requests_running NaN",
        "vllm:num_requests_waiting 1 1700000000000",
        "vllm:prompt_tokens_total  12",
        'sglang:num_queue_reqs{tp_rank="0"} 2',
        'sglang:num_queue_reqs{tp_rank="1"} 6',
        "sglang:num_grammar_queue_reqs +Inf",
        'vllm:kv_cache_usage_perc{pid="1"} 0.5',
        'vllm:kv_cache_usage_perc{pid="2"} 0.25',
        'http_requests_total{handler="/v1/completions",status="2xx"} 8',
        'http_requests_total{handler="/v1/chat/completions",status="2xx"} 9',
        'vllm:cache_config_info{block_size="16"} 1',
        "process_start_time_seconds 1000",
        "# HELP vllm:num_requests_running 5",
        "no sample",
        "other_total 1",
        "",
    ]
)


@given(st.lists(st.lists(LINES, max_size=8), min_size=2, max_size=5))
def test_what_was_read_before_changes_nothing_that_is_read_now(texts: list[list[str]]) -> None:
    reader = Exposition()
    for lines in texts:
        found, fresh = reader.read("\n".join(lines)), read("\n".join(lines))
        # Labels of settings are kept: they do not change while a server runs.
        assert found._replace(info={}) == fresh._replace(info={})


# Recording


def test_a_new_label_set_started_at_zero_when_it_was_not_there(tmp_path: Path) -> None:
    aborted = VLLM + 'vllm:request_success_total{finished_reason="abort"} 4\n'
    telemetry = recorded(tmp_path, [(10, VLLM), (11, aborted)])
    (series,) = telemetry.series("requests_finished")
    assert (series.time.tolist(), series.value.tolist()) == ([10 * SECOND, 11 * SECOND], [0, 4])
    assert series.increase() == 4
    assert series.labels == {"reason": "abort"}


def test_engines_have_a_scope_each_and_samples_share_their_time(tmp_path: Path) -> None:
    telemetry = recorded(tmp_path, [(10, VLLM + 'vllm:num_requests_running{engine="1"} 5\n')])
    running = {s.scope: (s.time.tolist(), s.value.tolist()) for s in telemetry.series("running_requests")}
    assert running == {"engine/0": ([10 * SECOND], [3]), "engine/1": ([10 * SECOND], [5])}


@pytest.mark.parametrize(
    ("before", "after", "restarts"),
    [
        ("vllm:prompt_tokens_total 100\n", "vllm:prompt_tokens_total 30\n", 1),
        ("process_start_time_seconds 1000\n", "process_start_time_seconds 2000\n", 1),
        ("vllm:prompt_tokens_total 100\n", "vllm:prompt_tokens_total 130\n", 0),
        ("vllm:num_requests_running 9\n", "vllm:num_requests_running 1\n", 0),
    ],
)
def test_restarts(before: str, after: str, restarts: int, tmp_path: Path) -> None:
    telemetry = recorded(tmp_path, [(1, VLLM + before), (2, VLLM + after), (3, VLLM + after)])
    assert len(list(telemetry.events("engine_restart"))) == restarts


def test_a_server_that_does_not_answer_for_a_while_is_noted_once(tmp_path: Path) -> None:
    telemetry = recorded(tmp_path, [(1, VLLM), (2, None), (3, None), (5, VLLM)])
    (gone,), (back,) = telemetry.events("metrics_unreachable"), telemetry.events("metrics_answering")
    assert (gone.time_ns, gone.text) == (2 * SECOND, "HTTP 503")
    assert (back.time_ns, back.value) == (5 * SECOND, 3.0)
    assert telemetry.series("running_requests")[0].time.tolist() == [SECOND, 5 * SECOND]


def test_a_server_that_has_ended_is_no_error(tmp_path: Path) -> None:
    with recording(tmp_path) as made:
        probe = ServingProbe()
        with Server({"/v1/models": models("vllm"), "/metrics": (200, TEXT, VLLM)}) as server:
            (task, *_) = probe.start(command(server, "vllm", "serve"), made.out)
            task.run(made.out)
        probe._client.close()
        probe._scraper._client = new_client()  # type: ignore[union-attr]
        task.run(made.out)
        task.run(made.out)
        probe.stop(made.out)
        telemetry = made.read()
    assert [event.text for event in telemetry.events("metrics_unreachable")] == ["no answer"]
    assert telemetry.series("running_requests")[0].value.tolist() == [3]


def test_sources_and_merged_processes_are_facts(tmp_path: Path, data: Path) -> None:
    text = (data / "kv-multiproc.prom").read_text(encoding="utf-8")
    telemetry = recorded(tmp_path, [(1, text)])
    assert telemetry.facts("signal_sources")[""]["kv_cache_usage_ratio"] == "vllm:kv_cache_usage_perc"
    assert telemetry.facts("merged_over_processes") == {"": ["kv_cache_usage_ratio"]}
    assert telemetry.facts("engine") == {"": "vllm"}


# Finding the endpoint


def run_probe(folder: Path, context: ProbeContext, ticks: int = 2):  # type: ignore[no-untyped-def]
    """What a probe records in some ticks of its tasks."""
    with recording(folder) as made:
        probe = ServingProbe()
        tasks = probe.start(context, made.out)
        for _ in range(ticks):
            made.clock.at_ns += SECOND
            for task in tasks:
                task.run(made.out)
        probe.stop(made.out)
        return made.read()


def command(server: Server, *words: str) -> ProbeContext:
    return ProbeContext(os.getpid(), (*words, "--port", str(server.port)))


SGLANG_INFO = {"model_path": "/data/private/llama", "tp_size": 2, "api_key": "sk-secret", "version": "0.5.23"}


@pytest.mark.parametrize(
    ("engine", "version", "routes"),
    [
        ("vllm", "0.32.0", {"/v1/models": models("vllm"), "/version": (200, JSON, '{"version":"0.32.0"}')}),
        ("sglang", "0.5.23", {"/v1/models": models("sglang"), "/server_info": (200, JSON, json.dumps(SGLANG_INFO))}),
        ("sglang", "0.5.23", {"/get_server_info": (200, JSON, json.dumps(SGLANG_INFO))}),
        ("tgi", "3.3.5", {"/v1/models": models("m"), "/info": (200, JSON, '{"model_id":"m","version":"3.3.5"}')}),
        ("llama.cpp", None, {"/v1/models": models("llamacpp"), "/props": (200, JSON, '{"total_slots":4}')}),
        ("lmdeploy", None, {"/v1/models": models("lmdeploy")}),
        # A key closes the list of models: /ping tells vLLM from TensorRT-LLM.
        (
            "vllm",
            "0.32.0",
            {
                "/v1/models": (401, JSON, '{"error":"Unauthorized"}'),
                "/version": (200, JSON, '{"version":"0.32.0"}'),
                "/ping": (200, TEXT, ""),
            },
        ),
    ],
)
def test_engines_are_recognised(engine: str, version: str | None, routes: dict, tmp_path: Path) -> None:  # type: ignore[type-arg]
    with Server({**routes, "/metrics": (200, TEXT, VLLM)}) as server:
        telemetry = run_probe(tmp_path, command(server, "python", "serve.py"))
    assert telemetry.facts("engine") == {"": engine}
    assert telemetry.facts("engine_version") == ({"": version} if version else {})
    assert telemetry.series("running_requests")[0].value.tolist() == [3, 3]
    assert (b"secret" in (tmp_path / "telemetry.sqlite").read_bytes()) is False


def test_the_port_is_found_in_the_process_tree(tmp_path: Path) -> None:
    with Server({"/v1/models": models("vllm"), "/metrics": (200, TEXT, VLLM)}) as server:
        telemetry = run_probe(tmp_path, ProbeContext(os.getpid()))
    (found,) = telemetry.events("metrics_found")
    assert found.text == f"port {server.port}, /metrics"


def test_ports_of_other_processes_are_left_alone(tmp_path: Path) -> None:
    with (
        Server({"/v1/models": models("vllm"), "/metrics": (200, TEXT, VLLM)}) as server,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other,
    ):
        telemetry = run_probe(tmp_path, ProbeContext(other.pid))
        other.communicate(b"\n")
    assert server.asked == {}
    assert "--metrics-url" in str(telemetry.why_missing("engine"))


def test_where_the_command_names_a_port_no_other_is_asked(tmp_path: Path) -> None:
    routes = {"/v1/models": models("vllm"), "/metrics": (200, TEXT, VLLM)}
    with Server(routes) as named, Server(routes) as other:
        run_probe(tmp_path, command(named, "vllm", "serve"))
    assert named.asked["/metrics"] > 1
    assert other.asked == {}


@pytest.mark.parametrize(("ticks", "times"), [(8, 1), (40, 2)])
def test_a_port_that_is_no_engine_is_asked_once_more_and_left_alone(tmp_path: Path, ticks: int, times: int) -> None:
    with Server({"/metrics": (200, TEXT, "my_app_requests_total 3\n")}) as server:
        telemetry = run_probe(tmp_path, ProbeContext(os.getpid()), ticks=ticks)
    assert set(server.asked.values()) == {times}
    assert telemetry.series("running_requests") == []


@pytest.mark.parametrize(("ticks", "times"), [(8, 1), (20, 2), (400, 6)])
def test_a_port_that_does_not_speak_yet_is_asked_ever_more_rarely(tmp_path: Path, ticks: int, times: int) -> None:
    asked: list[object] = []

    def refuse(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, peer = server.accept()
                asked.append(peer)
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as early:
        threading.Thread(target=refuse, args=(early,), daemon=True).start()
        run_probe(tmp_path, ProbeContext(os.getpid()), ticks=ticks)
        early.shutdown(socket.SHUT_RDWR)
    assert len(asked) == times


def test_certificates_are_read_when_https_is_asked_for_and_then_they_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[ssl.SSLContext] = []
    real = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda *a, **k: made.append(real(*a, **k)) or made[-1])
    with Server({"/metrics": (200, TEXT, VLLM)}) as server, new_client() as client:
        assert get(client, f"{server.url}/metrics").text == VLLM
        assert made == []
        assert get(client, server.url.replace("http", "https")).status == 0
    assert [context.verify_mode for context in made] == [ssl.CERT_REQUIRED]


def test_a_server_that_starts_late_is_found(tmp_path: Path) -> None:
    with Server({}) as server, recording(tmp_path) as made:
        probe = ServingProbe()
        (task, *_) = probe.start(command(server, "vllm", "serve"), made.out)
        task.run(made.out)
        assert made.read().series("running_requests") == []
        server.routes.update({"/v1/models": models("vllm"), "/metrics": (200, TEXT, VLLM)})
        task.run(made.out)
        assert len(made.read().series("running_requests")) == 1
        probe.stop(made.out)


def test_a_json_queue_is_looked_at_once_at_most(tmp_path: Path) -> None:
    with Server({"/v1/models": models("x"), "/metrics": (200, JSON, '[{"iter": 1}]')}) as server:
        telemetry = run_probe(tmp_path, command(server, "python", "serve.py"), ticks=5)
    assert server.asked["/metrics"] == 1
    assert "return_perf_metrics: true" in str(telemetry.why_missing("engine"))


@pytest.mark.parametrize("words", [("trtllm-serve", "model"), ("python", "serve.py")])
def test_a_known_queue_is_never_touched(words: tuple[str, ...], tmp_path: Path) -> None:
    routes = {"/v1/models": models("x"), "/version": (200, JSON, '{"version":"1.3"}'), "/metrics": (200, JSON, "[]")}
    with Server(routes) as server:
        telemetry = run_probe(tmp_path, command(server, *words), ticks=3)
        assert server.asked["/metrics"] == 0
        assert "return_perf_metrics: true" in str(telemetry.why_missing("engine"))
        server.routes["/prometheus/metrics"] = (200, TEXT, "trtllm_num_requests_running 6\n")
        telemetry = run_probe(tmp_path, command(server, *words))
    assert server.asked["/metrics"] == 0
    assert telemetry.facts("engine") == {"": "tensorrt-llm"}
    assert telemetry.series("running_requests")[0].value.tolist() == [6, 6]


def test_metrics_that_are_off_say_how_to_switch_them_on(tmp_path: Path) -> None:
    with Server({"/v1/models": models("sglang")}) as server:
        telemetry = run_probe(tmp_path, command(server, "python", "-m", "sglang.launch_server"))
    assert telemetry.why_missing("engine") == "sglang serves no metrics: start the server with --enable-metrics"


def test_a_redirect_on_the_same_host_is_followed_and_no_other(tmp_path: Path) -> None:
    with Server({"/v1/models": models("sglang")}) as server:
        server.routes["/metrics"] = (307, TEXT, "/metrics/")
        server.routes["/metrics/"] = (200, TEXT, VLLM)
        telemetry = run_probe(tmp_path, command(server, "x"))
        assert len(telemetry.series("running_requests")) == 1
        server.routes["/metrics/"] = (307, TEXT, "/metrics")
        assert run_probe(tmp_path, command(server, "x")).series("running_requests") == []
        server.routes["/metrics/"] = (200, TEXT, VLLM)
        server.routes["/metrics"] = (307, TEXT, f"http://localhost:{server.port}/metrics/")
        telemetry = run_probe(tmp_path, command(server, "x"))
        assert telemetry.series("running_requests") == []


@pytest.mark.parametrize("form", ["{url}/metrics", "{url}", "127.0.0.1:{port}", "{url}/gateway/m"])
def test_a_url_that_the_user_names_is_used(form: str, tmp_path: Path) -> None:
    routes = {"/v1/models": models("vllm"), "/metrics": (200, TEXT, VLLM), "/gateway/m": (200, TEXT, VLLM)}
    with Server(routes) as server:
        url = form.format(url=server.url, port=server.port)
        telemetry = run_probe(tmp_path, ProbeContext(0, metrics_url=url))
    assert len(telemetry.series("running_requests")) == 1


def test_the_first_and_the_last_text_are_kept_without_private_parts(tmp_path: Path) -> None:
    private = 'vllm:num_requests_running{model_name="/home/someone/llama",Hostname="node7"} %d\n'
    with Server({"/v1/models": models("vllm", "/home/someone/llama")}) as server, recording(tmp_path) as made:
        probe = ServingProbe()
        (task, *_) = probe.start(command(server, "vllm", "serve"), made.out)
        for number in (1, 2, 3):
            server.routes["/metrics"] = (200, TEXT, private % number)
            task.run(made.out)
        probe.stop(made.out)
        telemetry = made.read()
    texts = [event.text for event in telemetry.events("scrape")]
    assert [text.split()[-1] for text in texts] == ["1", "3"]
    assert telemetry.facts("model") == {"": "llama"}
    recorded_bytes = (tmp_path / "telemetry.sqlite").read_bytes()
    assert b"someone" not in recorded_bytes and b"node7" not in recorded_bytes


def test_the_runner_reports_the_probe(tmp_path: Path) -> None:
    with Server({"/v1/models": models("vllm"), "/metrics": (200, TEXT, VLLM)}) as server, recording(tmp_path) as made:
        runner = ProbeRunner([ServingProbe()], made._file, command(server, "vllm", "serve"))
        runner.start()
        runner.stop()
    assert (runner.reports[0].state, runner.reports[0].tasks["scrape"]["errors"]) == ("ok", 0)


# Words of commands, settings and logs


@pytest.mark.parametrize(
    ("words", "engine", "ports"),
    [
        ("vllm serve m --port 9001", "vllm", [9001]),
        ("python -m vllm.entrypoints.openai.api_server --port=9001", "vllm", [9001]),
        ("python -m sglang.launch_server --model-path vllm-model --port 30001", "sglang", [30001]),
        ("trtllm-serve m --port 8000", "tensorrt-llm", [8000]),
        ("llama-server -m model.gguf --metrics --port 8080", "llama.cpp", [8080]),
        ("text-generation-launcher --model-id m", "tgi", []),
        ("python train.py --port here", None, []),
    ],
)
def test_words_of_a_command(words: str, engine: str | None, ports: list[int]) -> None:
    assert engine_of_command(words.split()) == engine
    assert ports_of_command(words.split()) == ports


def test_settings_of_a_command_are_those_that_are_known() -> None:
    words = "vllm serve m --max-num-seqs 64 --api-key sk-secret --kv-cache-dtype=fp8 --enforce-eager --port 1"
    assert settings_of_command(words.split()) == {"max_num_seqs": 64, "kv_cache_dtype": "fp8", "enforce_eager": True}
    assert settings_of_command([]) == {}


def test_settings_of_a_server_are_those_that_are_known() -> None:
    found = {
        "model_path": "/data/x",
        "api_key": "sk-secret",
        "mem_fraction_static": 0.85,
        "quantization": None,
        "attention_backend": "a path/with a slash",
        "internal_states": [{"max_running_requests": 48, "admin_api_key": "sk-secret"}],
    }
    assert known_settings(found) == {"mem_fraction_static": 0.85, "max_running_requests": 48}


def test_log_lines() -> None:
    lines = [
        "INFO 12-02 10:00:00 [core.py:1] GPU KV cache size: 1,048,576 tokens",
        "Maximum concurrency for 2,048 tokens per request: 12.34x",
        "Chunked prefill is enabled with max_num_batched_tokens=8192.",
        "non-default args: {'model': '/home/someone/m', 'max_num_seqs': 64, 'api_key': 'sk-secret'}",
        "max_total_num_tokens=1000, chunked_prefill_size=8192, max_running_requests=48, available_gpu_mem=5.50 GB",
        "INFO:     Application startup complete.",
        "Cudagraph is disabled under eager mode",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "a prompt that someone logged",
    ]
    found = list(read_log(lines))
    facts = {f.name: f.value for f in found if not f.is_event}
    assert facts == {
        "kv_cache_tokens": 1_048_576,
        "kv_cache_concurrency": 12.34,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 64,
        "max_total_num_tokens": 1000,
        "chunked_prefill_size": 8192,
        "max_running_requests": 48,
        "available_gpu_memory_gb": 5.5,
        "cuda_graphs_off": True,
    }
    assert [f.name for f in found if f.is_event] == ["ready", "out_of_memory"]


def test_the_log_is_read_on_from_where_it_was(tmp_path: Path) -> None:
    lines: list[str] = ["INFO:     Application startup complete."]
    with recording(tmp_path) as made:
        probe = ServingProbe()
        _, log, *_ = probe.start(ProbeContext(0, log_lines=lambda: list(lines)), made.out)
        log.run(made.out)
        lines += ["GPU KV cache size: 100 tokens", *["KV cache pool is full. Retract requests. #retracted_reqs: 1"] * 3]
        lines.append("ERROR EngineCore encountered a fatal error.")
        log.run(made.out)
        log.run(made.out)
        telemetry = made.read()
        probe.stop(made.out)
    assert len(list(telemetry.events("engine_ready"))) == 1
    assert telemetry.facts("log_kv_cache_tokens") == {"": 100}
    assert [event.value for event in telemetry.events("engine_preemption")] == [3]
    assert [event.text for event in telemetry.events("engine_died")] == ["EngineCore encountered a fatal error"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('a{model_name="/home/someone/m"} 1', 'a{model_name=".../m"} 1'),
        ('a{model_name="meta-llama/Llama-3.1-8B"} 1', 'a{model_name="meta-llama/Llama-3.1-8B"} 1'),
        ('a{handler="/v1/completions"} 1', 'a{handler="/v1/completions"} 1'),
        ('a{key="hf_abcdefghijklmnopqrstuvwxyz0123456789ABCDEF"} 1', 'a{key="removed"} 1'),
        ('a{Hostname="node7",gpu="0"} 1', 'a{Hostname="removed",gpu="0"} 1'),
    ],
)
def test_private_parts_of_a_scrape(text: str, expected: str) -> None:
    assert without_private(text) == expected


# DCGM

DCGM = """\
# TYPE DCGM_FI_PROF_SM_ACTIVE gauge
DCGM_FI_PROF_SM_ACTIVE{gpu="0",UUID="GPU-a",Hostname="node7"} 0.5
DCGM_FI_PROF_SM_ACTIVE{gpu="1",UUID="GPU-b",Hostname="node7"} 0.25
DCGM_FI_PROF_SM_ACTIVE{gpu="1",UUID="GPU-b",Hostname="node7",GPU_I_ID="2"} 0.9
# TYPE DCGM_FI_PROF_DRAM_ACTIVE_UTIL_RATIO gauge
DCGM_FI_PROF_DRAM_ACTIVE_UTIL_RATIO{gpu="0",UUID="GPU-a"} 0.75
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a"} 99
"""


def test_a_dcgm_exporter_gives_hardware_counters_per_gpu(tmp_path: Path) -> None:
    with Server({"/metrics": (200, TEXT, DCGM)}) as server, recording(tmp_path) as made, new_client() as client:
        dcgm.DcgmExporter(client, f"{server.url}/metrics").sample(made.out)
        telemetry = made.read()
    assert {(s.signal, s.scope): s.value.tolist() for s in telemetry.all_series} == {
        ("gpm_sm_active_ratio", "gpu/GPU-a"): [0.5],
        ("gpm_sm_active_ratio", "gpu/GPU-b"): [0.25],
        ("gpm_dram_ratio", "gpu/GPU-a"): [0.75],
    }


def test_an_exporter_that_the_user_names_does_not_end_the_search(tmp_path: Path) -> None:
    routes = {"/v1/models": models("vllm"), "/metrics": (200, TEXT, VLLM)}
    with Server({"/metrics": (200, TEXT, DCGM)}) as exporter, Server(routes) as server:
        context = ProbeContext(os.getpid(), ("vllm", "--port", str(server.port)), metrics_url=f"{exporter.url}/metrics")
        telemetry = run_probe(tmp_path, context, ticks=3)
    assert len(telemetry.series("gpm_sm_active_ratio")) == 2
    assert len(telemetry.series("running_requests")) == 1
