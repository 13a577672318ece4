"""Settings of plugins, and the paths into answers."""

from __future__ import annotations

from typing import Any

import pytest

from controllers.tasks.api.errors import BadConfig
from controllers.tasks.patterns.remote import WebApiConfig
from controllers.tasks.patterns.sync import SyncConfig
from controllers.tasks.plugins.http_api import HttpSettings, Remote, found, job_id


def test_settings_out_of_range_are_reported_together() -> None:
    """All seven ranges of a web-API plugin, in one error; those of a synchronous one likewise."""
    zero = dict.fromkeys(
        ("cache_size", "workers", "resync_seconds", "read_qps", "read_burst", "write_qps", "write_burst"), 0
    )
    with pytest.raises(BadConfig) as caught:
        WebApiConfig(**zero, max_system_failures=0, batch_size=0, call_timeout=0).check()  # type: ignore[arg-type]
    problems = str(caught.value).split("; ")
    assert [problem.split()[0] for problem in problems] == list(zero)
    WebApiConfig().check()
    with pytest.raises(BadConfig, match=r"threads is 0.*; .*timeout is 0, not above 0"):
        SyncConfig(threads=0, timeout=0, write_qps=0, write_burst=0).check()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("$", {"a": [{"b-c": 1}, 2]}),
        ("$.a[0].b-c", 1),
        ("$['a'][-1]", 2),
        ("$.a[7]", None),
        ("$.a.b", None),
        ("$.x.y[0]", None),
    ],
)
def test_a_path_leads_to_its_value_or_nowhere(path: str, value: Any) -> None:
    assert found(path, {"a": [{"b-c": 1}, 2]}) == value


@pytest.mark.parametrize("path", ["", "a", "$a", "$..a", "$.a[*]", "$.a[?(@.b)]", "$.a[", "$. a"])
def test_a_path_of_another_language_is_an_error(path: str) -> None:
    with pytest.raises(BadConfig, match="is no path"):
        found(path, {})


@pytest.mark.parametrize(("job", "expected"), [({"id": 7}, "7"), ({"id": ""}, None), ({"id": True}, None), ([], None)])
def test_an_id_is_a_text_or_a_number(job: Any, expected: str | None) -> None:
    assert job_id("$.id", job) == expected


@pytest.mark.parametrize(
    "url", ["ftp://host", "http://", "http://user:secret@host/", "http://host/?a=b", "http://host/#x", "host/path", ""]
)
def test_a_remote_needs_a_plain_base(url: str) -> None:
    with pytest.raises(BadConfig, match="remote api: url"):
        HttpSettings(remotes={"api": Remote(url=url)}).check()
    HttpSettings(remotes={"api": Remote(url="https://host:8443/api/")}).check()
