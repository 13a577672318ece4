"""ConsulSettings: which address, token and certificates count, and what is refused."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from store.consul.client import ConsulSettings
from store.http import TlsContexts
from store.kv.protocol import Invalid


@pytest.mark.parametrize(
    ("address", "environ", "url"),
    [
        (None, {}, "http://127.0.0.1:8500"),
        (None, {"CONSUL_HTTP_ADDR": "consul.example:8501"}, "http://consul.example:8501"),
        (None, {"CONSUL_HTTP_ADDR": "consul.example"}, "http://consul.example:8500"),
        (None, {"CONSUL_HTTP_ADDR": "https://consul.example:8501"}, "https://consul.example:8501"),
        (None, {"CONSUL_HTTP_ADDR": "a:1", "CONSUL_HTTP_SSL": "true"}, "https://a:1"),
        ("consul://a:1", {"CONSUL_HTTP_ADDR": "b:2"}, "http://a:1"),
        ("consul://a:1", {"CONSUL_HTTP_SSL": "1"}, "https://a:1"),
        ("consuls://a:1", {}, "https://a:1"),
        ("http://a:1", {"CONSUL_HTTP_SSL": "true"}, "http://a:1"),
        ("consul://[::1]:8500/", {}, "http://[::1]:8500"),
    ],
)
def test_the_address(address: str | None, environ: dict[str, str], url: str) -> None:
    """An explicit address wins; the variables and the local agent follow, in this order."""
    assert ConsulSettings.from_env(address, environ=environ).url == url


def test_a_unix_socket() -> None:
    """unix:///PATH names a socket, which is also how messages call it."""
    settings = ConsulSettings.from_env(environ={"CONSUL_HTTP_ADDR": "unix:///run/consul.sock"})
    assert settings.socket == settings.place == "/run/consul.sock"


@pytest.mark.parametrize(
    ("address", "environ", "complaint"),
    [
        ("ftp://a:1", {}, "the store address 'ftp://a:1': unknown scheme 'ftp'"),
        (None, {"CONSUL_HTTP_ADDR": "a:port"}, "CONSUL_HTTP_ADDR 'a:port': .*port"),
        (None, {"CONSUL_HTTP_ADDR": "http://"}, "expected HOST:PORT"),
        ("consul://a:1/path", {}, "expected HOST:PORT"),
        (None, {"CONSUL_HTTP_SSL": "yes please"}, "CONSUL_HTTP_SSL=yes please: expected true or false"),
        (None, {"CONSUL_HTTP_TOKEN_FILE": "/does/not/exist"}, "CONSUL_HTTP_TOKEN_FILE: .*/does/not/exist"),
    ],
)
def test_mistakes_are_named(address: str | None, environ: dict[str, str], complaint: str) -> None:
    """A setting that makes no sense is an error that names where it was made."""
    with pytest.raises(Invalid, match=complaint):
        ConsulSettings.from_env(address, environ=environ)


def test_the_token_and_where_it_came_from(tmp_path: Path) -> None:
    """The variable wins over the file; the token itself is never shown."""
    file = tmp_path / "token"
    file.write_text("from-file\n")
    environ = {"CONSUL_HTTP_TOKEN_FILE": str(file)}
    settings = ConsulSettings.from_env(environ=environ)
    assert (settings.token, settings.token_source) == ("from-file", f"CONSUL_HTTP_TOKEN_FILE ({file})")
    settings = ConsulSettings.from_env(environ=environ | {"CONSUL_HTTP_TOKEN": "from-variable"})
    assert (settings.token, settings.token_source) == ("from-variable", "CONSUL_HTTP_TOKEN")
    assert "from-variable" not in repr(settings)


def test_tls_verification_can_be_switched_off() -> None:
    """CONSUL_HTTP_SSL_VERIFY=false accepts any certificate; without TLS there is nothing to verify."""
    settings = ConsulSettings.from_env("consuls://a:1", environ={"CONSUL_HTTP_SSL_VERIFY": "false"})
    context = settings.ssl_context(TlsContexts())
    assert context is not None
    assert context.verify_mode == ssl.CERT_NONE
    assert ConsulSettings.from_env("consul://a:1", environ={}).ssl_context(TlsContexts()) is None


def test_a_missing_certificate_is_named() -> None:
    """A certificate file that can't be read is an error with its name."""
    settings = ConsulSettings.from_env("consuls://a:1", environ={"CONSUL_CACERT": "/does/not/exist.pem"})
    with pytest.raises(Invalid, match=r"/does/not/exist\.pem"):
        settings.ssl_context(TlsContexts())


def test_watches_may_not_take_every_connection() -> None:
    """Settings that would let watches starve calls are refused."""
    with pytest.raises(Invalid, match=r"max_watches \(64\) must be above 0 and below max_connections \(64\)"):
        ConsulSettings(max_watches=64)
