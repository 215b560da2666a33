"""A web page that points its own name to this machine (DNS rebinding) is not served."""

from __future__ import annotations

import pytest

from tellin.entrypoints.openai.hosts import host_check
from tellin.entrypoints.openai.server_config import ServerConfig
from tests.openai.conftest import Server

OURS = ["localhost", "localhost:8000", "LOCALHOST.:80", "127.0.0.1:8000", "127.8.8.8",
        "[::1]:8000", "10.0.0.7:8000", "a.localhost", "host.docker.internal:8000",
        "workstation:8000", ""]  # fmt: skip
STRANGE = ["evil.com", "evil.com:8000", "EVIL.COM.", "localhost.evil.com", "127.0.0.1.nip.io",
           "127.0.0.1.evil.com:8000", "evil.com:127.0.0.1", "xlocalhost.com", "printer.local",
           "0x7f.1", "[::1.evil.com]"]  # fmt: skip


@pytest.mark.parametrize("listen", ["127.0.0.1", "::1", "localhost", "127.0.0.2"])
def test_on_loopback_without_keys(listen: str) -> None:
    is_ours = host_check(ServerConfig(host=listen))
    assert [host for host in OURS if not is_ours(host)] == []
    assert [host for host in STRANGE if is_ours(host)] == []


@pytest.mark.parametrize(
    "config",
    [
        ServerConfig(host="0.0.0.0"),
        ServerConfig(host="::"),
        ServerConfig(api_keys=("k",)),
        ServerConfig(allowed_hosts=("*",)),
    ],
)
def test_a_proxy_may_keep_the_name(config: ServerConfig) -> None:
    """Others reach it anyway, or need a key, or it was said."""
    is_ours = host_check(config)
    assert all(is_ours(host) for host in OURS + STRANGE)


def test_allowed_hosts_are_a_limit_everywhere() -> None:
    config = ServerConfig(host="0.0.0.0", api_keys=("k",), allowed_hosts=("LLM.example.com",))
    is_ours = host_check(config)
    assert is_ours("llm.example.com:443")
    assert is_ours("127.0.0.1:8000")
    assert not is_ours("example.com")
    assert not is_ours("evil.llm.example.com")


@pytest.mark.parametrize("path", ["/", "/engine/state", "/v1/models", "/metrics", "/page/chat.js"])
def test_a_rebound_name_gets_nothing(server: Server, path: str) -> None:
    answer = server.http.get(path, headers={"Host": "evil.com:8000"})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "host_not_allowed"
    assert "--allowed-host" in answer.json()["error"]["message"]
    assert server.http.get(path, headers={"Host": "localhost:8000"}).status_code in (200, 404)


def test_probes_are_open_and_bodies_are_refused(server: Server) -> None:
    strange = {"Host": "evil.com", "Content-Type": "application/json"}
    assert server.http.get("/health", headers=strange).status_code == 200
    answer = server.http.post(
        "/v1/completions", headers=strange, content=b'{"prompt": "x", "max_tokens": 1}'
    )
    assert answer.status_code == 403
