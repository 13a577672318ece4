"""TLS from PEM files that may be replaced while we run: contexts of clients, and the certificate of a listener."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

REREAD_EVERY = 10.0  # seconds between two looks whether a listener's files were replaced


class TlsContexts:
    """Makes a client's TLS contexts of PEM files, and gives the same one again while the files hold the same."""

    def __init__(self) -> None:
        self._made: tuple[tuple[object, ...], ssl.SSLContext] | None = None

    def context(
        self, ca: str | None, certificate: str | None = None, key: str | None = None, *, verify: bool = True
    ) -> ssl.SSLContext:
        """`ca` None trusts the system's authorities. Raises `OSError` and `ssl.SSLError`."""
        contents = (verify, *(Path(path).read_bytes() if path else None for path in (ca, certificate, key)))
        if self._made is None or self._made[0] != contents:
            self._made = contents, _tls_context(ca, certificate, key, verify)
        return self._made[1]


def _tls_context(ca: str | None, certificate: str | None, key: str | None, verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # many clusters' authorities lack extensions that it asks for
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if certificate:
        context.load_cert_chain(certificate, key)
    return context


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A listener's certificate and key, and the authority whose client certificates it requires; PEM files.

    Changed files count for new connections from at most `REREAD_EVERY` seconds later on; what can't be read leaves the
    former certificate in use. An authority that was taken out of its file counts until the next start.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """A server's context with what the files hold. Raises `OSError`, and with it `ssl.SSLError`."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.load_into(context)
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def load_into(self, context: ssl.SSLContext) -> None:
        """Make it the context's certificate and authority."""
        context.load_cert_chain(self.certificate, self.key)
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)

    def state(self) -> list[object]:
        """What changes when a file does."""
        return [file_state(path) for path in (self.certificate, self.key, self.client_ca) if path is not None]


def file_state(path: Path) -> object:
    """What changes when the file does; None for one that can't be read."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
