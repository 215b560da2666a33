"""Keys, limits, disconnects, drains, deaths: what a server meets besides good requests."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.openai.conftest import ENDLESS_TOKENS, SLOW, Serve, Server

TEXT = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}
ENDLESS: dict[str, Any] = LONG | {"max_tokens": ENDLESS_TOKENS}
"""A request that only an abort ends, on a slow server."""
LIMIT_S = 60.0


def wait_until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def raw_request(server: Server, body: dict[str, Any], path: str = TEXT) -> socket.socket:
    """Send a request and leave it open."""
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=LIMIT_S)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    sock.sendall(head.encode() + content)
    return sock


def live(server: Server) -> float:
    return server.metric("tellin:num_requests_running") + server.metric(
        "tellin:num_requests_waiting{"
    )


def aborted(server: Server) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("tellin:request_success_total") and '="abort"' in line
    )


# ---------------------------------------------------------------------- disconnects (P24, P56)


@pytest.fixture(scope="module")
def slow_server(serve: Serve) -> Any:
    """One sequence at a time, so that requests can be made to queue."""
    with serve(*SLOW, "--set", "max_num_seqs=1", "--max-queue", "3") as running:
        yield running


@pytest.mark.parametrize("stream", [True, False])
def test_p24_disconnect_while_generating(slow_server: Server, stream: bool) -> None:
    before = aborted(slow_server)
    sock = raw_request(slow_server, ENDLESS | {"stream": stream})
    wait_until(lambda: live(slow_server) == 1)
    if stream:
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
    sock.close()
    wait_until(lambda: live(slow_server) == 0)
    wait_until(lambda: aborted(slow_server) == before + 1)
    assert slow_server.metric("tellin:kv_cache_usage_perc") == 0
    idle_from = slow_server.core_process().cpu_times().user
    time.sleep(0.3)
    assert slow_server.core_process().cpu_times().user - idle_from < 0.1


def test_p24_disconnect_while_queued(slow_server: Server) -> None:
    before = aborted(slow_server)
    running = raw_request(slow_server, ENDLESS)
    wait_until(lambda: live(slow_server) == 1)
    queued = raw_request(slow_server, ENDLESS)
    wait_until(lambda: live(slow_server) == 2)
    queued.close()
    wait_until(lambda: live(slow_server) == 1)
    running.close()
    wait_until(lambda: live(slow_server) == 0)
    wait_until(lambda: aborted(slow_server) == before + 2)


def test_full_queue_is_429_with_retry_after(slow_server: Server) -> None:
    socks = [raw_request(slow_server, ENDLESS) for _ in range(4)]
    try:
        wait_until(lambda: live(slow_server) == 4)
        response = slow_server.http.post(TEXT, json=ENDLESS)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "engine_overloaded"
        with slow_server.client() as client, pytest.raises(openai.RateLimitError):
            client.completions.create(model=client.models.list().data[0].id, prompt="x")
        too_many = slow_server.http.post(TEXT, json=ENDLESS | {"n": 5, "temperature": 1})
        assert too_many.status_code == 400
    finally:
        for sock in socks:
            sock.close()
    wait_until(lambda: live(slow_server) == 0)
    assert slow_server.http.post(TEXT, json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_reader_that_does_not_read_holds_up_nobody(server: Server) -> None:
    body = LONG | {"stream": True, "logprobs": 20}
    lazy = [raw_request(server, body) for _ in range(4)]
    try:
        start = time.monotonic()
        response = server.http.post(TEXT, json={"prompt": "x", "max_tokens": 5})
        assert response.status_code == 200
        assert time.monotonic() - start < LIMIT_S
    finally:
        for sock in lazy:
            sock.close()
    wait_until(lambda: live(server) == 0)


def test_p25_equal_request_ids_do_not_meet(server: Server) -> None:
    def one(_: int) -> tuple[int, str, str]:
        headers = {"X-Request-Id": "same"}
        body = {"prompt": "x", "max_tokens": 30, "request_id": "mine"}
        response = httpx.post(server.url + TEXT, json=body, headers=headers, timeout=60)
        return response.status_code, response.headers["x-request-id"], response.json()["id"]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert set(pool.map(one, range(8))) == {(200, "same", "cmpl-mine")}


def test_mixed_load_leaves_nothing_behind(server: Server) -> None:
    """Good streams, disconnects and hostile requests at once: the good ones notice nothing."""
    good_body = {"prompt": "load", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    expected = server.http.post(TEXT, json=good_body).json()["choices"][0]["text"]

    def good() -> bool:
        with server.client() as client:
            chunks = client.completions.create(model="tiny", stream=True,
                                               extra_body={"ignore_eos": True}, prompt="load",
                                               max_tokens=40, temperature=0)  # fmt: skip
            return "".join(c.choices[0].text for c in chunks) == expected

    def vanish() -> bool:
        sock = raw_request(server, LONG | {"stream": True})
        sock.recv(200)
        sock.close()
        return True

    def hostile() -> bool:
        bad: Any = {"prompt": "x", "structured_outputs": {"regex": "("}}
        return httpx.post(server.url + TEXT, json=bad, timeout=60).status_code == 400

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        futures = [pool.submit(job) for _ in range(12) for job in (good, vanish, hostile)]
        assert all(future.result() for future in futures)
    wait_until(lambda: live(server) == 0)
    wait_until(lambda: server.metric("tellin:kv_cache_usage_perc") == 0)


# ---------------------------------------------------------------------- keys and limits


@pytest.fixture(scope="module")
def guarded(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Any:
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("second\n\nthird\n")
    arguments = ["--api-key", "first", "--api-key-file", str(keys), "--enable-admin"]
    limits = ["--admin-key", "boss", "--max-body-mb", "1", "--allowed-origin", "https://a.example"]
    with serve(*arguments, *limits, "--in-process") as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_keys(guarded: Server) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for key in ("first", "second", "third"):
        assert guarded.http.post(TEXT, json=body, headers=bearer(key)).status_code == 200
    for headers in ({}, bearer("fourth"), bearer("boss"), {"Authorization": "first"}):
        response = guarded.http.post(TEXT, json=body, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    for path in ("/metrics", "/v1/models", "/version", "/openapi.json", "/nonsense"):
        assert guarded.http.get(path).status_code == 401
    for path in ("/health", "/ready"):
        assert guarded.http.get(path).status_code == 200
    with guarded.client(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_admin_calls_have_a_key_of_their_own(guarded: Server) -> None:
    def call(method: str, path: str, key: str) -> httpx.Response:
        return guarded.http.request(method, path, headers=bearer(key))

    assert call("POST", "/sleep", "first").status_code == 401
    assert call("POST", "/sleep?level=9", "boss").status_code == 400
    assert call("POST", "/sleep?level=x", "boss").status_code == 400
    assert call("POST", "/sleep?mode=x", "boss").status_code == 400
    assert call("GET", "/is_sleeping", "boss").json() == {"is_sleeping": False}
    assert call("POST", "/sleep", "boss").status_code == 200
    assert call("GET", "/is_sleeping", "boss").json() == {"is_sleeping": True}
    assert guarded.http.get("/ready").status_code == 503
    assert guarded.http.get("/health").status_code == 200
    assert call("POST", "/wake_up", "boss").json() == {"is_sleeping": False}
    assert call("POST", "/reset_prefix_cache", "boss").json() == {"reset": True}
    stopped = call("POST", "/stop_profile", "boss")
    assert stopped.status_code == 409
    assert "not running" in stopped.json()["error"]["message"]
    assert call("POST", "/v1/load_lora_adapter", "boss").status_code == 400
    assert guarded.http.get("/ready").status_code == 200


def test_body_limit(guarded: Server) -> None:
    headers = bearer("first") | {"content-type": "application/json"}
    big = b'{"prompt": "' + b"x" * (1 << 20) + b'"}'
    assert guarded.http.post(TEXT, content=big, headers=headers).status_code == 413

    def pieces() -> Any:  # no Content-Length
        for start in range(0, len(big), 1 << 16):
            yield big[start : start + (1 << 16)]

    response = guarded.http.post(TEXT, content=pieces(), headers=headers)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("fault", ["gone", "bad chunk"])
def test_a_body_that_breaks_off_is_no_fault_of_the_server(server: Server, fault: str) -> None:
    """Logged and counted as 499 and not, with a traceback, as 500."""
    request_id = f"breaks-off-{fault.replace(' ', '-')}"
    host, port = server.url.removeprefix("http://").split(":")
    size = "Content-Length: 100" if fault == "gone" else "Transfer-Encoding: chunked"
    head = (
        f"POST {TEXT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"X-Request-Id: {request_id}\r\n{size}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as sock:
        sock.sendall(head.encode() + (b"{" if fault == "gone" else b"no number\r\n"))
    wait_until(lambda: any(f"{request_id} POST" in line for line in server.log))
    lines = [line for line in server.log if request_id in line]
    assert len(lines) == 1, lines
    assert f"{request_id} POST {TEXT} 499 " in lines[0]


def test_deadline(serve: Serve) -> None:
    with serve(*SLOW, "--request-timeout", "0.5", "--in-process") as running:
        response = running.http.post(TEXT, json=ENDLESS)
    assert response.status_code == 504
    assert response.json()["error"]["type"] == "timeout_error"


def test_cross_origin(guarded: Server, server: Server) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    allowed = guarded.http.options(TEXT, headers=asked)
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    refused = guarded.http.options(TEXT, headers=asked | {"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in refused.headers
    assert "access-control-allow-origin" not in server.http.options(TEXT, headers=asked).headers


def test_p57_logs_hold_no_prompts_and_no_keys(guarded: Server) -> None:
    secret = "a very private prompt"
    headers = bearer("first") | {"X-Request-Id": "id-in-the-log"}
    for body in ({"prompt": secret, "max_tokens": 2}, {"prompt": secret, "bad": secret}):
        guarded.http.post(TEXT, json=body, headers=headers)
    wait_until(lambda: any("id-in-the-log" in line for line in guarded.log))
    log = "".join(guarded.log)
    assert "private" not in log
    for key in ("first", "second", "boss"):
        assert key not in log


# ---------------------------------------------------------------------- ends


def test_it_listens_on_loopback_only(server: Server) -> None:
    assert server.url.startswith("http://127.0.0.1:")


def test_sigterm_lets_open_requests_finish(serve: Serve) -> None:
    with serve(*SLOW) as running:
        lines: list[str] = []
        has_begun = threading.Event()

        def ask() -> None:
            body = LONG | {"max_tokens": 200, "stream": True}
            with httpx.stream("POST", running.url + TEXT, json=body, timeout=60) as response:
                for line in response.iter_lines():
                    lines.append(line)
                    has_begun.set()

        thread = threading.Thread(target=ask)
        thread.start()
        assert has_begun.wait(LIMIT_S)
        running.process.send_signal(signal.SIGTERM)
        thread.join(LIMIT_S)
        assert lines[-2] == "data: [DONE]"
        assert running.process.wait(LIMIT_S) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(running.url + "/health")


def test_sigterm_aborts_what_outlives_the_drain(serve: Serve) -> None:
    with serve(*SLOW, "--drain-timeout", "0") as running:
        sock = raw_request(running, ENDLESS)
        wait_until(lambda: live(running) > 0)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(LIMIT_S) == 0
        sock.close()


def test_streams_that_outlive_the_drain_end_with_an_error(serve: Serve) -> None:
    body = ENDLESS | {"stream": True}
    lines: list[str] = []
    with serve(*SLOW, "--drain-timeout", "0.3") as running:
        with httpx.stream("POST", running.url + TEXT, json=body, timeout=LIMIT_S) as response:
            for line in response.iter_lines():
                if line and not lines:
                    running.process.send_signal(signal.SIGTERM)
                lines += [line] if line else []
        assert running.process.wait(LIMIT_S) == 0
    assert lines[-1] == "data: [DONE]"
    assert '"code":"service_unavailable"' in lines[-2]
    assert "aborted by the server, which is shutting down" in lines[-2]
    assert not any("Traceback" in line for line in running.log)


def test_what_the_end_of_the_drain_finds_unanswered_is_told_so(serve: Serve) -> None:
    with serve(*SLOW, "--drain-timeout", "0") as running:
        sock = raw_request(running, ENDLESS | {"stream": False})
        wait_until(lambda: live(running) > 0)
        running.process.send_signal(signal.SIGTERM)
        answer = b""
        while data := sock.recv(4096):
            answer += data
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"code":"service_unavailable"' in answer
        assert running.process.wait(LIMIT_S) == 0
        sock.close()
    assert not any("Traceback" in line for line in running.log)


def test_p29_death_of_the_core_ends_the_server(serve: Serve) -> None:
    with serve(*SLOW) as running:
        sock = raw_request(running, ENDLESS)
        wait_until(lambda: live(running) > 0)
        running.core_process().kill()
        answer = sock.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 503")
        assert running.process.wait(LIMIT_S) == 1
        sock.close()


def test_p29_a_stopped_core_is_unhealthy_until_it_goes_on(serve: Serve) -> None:
    with serve(*SLOW, "--health-timeout", "0.5") as running:
        sock = raw_request(running, ENDLESS)
        wait_until(lambda: live(running) > 0)
        core = running.core_process()
        core.suspend()
        try:
            wait_until(lambda: running.http.get("/health").status_code == 503)
        finally:
            core.resume()
        wait_until(lambda: running.http.get("/health").status_code == 200)
        sock.close()


def test_a_taken_port_is_told_at_once(serve: Serve, server: Server) -> None:
    port = server.url.rpartition(":")[2]
    start = time.monotonic()
    with pytest.raises(AssertionError, match="cannot listen on"), serve("--port", port):
        pass
    assert time.monotonic() - start < LIMIT_S
