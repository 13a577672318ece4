"""A certificate authority for tests: server certificates for the loopback interface, client certificates for users."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Certificate(NamedTuple):
    """PEM files."""

    certificate: Path
    key: Path


class Authority:
    """Keeps its own certificate and all that it issues in `directory`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.own = Certificate(directory / "ca.crt", directory / "ca.key")
        if not self.own.certificate.exists():
            new_key(self.own.key)
            _openssl("req", "-x509", "-key", self.own.key, "-out", self.own.certificate, "-subj", "/CN=test-ca")

    def issue(self, name: str, *, user: str = "", groups: Sequence[str] = (), host: str = "localhost") -> Certificate:
        """Return a certificate in files `name.*`: for a server on 127.0.0.1 and `host`, or for the client `user` of
        `groups`."""
        issued = Certificate(self.directory / f"{name}.crt", self.directory / f"{name}.key")
        new_key(issued.key)
        subject = "".join(f"/O={group}" for group in groups) + f"/CN={user or name}"
        usage = "clientAuth" if user else "serverAuth"
        request, extensions = self.directory / f"{name}.csr", self.directory / f"{name}.ext"
        extensions.write_text(f"subjectAltName=IP:127.0.0.1,DNS:{host}\nextendedKeyUsage={usage}\n")
        _openssl("req", "-new", "-key", issued.key, "-subj", subject, "-out", request)
        signing = ["-CA", self.own.certificate, "-CAkey", self.own.key, "-CAcreateserial", "-extfile", extensions]
        _openssl("x509", "-req", "-in", request, *signing, "-days", 30, "-out", issued.certificate)
        return issued


def new_key(path: Path) -> None:
    """Return a private key on P-256."""
    _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path)


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, stdin=subprocess.DEVNULL)
