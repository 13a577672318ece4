"""The files of an execution: paths, inputs, outputs, errors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from controllers.tasks.api.data import OutputError
from controllers.tasks.api.phase import ErrorKind, ExecutionError
from controllers.tasks.api.plugin import TaskTemplate
from controllers.tasks.io.data import DataStore, open_data
from controllers.tasks.io.files import (
    MAX_ERROR_MESSAGE,
    FileOutputReader,
    InputFile,
    MemoryOutputReader,
    OutputFiles,
    TaskFile,
    raw_shard,
)
from controllers.tasks.io.literals import BadLiteral
from store.redaction import Redactor

USER, SYSTEM = ErrorKind.USER, ErrorKind.SYSTEM


def memory(limit: int = 10_000) -> DataStore:
    return open_data("memory:", max_dataset_size_bytes=limit)


def code_of(result: Any) -> tuple[str, ErrorKind, bool]:
    assert isinstance(result, OutputError)
    return result.error.code, result.error.kind, result.is_recoverable


def test_paths_are_apart_for_each_attempt() -> None:
    data = memory()
    first, second = OutputFiles(data, "job", 0, recovered="memory://data/old"), OutputFiles(data, "job", 1)
    assert first.get_output_path() == "memory://data/executions/job/0/outputs.json"
    assert second.get_error_path() == "memory://data/executions/job/1/error.json"
    assert second.get_deck_path() == "memory://data/executions/job/1/deck.html"
    assert first.get_previous_checkpoints_prefix() == "memory://data/old"
    assert OutputFiles(data, "job", 0).get_previous_checkpoints_prefix() == ""
    assert second.get_previous_checkpoints_prefix() == first.get_checkpoint_prefix()
    assert first.get_raw_output_prefix() != second.get_raw_output_prefix()
    assert second.get_raw_output_prefix() == f"memory://data/raw/{raw_shard('job-1')}/job-1"


def test_shards_of_raw_data() -> None:
    """FNV-1a-32 of `a` is 0xe40c292c, 268 modulo 1296."""
    assert 0xE40C292C % 1296 == 268 == 7 * 36 + 16
    assert raw_shard("a") == "hq"
    shards = {raw_shard(f"job-{number}") for number in range(20_000)}
    assert len(shards) == 1296
    assert {len(shard) for shard in shards} == {2}


async def test_inputs_come_from_the_spec_else_from_the_file() -> None:
    data = memory()
    inline = InputFile(data, "job", {"t": {"literal": "duration", "seconds": 1}, "n": 1})
    assert (await inline.get())["n"] == 1
    assert await InputFile(data, "job", {}).get() == {}
    await inline.publish()
    assert await InputFile(data, "job", {}).get() == await inline.get()
    await data.write(inline.get_input_path(), b"[]")
    reader = InputFile(data, "job", {})
    with pytest.raises(BadLiteral):
        await reader.get()
    await inline.publish()  # what is there stays
    assert await data.read(inline.get_input_path()) == b"[]"


async def test_the_template_is_written_on_first_use() -> None:
    data = memory()
    task = TaskFile(data, "job", TaskTemplate("job", "echo"))
    assert not (await data.head("memory://data/executions/job/task.json")).exists
    assert await data.read(await task.path()) == b'{"id":"job","type":"echo"}'
    assert (await task.read()).type == "echo"


async def test_an_error_file_is_the_attempts_error() -> None:
    data = memory()
    paths, redactor = OutputFiles(data, "job", 0), Redactor()
    redactor.remember("hunter22")
    reader = FileOutputReader(data, paths, redactor=redactor)
    assert not await reader.is_error()
    await data.write(
        paths.get_error_path(),
        b'{"error":{"code":"E1","message":"login hunter22","kind":"SYSTEM","recoverable":true},"later":1}',
    )
    assert await reader.is_error()
    assert await reader.read_error() == OutputError(ExecutionError("E1", "login [redacted]", SYSTEM), True)
    await data.write(paths.get_error_path(), b'{"error":{"message":"' + b"x" * 5000 + b'"}}')
    found = await reader.read_error()
    assert found.error.code == "Unknown"
    assert found.error.message.startswith("x" * MAX_ERROR_MESSAGE + "… (cut")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, ("ErrorFileNotFound", SYSTEM, True)),
        (b"", ("ErrorFileBadFormat", SYSTEM, True)),
        (b"{}", ("ErrorFileBadFormat", SYSTEM, True)),
        (b'{"error":{"code":1}}', ("ErrorFileBadFormat", SYSTEM, True)),
        (b'{"error":{"message":"' + b"x" * 10_000, ("ErrorFileTooLarge", USER, False)),
    ],
)
async def test_an_unusable_error_file_is_an_error_too(
    content: bytes | None, expected: tuple[str, ErrorKind, bool]
) -> None:
    data = memory(20_000)
    paths = OutputFiles(data, "job", 0)
    if content is not None:
        await data.write(paths.get_error_path(), content)
    small = open_data("memory:", max_dataset_size_bytes=9_000)
    small._backend = data._backend
    assert code_of(await FileOutputReader(small, paths).read_error()) == expected


async def test_outputs_in_memory_are_written() -> None:
    data = memory()
    writer = OutputFiles(data, "job", 0)
    await writer.put(MemoryOutputReader({"x": 1}))
    await writer.put(MemoryOutputReader({"x": 2}))
    assert await writer.collect() == {"x": 2}
    assert await data.read(writer.get_output_path()) == b'{"x":2}'


async def test_outputs_in_the_file_are_read_once() -> None:
    data = memory()
    writer = OutputFiles(data, "job", 0)
    reader = FileOutputReader(data, writer)
    await writer.put(reader)
    await data.write(writer.get_output_path(), b'{"x":1}')
    assert await writer.collect() == {"x": 1}
    await data.write(writer.get_output_path(), b'{"x":2}')
    assert await reader.read() == {"x": 1}
    assert not await reader.deck_exists()


@pytest.mark.parametrize(
    ("reader", "expected"),
    [
        (MemoryOutputReader({"x": object()}), ("OutputsBadFormat", USER, False)),
        (MemoryOutputReader({"x": "1" * 20_000}), ("OutputsTooLarge", USER, False)),
        (MemoryOutputReader({"x": 1}, OutputError(ExecutionError("E", "", SYSTEM), True)), ("E", SYSTEM, True)),
        (MemoryOutputReader({}, OutputError(ExecutionError("E", "", USER), False)), ("E", USER, False)),
    ],
)
async def test_a_success_with_unusable_outputs_is_a_failure(
    reader: MemoryOutputReader, expected: tuple[str, ErrorKind, bool]
) -> None:
    data = memory()
    writer = OutputFiles(data, "job", 0)
    await writer.put(reader)
    assert code_of(await writer.collect()) == expected
    assert not (await data.head(writer.get_output_path())).exists


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[]", ("OutputsBadFormat", USER, False)),
        (b'{"x":"' + b"1" * 10_000 + b'"}', ("OutputsTooLarge", USER, False)),
    ],
)
async def test_an_unusable_file_of_outputs_is_a_failure(content: bytes, expected: tuple[str, ErrorKind, bool]) -> None:
    large, data = memory(20_000), memory(9_000)
    data._backend = large._backend
    writer = OutputFiles(data, "job", 0)
    await large.write(writer.get_output_path(), content)
    await writer.put(FileOutputReader(data, writer))
    assert code_of(await writer.collect()) == expected


@pytest.mark.parametrize(("name", "code"), [("outputs.json", "OutputsBadFormat"), ("error.json", "ErrorFileBadFormat")])
@pytest.mark.parametrize("trap", ["link", "pipe", "folder is a file"])
async def test_what_the_work_puts_in_a_files_place_is_the_works_failure(
    tmp_path: Path, name: str, code: str, trap: str
) -> None:
    """It is neither followed nor waited for, and another call would find the same."""
    data = open_data(str(tmp_path))
    writer = OutputFiles(data, "job", 0)
    folder = tmp_path / "executions" / "job" / "0"
    folder.parent.mkdir(parents=True)
    if trap == "folder is a file":
        folder.write_text("no folder")
    else:
        folder.mkdir()
        if trap == "link":
            (folder / name).symlink_to("/etc/passwd")
        else:
            os.mkfifo(folder / name)
    await writer.put(FileOutputReader(data, writer))
    found = code_of(await writer.collect())
    assert found == (("ErrorFileBadFormat" if trap == "folder is a file" else code), USER, False)


async def test_no_reader_and_a_reader_without_outputs_differ() -> None:
    data = memory()
    writer = OutputFiles(data, "job", 0)
    assert await writer.collect() is None
    for reader in (FileOutputReader(data, writer), MemoryOutputReader()):
        await writer.put(reader)
        assert await writer.collect() == {}
        assert code_of(await reader.read()) == ("OutputsNotFound", USER, True)
