"""Secrets: where they come from, and that no text shows them."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from controllers.tasks.api.errors import SecretNotFound
from controllers.tasks.io.secrets import BadSecret, SecretManager, SecretUnavailable, SecretValue
from store.embedded.store import EmbeddedStore
from store.kv.protocol import Denied, Entry
from store.redaction import Redactor

VALUE = 'pä+/"s\\s word'


async def test_the_first_place_that_has_the_secret_answers(tmp_path: Path) -> None:
    store = EmbeddedStore()
    environ: dict[str, str] = {}
    secrets = SecretManager(environ=environ, env_prefix="P_", directory=tmp_path, store=store)
    with pytest.raises(SecretNotFound) as caught:
        await secrets.get("api-key")
    for place in ("P_api-key", str(tmp_path / "api-key"), "rcfarm-secrets/api-key"):
        assert place in str(caught.value)
    await store.put("rcfarm-secrets/api-key", b"of the store")
    assert await secrets.get("api-key") == "of the store"
    (tmp_path / "api-key").write_text("of the file\n")
    assert await secrets.get("api-key") == "of the file"
    environ["P_api-key"] = "of the environment"
    assert await secrets.get("api-key") == "of the environment"
    assert secrets.redactor.text("of the store, of the file, of the environment") == ", ".join(["[redacted]"] * 3)
    assert "of the" not in repr(secrets)
    await store.close()


async def test_a_mounted_secret_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "key").write_text("value")
    (tmp_path / "key").symlink_to("..data/key")
    assert await SecretManager(environ={}, directory=tmp_path).get("key") == "value"


@pytest.mark.parametrize("key", ["", "../x", "a/b", ".hidden", "a\0", "x" * 129, "é"])
async def test_a_key_leads_nowhere_else(key: str, tmp_path: Path) -> None:
    with pytest.raises(BadSecret):
        await SecretManager(environ={}, directory=tmp_path).get(key)


async def test_a_value_that_is_no_text_is_refused_without_showing_it(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xffSHIBBOLETH")
    (tmp_path / "large").write_bytes(b"SHIBBOLETH" * 10_000)
    os.mkfifo(tmp_path / "pipe")
    secrets = SecretManager(environ={}, directory=tmp_path)
    for key, error in (("binary", BadSecret), ("large", BadSecret), ("pipe", SecretUnavailable)):
        with pytest.raises(error) as caught:
            await secrets.get(key)
        assert "SHIBBOLETH" not in str(caught.value)


async def test_a_place_that_fails_is_no_absence() -> None:
    class Refusing(EmbeddedStore):
        async def get(self, key: str, *, consistent: bool = False) -> Entry | None:
            raise Denied("no key_prefix rcfarm-secrets/")

    with pytest.raises(SecretUnavailable, match="rcfarm-secrets/key can't be read: no key_prefix"):
        await SecretManager(environ={}, store=Refusing()).get("key")


def test_a_secret_is_shown_by_no_repr_and_kept_by_no_record() -> None:
    value = SecretValue(VALUE)
    assert VALUE not in repr([value, {"k": value}])
    assert f"Bearer {value}" == f"Bearer {VALUE}"
    with pytest.raises(TypeError):
        msgspec.json.encode({"state": value})


@pytest.mark.parametrize(
    "shown",
    [
        VALUE,
        repr(VALUE),
        json.dumps(VALUE),
        json.dumps(VALUE, ensure_ascii=False),
        quote(VALUE),
        quote(VALUE, safe=""),
        base64.b64encode(VALUE.encode()).decode(),
        base64.urlsafe_b64encode(VALUE.encode()).decode(),
    ],
)
def test_every_form_of_a_secret_is_removed(shown: str) -> None:
    redactor = Redactor()
    redactor.remember(VALUE)
    cleaned = redactor.text(f"login failed: {shown} is wrong")
    assert "[redacted]" in cleaned
    assert "word" not in cleaned
    assert shown.strip("'\"=") not in cleaned


def test_structures_are_copied_without_secrets() -> None:
    redactor = Redactor()
    event: Any = {"hunter22": ["a", ("hunter22x", 1)], "b": b"hunter22", "n": None}
    assert redactor.value(event) == event
    redactor.remember("hunter22\n")
    assert redactor.value(event) == {"[redacted]": ["a", ("[redacted]x", 1)], "b": b"[redacted]", "n": None}
    error = ValueError("hunter22")
    assert redactor.process(None, "info", {"event": "x", "error": error, "n": 1}) == {
        "event": "x",
        "error": "[redacted]",
        "n": 1,
    }


def test_lines_and_longer_values_first() -> None:
    redactor = Redactor()
    for value in ("abcd", "abcdefgh", "-----BEGIN\nMIIEvQ\n-----END", "no"):
        redactor.remember(value)
    assert redactor.text("abcdefgh abcd MIIEvQ no") == "[redacted] [redacted] [redacted] no"


def test_what_is_remembered_is_bounded() -> None:
    redactor = Redactor()
    for number in range(3000):
        redactor.remember(f"secret-{number:05}")
    assert redactor.text("secret-00000 secret-02999") == "secret-00000 [redacted]"
