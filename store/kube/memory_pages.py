"""Page tokens of `MemoryKube`: the version that a list shows, and the key after which its next page begins."""

from __future__ import annotations

import base64
import binascii
from typing import NamedTuple

import msgspec

from store.kube.memory_errors import bad_request


class Token(NamedTuple):
    version: int
    after: str

    def encode(self) -> str:
        """As a caller gets it, and must not look into."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()

    @classmethod
    def decode(cls, text: str) -> Token:
        """Raises `BadRequest`."""
        try:
            return msgspec.json.decode(base64.urlsafe_b64decode(text), type=cls)
        except (binascii.Error, msgspec.DecodeError, ValueError) as error:
            raise bad_request(f"invalid continue token: {error}") from None
