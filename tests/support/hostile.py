"""Texts that break decoders, for tests that one bad value harms only itself.

`mutations` is deterministic for a seed: the printed seed reproduces the findings of a fuzzing run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

LEVELS = 1500  # beyond the stack of a decoder that recurses


def nested(levels: int = LEVELS, core: bytes = b"1") -> bytes:
    """Return mappings within each other."""
    return b'{"a":' * levels + core + b"}" * levels


DEEP = nested()

FRAGMENTS = (
    DEEP,
    nested(199),
    nested(202),
    nested(9_999),
    b"[" * LEVELS + b"]" * LEVELS,
    b"[" * 70_000,
    b'{"a":[' * 700 + b"]}" * 700,
    b"1" * 5_000,
    b"-" + b"9" * 400,
    b"1e999",
    b"-1e-999",
    b"9223372036854775808",
    b"-1",
    b"1.5",
    b"NaN",
    b"Infinity",
    b"null",
    b"true",
    b"{}",
    b"[]",
    b'""',
    b'"\xff\xfe"',
    b'"\\ud800"',
    b'"\\udc00\\ud800"',
    b'"\\u0000"',
    b'"\x00"',
    b"\xef\xbb\xbf",
    b"\xff\xfe{\x00}\x00",
    b'"' + b"\\" * 4_001 + b'"',
    b'{"a":1,"a":2}',
    b"&a [*a]",
    b"*nowhere",
    b"1" + b":1" * 3_000,
    b"!!int " + b"1:" * 3_000,
    b"!!python/object/apply:os.system [true]",
    b"2001-99-99",
    b".nan",
    b"{a: &a {b: 1}, c: {<<: [*a, *a]}}",
    b"%YAML 9.9\n---\n",
    b"? [a, {b: c}]\n: d\n",
)


def explosive_yaml(levels: int = 9, fan: int = 9) -> bytes:
    """Return merge keys that merge merge keys: some hundred bytes, `fan` to the power of `levels` pairs."""
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, levels + 1):
        copies = ",".join([f"*a{level - 1}"] * fan)
        lines.append(f"a{level}: &a{level} {{<<: [{copies}]}}")
    return "\n".join(lines).encode()


def slow_yaml(size: int = 256 * 1024) -> Iterator[bytes]:
    """Return texts of about `size` bytes that take a YAML parser long."""
    yield b"{" + b"a," * (size // 2) + b"}"
    yield b"[" + b"1," * (size // 2) + b"]"
    yield b"{" + b"".join(b"%x," % number for number in range(size // 6)) + b"}"
    yield b"1" + b":1" * (size // 2)
    yield b"a: " + b"[" * size
    yield b"- " * (size // 2)
    yield b"? " * (size // 2)
    yield b"[" + b"2001-01-01," * (size // 11) + b"]"
    yield b"[" + (b"1" + b":1" * 40 + b",") * (size // 82) + b"]"
    yield explosive_yaml()


def mutations(rng: random.Random, seeds: tuple[bytes, ...], count: int) -> Iterator[bytes]:
    """Yield `count` texts: random bytes, damaged good texts, and good texts with a hostile value in them."""
    for _ in range(count):
        kind = rng.random()
        if kind < 0.2:
            yield rng.randbytes(rng.randrange(200))
        elif kind < 0.6:
            yield _damaged(rng, rng.choice(seeds))
        else:
            yield _poisoned(rng, rng.choice(seeds))


def _damaged(rng: random.Random, text: bytes) -> bytes:
    """Return the text with some bytes changed, left out, doubled or moved."""
    raw = bytearray(text)
    for _ in range(rng.randint(1, 6)):
        at, end = sorted((rng.randrange(len(raw) + 1), rng.randrange(len(raw) + 1)))
        match rng.randrange(4):
            case 0:
                raw[at : at + 1] = rng.randbytes(rng.randint(1, 4))
            case 1:
                del raw[at:end]
            case 2:
                raw[at:at] = raw[at:end]
            case _:
                raw[at:at] = rng.choice(b'{}[]",:\\0123456789eE.+-tfn \n').to_bytes()
    return bytes(raw)


def _poisoned(rng: random.Random, text: bytes) -> bytes:
    """Return a hostile fragment in the place of a value, or somewhere."""
    fragment = rng.choice(FRAGMENTS)
    colons = [at for at, byte in enumerate(text) if byte in b":[,"]
    at = rng.choice(colons) + 1 if colons and rng.random() < 0.8 else rng.randrange(len(text) + 1)
    end = at
    while end < len(text) and text[end] not in b",}]" and rng.random() < 0.97:
        end += 1
    return text[:at] + fragment + text[end:]
