"""Rendering of commands: each placeholder, what stays, and what is refused."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from controllers.tasks.api.data import Blob
from controllers.tasks.template import BadTemplate, Parameters, render
from tests.support.tasks.template import Paths, Task, parameters


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("{{ .Input }}", "s3://in/inputs.json"),
        ("{{.INPUT}}", "s3://in/inputs.json"),
        ("{{\t$input \n}}", "s3://in/inputs.json"),
        ("{{ .InputPrefix }}", "s3://in"),
        ("{{ .outputPREFIX }}", "s3://out"),
        ("{{ $RawOutputDataPrefix }}", "s3://raw"),
        ("{{ .PerRetryUniqueKey }}", "aname_1_"),
        ("{{ .TaskTemplatePath }}", "s3://template"),
        ("{{ .PrevCheckpointPrefix }}", '""'),
        ("{{ .CheckpointOutputPrefix }}", "s3://checkpoints"),
        ("{{ .Namespace }}", "team"),
        ("{{ .inputs.a }}", "1"),
        ("--a={{ .Inputs.a }},{{ $Inputs.b }}!", "--a=1,text!"),
    ],
)
async def test_a_placeholder_is_replaced_in_any_case_and_spacing(text: str, rendered: str) -> None:
    assert await render([text], parameters({"a": 1, "b": "text"}, name="12-name.1-")) == [rendered]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{{input}}",
        "{{ input }}",
        "{{ .InputFile }}",
        "{{ .Unknown }}",
        "{{ .Inputs.a b }}",
        "{{ .Inputs. }}",
        "{{ .Input }",
        "{ { .Input } }",
        "{{ . Input }}",
        "$Input",
    ],
)
async def test_other_text_stays_as_it_is(text: str) -> None:
    assert await render([text], parameters({"a": 1})) == [text]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-3, "-3"),
        (True, "true"),
        (False, "false"),
        (0.1, "0.1"),
        (1e300, "1e+300"),
        ("as it is", "as it is"),
        (datetime(2024, 5, 1, 12, tzinfo=UTC), "2024-05-01T12:00:00Z"),
        (datetime(2024, 5, 1, 12, 0, 0, 1500, tzinfo=UTC), "2024-05-01T12:00:00.0015Z"),
        (datetime(2024, 5, 1, 12, tzinfo=timezone(timedelta(hours=2))), "2024-05-01T10:00:00Z"),
        (timedelta(minutes=10), "600s"),
        (timedelta(milliseconds=-1500), "-1.5s"),
        (Blob("s3://b"), "s3://b"),
        ([["a", "b"], [1, 2]], "[[a,b],[1,2]]"),
        ([], "[]"),
    ],
)
async def test_the_text_of_an_input(value: Any, text: str) -> None:
    assert await render(["{{ .Inputs.a }}"], parameters({"a": value})) == [text]


@pytest.mark.parametrize("value", [None, {"b": 1}, [None], datetime(2024, 5, 1), b"a"])
async def test_an_input_without_a_text_is_refused(value: Any) -> None:
    with pytest.raises(BadTemplate, match=r"input 'a' is a .*, which has no text"):
        await render(["{{ .Inputs.a }}"], parameters({"a": value}))


async def test_all_problems_of_a_text_are_listed() -> None:
    with pytest.raises(BadTemplate, match=r"no input 'x' \(inputs: a\); there is no input 'y'"):
        await render(["{{ .Inputs.x }} {{ .Inputs.a }} {{ .Inputs.y }}"], parameters({"a": 1}))
    with pytest.raises(BadTemplate, match="inputs: none"):
        await render(["{{ .Inputs.x }}"], parameters({}))


@pytest.mark.parametrize("inserted", ["$x", r"\1", r"\g<0>", "{{ .Inputs.b }}", "{{ .Input }}", "{{", "}}"])
async def test_what_is_inserted_stays_as_it_is(inserted: str) -> None:
    given = parameters({"a": inserted, "b": "secret"}, prefix=f"s3://{inserted}")
    assert await render(["{{ .Inputs.a }} {{ .InputPrefix }}"], given) == [f"{inserted} s3://{inserted}"]


async def test_two_inserted_halves_do_not_become_a_placeholder() -> None:
    given = parameters({"a": "{{ .Inp", "b": "ut }}"})
    assert await render(["{{ .Inputs.a }}{{ .Inputs.b }}"], given) == ["{{ .Input }}"]


async def test_inputs_and_template_are_used_only_where_they_are_needed_and_once() -> None:
    given = parameters({"a": 1})
    assert isinstance(given.inputs, Paths)
    assert isinstance(given.task, Task)
    await render(["{{ .Input }} plain"], given)
    assert (given.inputs.reads, given.task.uploads) == (0, 0)
    await render(["{{ .Inputs.a }}{{ .Inputs.a }}", "{{ .Inputs.a }}", "{{ .TaskTemplatePath }}" * 2], given)
    assert (given.inputs.reads, given.task.uploads) == (1, 1)


async def test_an_upload_or_a_read_that_fails_is_raised() -> None:
    given = parameters({}, error=OSError("no answer"))
    for text in ("{{ .TaskTemplatePath }}", "{{ .Inputs.a }}"):
        with pytest.raises(OSError, match="no answer"):
            await render([text], given)
    assert await render(["{{ .Input }}"], given) == ["s3://in/inputs.json"]


async def test_missing_paths_are_refused_and_nothing_is_nothing() -> None:
    paths = parameters({}).outputs
    with pytest.raises(BadTemplate, match="paths of its inputs"):
        await render(["a"], Parameters(None, paths, "n", Task()))
    with pytest.raises(BadTemplate, match="paths of its outputs"):
        await render(["a"], Parameters(Paths({}), None, "n", Task()))
    assert await render([], Parameters(None, None, "n", Task())) == []


async def test_a_text_of_beginnings_takes_linear_time() -> None:
    text = "{{.Inputs." * 20_000 + "{{" + " " * 100_000
    assert await render([text], parameters({})) == [text]
    assert not re.search("}}", text)
