"""The removal of secrets from texts that others read."""

from __future__ import annotations

import base64
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from typing import Any
from urllib.parse import quote, quote_plus

REDACTED = "[redacted]"
_SHORTEST = 4  # characters; replacing shorter values would garble texts and give away nothing less
_REMEMBERED = 1024  # values; rotated ones are forgotten in the order of their last use


class Redactor:
    """Replaces the values of secrets in texts by `REDACTED`, also where they are quoted for URLs, JSON, base64 or
    `repr`. Values under four characters are left. Every line of a value with several lines counts as a value."""

    def __init__(self) -> None:
        self._values: OrderedDict[str, None] = OrderedDict()
        self._forms: list[str] | None = None  # of all values

    def remember(self, value: str) -> None:
        """Replace `value` from now on."""
        for each in {value, value.strip(), *(line.strip() for line in value.splitlines())}:
            if len(each) < _SHORTEST:
                continue
            if each not in self._values:
                self._forms = None
            self._values[each] = None
            self._values.move_to_end(each)
        while len(self._values) > _REMEMBERED:
            self._values.popitem(last=False)
            self._forms = None

    def text(self, text: str) -> str:
        """Return the text without secrets."""
        if self._forms is None:
            self._forms = list({form for value in self._values for form in _forms(value)})
        found = [form for form in self._forms if form in text]  # much faster than one pattern of thousands of forms
        if not found:
            return text
        return re.sub("|".join(map(re.escape, sorted(found, key=len, reverse=True))), REDACTED, text)

    def value(self, value: Any) -> Any:
        """Return a copy of a value of dicts, lists, tuples and scalars without secrets, in keys also."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, bytes):
            return self.text(value.decode(errors="replace")).encode() if self._values else value
        if isinstance(value, Mapping):
            return {self.value(name): self.value(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self.value(each) for each in value]) if type(value) in (list, tuple) else value
        return value

    def process(self, logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Redact a log event; a processor of structlog, for the place after the one that formats exceptions."""
        if not self._values:
            return event
        for name, value in event.items():
            plain = isinstance(value, str | bytes | int | float | bool | None | Mapping | list | tuple)
            event[name] = self.value(value) if plain else self.text(str(value))
        return event


def _forms(value: str) -> set[str]:
    """Return the value as it stands in texts: itself, and quoted as URLs, JSON, base64 and `repr` quote it."""
    encoded = base64.b64encode(value.encode(errors="surrogateescape")).decode().rstrip("=")
    forms = {value, quote(value, safe="", errors="replace"), quote(value, errors="replace")}
    forms |= {quote_plus(value, errors="replace"), encoded, encoded.translate(str.maketrans("+/", "-_"))}
    forms |= {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]}
    return forms
