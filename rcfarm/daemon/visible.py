"""Escape control characters: text from pods, files and other tenants must not control an operator's terminal.

Escaped are C0 (except for the line feed), DEL, C1, the bidirectional controls, and surrogates.
"""

from __future__ import annotations

import re

_CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Return the text with each control character escaped, such as `\x1b` or `\u202e`."""
    return _CONTROLS.sub(
        lambda found: f"\\x{ord(found[0]):02x}" if found[0] < "\u0100" else f"\\u{ord(found[0]):04x}", text
    )


def visible_json(document: str) -> str:
    r"""Return the same JSON with control characters escaped, such as `\u009b`. JSON itself has escaped C0 already."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", document)
