"""Where a controller is reached, and what is said when it is not."""

from __future__ import annotations

import socket

import pytest

from controller.client import Untrusted
from launcher.job.remote import Target
from launcher.plan.tls import controller_url, reachable_elsewhere, url_of
from tests.launcher.samples import config


@pytest.mark.parametrize(
    ("host", "here", "elsewhere"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1", socket.gethostname()),
        ("::", "[::1]", socket.gethostname()),
        ("head-node", "head-node", "head-node"),
    ],
)
def test_other_machines_are_told_an_address_that_they_reach(host: str, here: str, elsewhere: str):
    settings = config(controller={"host": host})
    assert controller_url(settings, 7) == f"http://{here}:7"
    assert url_of(settings, reachable_elsewhere(settings), 7) == f"http://{elsewhere}:7"


def test_a_certificate_that_is_not_trusted_is_no_wrong_address():
    error = Target(None, "https://h:1", "t")._refused("https://h:1", Untrusted("export COSMOS_TLS_CA"))
    assert error.render() == "export COSMOS_TLS_CA"
