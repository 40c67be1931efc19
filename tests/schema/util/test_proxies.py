"""Which requests pass a proxy of the environment."""

from __future__ import annotations

import httpx
import pytest
from botocore.utils import should_bypass_proxies

from schema.util.proxies import passed_over, proxy_of, spared

PROXIES = {
    "http_proxy": "http://me:secret@plain:3128",
    "HTTPS_PROXY": "http://[fd00::9]:3128",
    "all_proxy": "socks5://all",
}
PLAIN, TLS = "the proxy plain:3128 of http_proxy", "the proxy [fd00::9]:3128 of HTTPS_PROXY"
TABLE: list[tuple[str, str | None, str]] = [
    ("http://127.0.0.1:9000", "", ""),
    ("https://127.5.5.5", "", ""),
    ("http://[::1]:9000", "", ""),
    ("http://LOCALHOST", "", ""),
    ("http://a.localhost", "", ""),
    ("http://0.0.0.0:9000", "", ""),
    ("http://[::ffff:127.0.0.1]:9000", "", ""),
    ("http://10.1.2.3:9000", None, ""),
    ("https://172.31.0.1", None, ""),
    ("https://172.32.0.1", None, TLS),
    ("http://192.168.1.1", None, ""),
    ("http://169.254.169.254/latest", None, ""),
    ("http://[fd12::3]", None, ""),
    ("http://minio:9000", None, ""),
    ("https://teacher.default.svc.cluster.local", None, ""),
    ("https://api.example.com", None, TLS),
    ("http://api.example.com", None, PLAIN),
    ("http://8.8.8.8", None, PLAIN),
    ("http://198.51.100.7", None, PLAIN),
    ("http://[2001:db8::1]", None, PLAIN),
    ("http://minio:9000", "", PLAIN),
    ("http://10.1.2.3", "example.com", PLAIN),
    ("http://10.1.2.3", "10.0.0.0/8", ""),
    ("http://[fd12::3]", "fd00::/8", ""),
    ("http://[fd12::3]", "[fd12::3]", ""),
    ("http://minio:9000", "other minio", ""),
    ("http://minio:9000", "minio:9000", ""),
    ("https://api.example.com", "example.com", ""),
    ("https://api.example.com", "x.com, .example.com", ""),
    ("https://api.example.com", "*.example.com", ""),
    ("https://badexample.com", "example.com", TLS),
    ("https://api.example.com", "*", ""),
]  # fmt: skip


@pytest.mark.parametrize(("url", "no_proxy", "passed"), TABLE)
def test_what_passes_a_proxy(url: str, no_proxy: str | None, passed: str) -> None:
    env = {**PROXIES, **({} if no_proxy is None else {"NO_PROXY": no_proxy})}
    proxy, over = proxy_of(url, env), passed_over(url, env)
    assert (str(proxy or ""), over is None) == (passed, bool(passed))
    again = {**env, **spared(env)}
    assert proxy_of(url, again) == proxy, "processes that get the longer list decide alike"


def test_libraries_go_straight_to_what_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """httpx (the hub's) and botocore read other parts of NO_PROXY."""
    near = {"AWS_ENDPOINT_URL": "http://minio:9000", "JUDGE": "http://10.0.0.5/v1", "HERE": "http://127.0.0.2"}
    far = {"HF_ENDPOINT": "http://hub.example.com"}
    for name, value in {**PROXIES, "all_proxy": "", **spared({**PROXIES, **near, **far})}.items():
        monkeypatch.setenv(name, value)
    with httpx.Client() as client:
        for url, straight in [*((url, True) for url in near.values()), (far["HF_ENDPOINT"], False)]:
            transport = client._transport_for_url(httpx.URL(url))
            assert (transport is client._transport, should_bypass_proxies(url)) == (straight, straight), url


def test_without_a_proxy_nothing_changes() -> None:
    assert spared({"NO_PROXY": "x", "AWS_ENDPOINT_URL": "http://minio:9000", "http_proxy": ""}) == {}
    assert proxy_of("http://example.com", {"http_proxy": "", "HTTP_PROXY": "http://p"}) is None
    assert proxy_of("http://example.com", {"ALL_PROXY": "http://p"}, reads_all=False) is None
    assert str(proxy_of("http://example.com", {"ALL_PROXY": "p:1"})) == "the proxy p:1 of ALL_PROXY"
