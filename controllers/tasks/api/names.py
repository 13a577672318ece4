"""Generated names: what an attempt calls the objects that it creates elsewhere.

A name is a function of the execution, the node and the attempt, so each round finds what an earlier one created. Two
ways exist:

- The default. `OWNER-NODE-ATTEMPT` where that is unambiguous and fits; otherwise a readable prefix and a digest of the
  three parts, as wide as the limit permits up to 128 bits. A minimum length is met by more digest. Every name is a
  DNS-1035 label: lower-case letters, digits and "-", a letter first.
- Flyte's way, for those who move: the parts joined, or where that is too long `f` and the FNV-1a digest in base 32,
  padded with zeros to a minimum length. Names that are padded can collide ("x-1" and "x-10"), and so can 32 bits of
  digest after some 77,000 names.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from typing import Literal

import msgspec

from controllers.tasks.api.errors import TaskError

DEFAULT_NAME_LENGTH = 50  # characters of a generated name
MIN_NAME_LENGTH = 8  # the shortest digest
_WIDTH = 27  # characters: a letter and 128 bits
_PREFIX = 3  # characters of a readable prefix, and the "-" behind it; a shorter one says nothing
_PART = re.compile(r"[a-z0-9]+")
_OTHER = re.compile(r"[^a-z0-9]+")
_ALPHABET = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", b"abcdefghijklmnopqrstuvwxyz123456")
_FNV = {  # bits: offset basis, prime
    32: (0x811C9DC5, 0x01000193),
    64: (0xCBF29CE484222325, 0x100000001B3),
    128: (0x6C62272E07BB014262B821756295C58D, 0x1000000000000000000013B),
}


class BadName(TaskError, ValueError):
    """No name fits the bounds that a plugin asked for."""

    retryable = False


def generated_name(
    owner: str, node: str, attempt: int, *, max_length: int = DEFAULT_NAME_LENGTH, min_length: int = 0
) -> str:
    """Return the name of an attempt. Different parts never share a name, except by a collision of their digests.

    Lengths are in characters, `max_length` at least 8. Raises `BadName`.
    """
    _check(min_length, max_length, MIN_NAME_LENGTH)
    parts = (owner, node, str(attempt))
    plain = "-".join(parts)
    if min_length <= len(plain) <= max_length and owner[:1].isalpha() and all(map(_PART.fullmatch, parts)):
        return plain
    readable = _OTHER.sub("-", plain.lower()).strip("-")
    if not readable[:1].isalpha():
        readable = f"t{readable}"
    width = min(_WIDTH, max_length)
    room = max_length - width - 1
    prefix = f"{readable[:room].rstrip('-')}-" if room >= _PREFIX else ""
    width = max(width, min_length - len(prefix))
    data = "".join(f"{len(part)}:{part}" for part in parts)  # the lengths keep apart what joining would confuse
    return f"{prefix}f{_base32(hashlib.shake_256(data.encode()).digest(width))[: width - 1]}"


def flyte_name(
    owner: str, node: str, attempt: int, *, max_length: int = DEFAULT_NAME_LENGTH, min_length: int = 0
) -> str:
    """Return the name that Flyte gives to the attempt. Raises `BadName` if not even a digest fits."""
    _check(min_length, max_length, 0)
    plain = "-".join((owner, node, str(attempt)))
    if len(plain) <= max_length:
        return plain.ljust(min_length, "0")
    digest = flyte_digest(plain)
    if len(digest) > max_length:
        raise BadName(f"the digest {digest} has {len(digest)} characters, above the maximum of {max_length}")
    return digest


def flyte_digest(text: str, bits: Literal[32, 64, 128] = 32) -> str:
    """Return `f` and the FNV-1a digest of the text in base 32 (a to z, 1 to 6): 8, 14 or 27 characters."""
    return "f" + _base32(fnv1a(text, bits).to_bytes(bits // 8, "big"))


def fnv1a(text: str, bits: Literal[32, 64, 128] = 32) -> int:
    """Return the FNV-1a digest of the text's UTF-8 bytes."""
    digest, prime = _FNV[bits]
    for byte in text.encode():
        digest = (digest ^ byte) * prime % (1 << bits)
    return digest


class TaskExecutionIdentifier(msgspec.Struct, frozen=True):
    """Which attempt of which execution. `retry_attempt` counts from 0."""

    project: str
    domain: str
    name: str
    node_id: str
    task: str
    retry_attempt: int = 0


@dataclass(frozen=True)
class TaskExecutionID:
    """The identity of an attempt, and names made of it. The names are the same in every round of the attempt.

    `max_length`: the plugin's `generated_name_max_length`. `compatible`: Flyte's names instead of ours.
    """

    identifier: TaskExecutionIdentifier
    max_length: int = DEFAULT_NAME_LENGTH
    compatible: bool = False

    def get_generated_name(self) -> str:
        """Return the generated name, within the plugin's maximum. Raises `BadName`."""
        return self.get_generated_name_with(0, self.max_length)

    def get_generated_name_with(self, min_length: int, max_length: int) -> str:
        """Return the generated name within other bounds, in characters. Raises `BadName` if no name fits."""
        make = flyte_name if self.compatible else generated_name
        of = self.identifier
        return make(of.name, of.node_id, of.retry_attempt, max_length=max_length, min_length=min_length)

    def get_id(self) -> TaskExecutionIdentifier:
        """Return the parts of the identity."""
        return self.identifier

    def get_unique_node_id(self) -> str:
        """Return the node's id, unique in the execution."""
        return self.identifier.node_id


def _check(min_length: int, max_length: int, least: int) -> None:
    if max_length < max(least, min_length):
        raise BadName(f"no name has {min_length} to {max_length} characters (at least {least} are needed)")


def _base32(data: bytes) -> str:
    return base64.b32encode(data).translate(_ALPHABET).rstrip(b"=").decode()
