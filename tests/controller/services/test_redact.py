from __future__ import annotations

from controller.services.redact import redacted, without_url_credentials


def test_credentials_are_cut_out_of_addresses() -> None:
    assert without_url_credentials({"redis": {"url": "redis://me:secret@host:6379/0"}}) == {
        "redis": {"url": "redis://host:6379/0"}
    }
    assert without_url_credentials(["unix:///run/x.sock", "a@b", 3]) == ["unix:///run/x.sock", "a@b", 3]


def test_secret_looking_keys_are_masked_wherever_they_stand() -> None:
    config = {"custom": {"api_key": "abc", "nested": [{"hf_token": "t", "password": ""}]}, "max_tokens": 5}
    assert redacted(config) == {
        "custom": {"api_key": "***", "nested": [{"hf_token": "***", "password": ""}]},
        "max_tokens": 5,
    }
