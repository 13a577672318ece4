"""The data store: the same behaviour of every backend, and what hostile references and servers meet."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from controllers.tasks.api.data import DataMetadata
from controllers.tasks.io.data import (
    BadReference,
    DataDenied,
    DataNotFound,
    DataStore,
    DataTooLarge,
    DataUnavailable,
    MemoryBackend,
    open_data,
)
from tests.support.tasks.object_server import ObjectServer, object_server

S3 = {"access_key_id": "AK", "secret_access_key": "SHIBBOLETH", "region": "eu-1"}


@asynccontextmanager
async def opened(kind: str, path: Path) -> AsyncIterator[DataStore]:
    if kind in ("memory", "directory"):
        data = open_data("memory:" if kind == "memory" else str(path / "a b"), max_dataset_size_bytes=1000)
        yield data
        data.close()
        return
    async with object_server() as server:
        yield at(server, kind, max_dataset_size_bytes=1000)


def at(
    server: ObjectServer, kind: str = "http", *, timeout: float = 20.0, max_dataset_size_bytes: int = 1000
) -> DataStore:
    if kind == "s3":
        return open_data(
            "s3://bucket/some/prefix",
            options={**S3, "endpoint": server.url},
            max_dataset_size_bytes=max_dataset_size_bytes,
            timeout=timeout,
        )
    url = server.url.replace("http://", "http://eve:SHIBBOLETH@") + "/some/prefix?token=SHIBBOLETH"
    return open_data(url, max_dataset_size_bytes=max_dataset_size_bytes, timeout=timeout)


@pytest.mark.parametrize("kind", ["memory", "directory", "s3", "http"])
async def test_every_backend_behaves_alike(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as data:
        reference = data.construct_reference(data.base, "p/d", "exec-1", "outputs.json")
        assert reference == f"{data.base}/p/d/exec-1/outputs.json"
        assert await data.head(reference) == DataMetadata(False)
        with pytest.raises(DataNotFound, match=r"outputs.json: there is no such data"):
            await data.read(reference)
        await data.write(reference, b"former")
        await data.write(reference, b"x" * 1000)
        assert await data.head(reference) == DataMetadata(True, 1000)
        assert await data.read(reference) == b"x" * 1000
        with pytest.raises(DataTooLarge) as caught:
            await data.read(reference, limit=999)
        assert (caught.value.limit, caught.value.size, caught.value.reference) == (999, 1000, reference)
        with pytest.raises(DataTooLarge):
            await data.write(reference, b"y" * 1001)
        assert await data.read(reference) == b"x" * 1000
        empty = data.construct_reference(data.base, "empty")
        await data.write(empty, b"")
        assert (await data.head(empty), await data.read(empty)) == (DataMetadata(True, 0), b"")


@pytest.mark.parametrize("kind", ["memory", "directory", "s3"])
async def test_delete_takes_what_is_below_a_prefix_and_no_neighbour(kind: str, tmp_path: Path) -> None:
    async with opened(kind, tmp_path) as data:
        references = [data.construct_reference(data.base, name) for name in ("a/1", "a/b/2", "ab/3", "ab/4")]
        for reference in references:
            await data.write(reference, b".")
        await data.delete(data.construct_reference(data.base, "a"))
        await data.delete(data.construct_reference(data.base, "a"))
        await data.delete(references[3])
        assert [(await data.head(each)).exists for each in references] == [False, False, True, False]


@pytest.mark.parametrize(
    "path",
    ["../x", "a/../x", "a//x", ".hidden", "a/./x", "a\\x", "a%2e%2e", "a\0", "a b", "a\nb", "é", "-x", "x" * 256],
)
async def test_a_part_that_could_mean_something_else_is_refused(path: str, tmp_path: Path) -> None:
    async with opened("directory", tmp_path) as data:
        for call in (data.head, data.read, data.delete):
            with pytest.raises(BadReference):
                await call(f"{data.base}/{path}")
        with pytest.raises(BadReference):
            data.construct_reference(data.base, path)
        with pytest.raises(BadReference, match="not below"):
            await data.read(f"file:///etc/{path}")
        with pytest.raises(BadReference, match="not below"):
            await data.read(data.base.removesuffix("%20b") + "bc/x")


async def test_no_link_leads_out_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("outside")
    root = tmp_path / "data"
    (root / "in").mkdir(parents=True)
    (root / "file").symlink_to(tmp_path / "secret")
    (root / "folder").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    data = open_data(str(root), timeout=5)
    for path in ("file", "folder/secret", "pipe"):
        with pytest.raises(BadReference):
            await data.read(f"{data.base}/{path}")
        with pytest.raises(BadReference):
            await data.head(f"{data.base}/{path}")
    with pytest.raises(BadReference):
        await data.write(f"{data.base}/folder/secret", b"changed")
    await data.write(f"{data.base}/file", b"inside")  # replaces the link itself
    await data.delete(f"{data.base}/folder")
    assert (tmp_path / "secret").read_text() == "outside"
    assert (root / "file").read_text() == "inside"
    with pytest.raises(DataNotFound):
        await data.read(f"{data.base}/in")
    data.close()


async def test_a_file_that_grows_under_the_reader_stays_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = open_data(str(tmp_path), max_dataset_size_bytes=10)
    (tmp_path / "x").write_bytes(b"1" * 11)
    real = os.fstat
    monkeypatch.setattr(os, "fstat", lambda file: os.stat_result([*real(file)[:6], 3, *real(file)[7:]]))
    with pytest.raises(DataTooLarge):
        await data.read(f"{data.base}/x")
    data.close()


async def test_a_failed_write_leaves_the_former_content_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = open_data(str(tmp_path))
    await data.write(f"{data.base}/x", b"former")

    def full(_: int) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataUnavailable, match="No space left"):
        await data.write(f"{data.base}/x", b"new")
    assert os.listdir(tmp_path) == ["x"]
    assert await data.read(f"{data.base}/x") == b"former"
    data.close()


@pytest.mark.parametrize("kind", ["s3", "http"])
@pytest.mark.parametrize(("status", "error"), [(403, DataDenied), (404, DataNotFound), (400, DataUnavailable)])
async def test_refusals_of_a_server_are_typed_and_show_no_credentials(
    kind: str, status: int, error: type[Exception]
) -> None:
    async with object_server() as server:
        data = at(server, kind)
        server.status = status
        with pytest.raises(error) as caught:
            await data.read(f"{data.base}/x")
    shown = "".join(traceback.format_exception(caught.value)) + repr(data) + repr(caught.value)
    assert "SHIBBOLETH" not in shown
    assert f"{data.base}/x" in str(caught.value)


async def test_credentials_of_a_url_reach_the_server() -> None:
    async with object_server() as server:
        data = at(server)
        await data.write(f"{data.base}/x", b"1")
        assert server.authorizations[0].startswith("Basic ")
        assert server.queries[0] == "token=SHIBBOLETH"
        assert list(server.objects) == ["/some/prefix/x"]


async def test_a_server_that_hangs_costs_the_time_limit() -> None:
    async with object_server() as server:
        data = at(server, timeout=0.2)
        server.hangs = True
        with pytest.raises(DataUnavailable, match="no answer"):
            await data.read(f"{data.base}/x")


async def test_a_process_ends_normally_while_calls_are_in_progress() -> None:
    """A library whose own threads call into Python aborts some of these processes as the interpreter exits."""
    script = """
import asyncio, sys
from controllers.tasks.io.data import open_data
data = open_data(sys.argv[1])
async def main():
    await data.write(data.base + '/x', b'1')
    reads = [asyncio.create_task(data.read(data.base + '/x')) for _ in range(30)]
    await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
asyncio.run(main())
"""
    async with object_server() as server:
        started = [asyncio.create_subprocess_exec(sys.executable, "-c", script, server.url) for _ in range(6)]
        processes = await asyncio.gather(*started)
        assert await asyncio.gather(*(process.wait() for process in processes)) == [0] * 6


async def test_a_body_without_end_is_bounded() -> None:
    """obstore refuses an answer without a length, and reads no further than an announced one."""
    async with object_server() as server:
        data = at(server, timeout=5)
        server.is_endless = True
        with pytest.raises((DataUnavailable, DataTooLarge)):
            await data.read(f"{data.base}/x")
        assert server.sent < 10 * 2**20


async def test_a_backend_that_hangs_costs_the_time_limit() -> None:
    class Hanging(MemoryBackend):
        async def read(self, path: str, limit: int) -> bytes:
            await asyncio.sleep(3600)
            raise AssertionError

    data = DataStore("memory://data", Hanging(), timeout=0.01)
    with pytest.raises(DataUnavailable, match=r"memory://data/x: no answer within 0.01 s"):
        await data.read("memory://data/x")


@pytest.mark.parametrize(
    "url", ["", "data", "http://[", "http://eve:x℀@h/", "ftp://h/x", "s3://", "file:data", "https:///x"]
)
def test_a_url_of_no_store_names_the_forms(url: str) -> None:
    with pytest.raises(BadReference, match="expected memory:"):
        open_data(url)


def test_an_invalid_url_or_option_is_one_error_without_credentials() -> None:
    for url, options in (("http://eve:SHIBBOLETH@h:port/x", {}), ("s3://bucket", {"SHIBBOLETH": "SHIBBOLETH"})):
        with pytest.raises(BadReference, match="can't be opened") as caught:
            open_data(url, options=options)
        assert "SHIBBOLETH" not in "".join(traceback.format_exception(caught.value))


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(DataUnavailable, match=r"pip install 'rcfarm\[objects\]'"):
        open_data("s3://bucket/x")
    assert open_data("memory:").base == "memory://data"
