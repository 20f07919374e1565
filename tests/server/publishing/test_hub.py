"""The hosts that a download may ask: the hub's own, and those that huggingface.co stores files on."""

from __future__ import annotations

import pytest

from server.publishing.hub import is_hub_url

OFFICIAL, OWN = "https://huggingface.co", "http://127.0.0.1:8080"


@pytest.mark.parametrize(
    ("url", "hub_url"),
    [
        (f"{OWN}/a/b", OWN),
        (f"{OFFICIAL}:443/a", OFFICIAL),
        ("https://cas-bridge.xethub.hf.co/x?y", OFFICIAL),
        ("https://cdn-lfs.huggingface.co/x", OFFICIAL),
        ("https://HUB.example/x", "https://hub.example"),
    ],
)
def test_the_hub_is_asked(url: str, hub_url: str) -> None:
    assert is_hub_url(url, hub_url)


@pytest.mark.parametrize(
    ("url", "hub_url"),
    [
        ("http://127.0.0.1:8081/x", OWN),
        ("https://127.0.0.1:8080/x", OWN),
        ("http://localhost:8080/x", OWN),
        ("http://169.254.169.254/latest", OWN),
        ("http://cdn-lfs.huggingface.co/x", OFFICIAL),
        ("https://evil-hf.co/x", OFFICIAL),
        ("https://hf.co.evil.com/x", OFFICIAL),
        ("https://huggingface.co@evil.com/x", OFFICIAL),
        ("https://cdn-lfs.huggingface.co/x", OWN),
        ("file:///etc/passwd", OFFICIAL),
        (OFFICIAL, "https://hub.example"),
    ],
)
def test_no_other_host_is_asked(url: str, hub_url: str) -> None:
    assert not is_hub_url(url, hub_url)
