"""Control characters shown as text: what pods, files and other tenants wrote must not drive an operator's terminal.

Shown are C0 (but for the line feed), DEL, C1, the controls that turn the direction of writing around, and what is no
character at all.
"""

from __future__ import annotations

import re

_CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""The text with each control character as `\x1b` or `\u202e`."""
    return _CONTROLS.sub(_escaped, text)


def visible_json(document: str) -> str:
    r"""The same JSON, its control characters as `\u009b`. JSON itself has escaped C0 already."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
