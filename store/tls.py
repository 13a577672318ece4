"""TLS from PEM files that may be replaced while they are in use."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

REREAD_EVERY = 10.0  # seconds between two checks whether a listener's files were replaced


class TlsContexts:
    """Builds a client's TLS contexts from PEM files, and returns the same one while the files do not change."""

    def __init__(self) -> None:
        self._made: tuple[tuple[object, ...], ssl.SSLContext] | None = None

    def context(
        self, ca: str | None, certificate: str | None = None, key: str | None = None, *, verify: bool = True
    ) -> ssl.SSLContext:
        """Return the context. `ca` None trusts the system's authorities. Raises `OSError` and `ssl.SSLError`."""
        contents = (verify, *(Path(path).read_bytes() if path else None for path in (ca, certificate, key)))
        if self._made is not None and self._made[0] == contents:
            return self._made[1]
        context = ssl.create_default_context(cafile=ca)
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # many clusters' authorities lack extensions that it requires
        if not verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if certificate:
            context.load_cert_chain(certificate, key)
        self._made = contents, context
        return context


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A listener's certificate and key, and the authority whose client certificates it requires; PEM files.

    Changed files apply to new connections after at most `REREAD_EVERY` seconds; while a file can't be read, the former
    certificate stays in use. An authority that was removed from its file is trusted until the next start.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return a server's context made from the files. Raises `OSError`, and with it `ssl.SSLError`."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.load_into(context)
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def load_into(self, context: ssl.SSLContext) -> None:
        """Load the files into the context as its certificate and authority."""
        context.load_cert_chain(self.certificate, self.key)
        if self.client_ca is not None:
            context.load_verify_locations(self.client_ca)

    def state(self) -> list[object]:
        """Return a value that changes when a file does."""
        return [file_state(path) for path in (self.certificate, self.key, self.client_ca) if path is not None]


def file_state(path: Path) -> object:
    """Return a value that changes when the file does; None for a file that can't be read."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
