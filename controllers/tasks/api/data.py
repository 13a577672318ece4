"""Inputs, outputs, secrets and the catalog of results, as a plugin sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from controllers.tasks.api.phase import ExecutionError

DataReference = str
"""The URL of one blob in a data store."""

Literals = Mapping[str, Any]
"""Inputs or outputs by name. Values are JSON values, `datetime`, `timedelta` and `Blob`."""

T_co = TypeVar("T_co", covariant=True)


class Blob(msgspec.Struct, frozen=True, tag_field="literal", tag="blob"):
    """A value that is kept elsewhere, at `uri`. `hash`: of its content; the catalog then compares the hash alone."""

    uri: str
    format: str = ""
    hash: str = ""


class DataMetadata(NamedTuple):
    """What is known of a blob without reading it. `size` in bytes; 0 if the blob does not exist."""

    exists: bool
    size: int = 0


class DataStore(Protocol):
    """Blobs by reference. Errors are `DataError`s of `controllers.tasks.io.data`."""

    @property
    def max_dataset_size_bytes(self) -> int: ...

    def construct_reference(self, reference: DataReference, *parts: str) -> DataReference:
        """Return the reference extended by parts, joined by "/"."""

    async def head(self, reference: DataReference) -> DataMetadata:
        """Return the metadata; an absent blob is no error."""

    async def read(self, reference: DataReference, *, limit: int | None = None) -> bytes:
        """Return the blob. `limit`: bytes, lower than the store's own."""

    async def write(self, reference: DataReference, content: bytes) -> None:
        """Create or replace the blob in one step."""


class InputFilePaths(Protocol):
    """Where the inputs are kept."""

    def get_input_prefix_path(self) -> DataReference:
        """Return the folder of the inputs."""

    def get_input_path(self) -> DataReference:
        """Return the file of the inputs."""


class InputReader(InputFilePaths, Protocol):
    """The inputs of an execution."""

    async def get(self) -> Literals:
        """Return the inputs, read at most once in a round; empty without inputs. Raises `DataError`."""


class OutputFilePaths(Protocol):
    """Where an attempt's outputs belong. Raw outputs and checkpoints have a folder of each attempt's own."""

    def get_raw_output_prefix(self) -> DataReference:
        """Return the folder of data that outputs refer to."""

    def get_previous_checkpoints_prefix(self) -> DataReference:
        """Return the folder of the last attempt's checkpoints, "" if there is none."""

    def get_checkpoint_prefix(self) -> DataReference:
        """Return the folder of this attempt's checkpoints."""

    def get_output_prefix_path(self) -> DataReference:
        """Return the folder of the outputs."""

    def get_output_path(self) -> DataReference:
        """Return the file of the outputs."""

    def get_deck_path(self) -> DataReference:
        """Return the file of the report for people."""

    def get_error_path(self) -> DataReference:
        """Return the file that remote work writes an error to."""


class OutputError(msgspec.Struct, frozen=True):
    """An error that the work reported. `is_recoverable`: another attempt may avoid it."""

    error: ExecutionError
    is_recoverable: bool = False


class OutputReader(Protocol):
    """The result of an attempt: an error, a file of outputs, or outputs in memory."""

    async def is_error(self) -> bool:
        """Return true if the work reported an error."""

    async def read_error(self) -> OutputError:
        """Return the error."""

    async def is_file(self) -> bool:
        """Return true if the outputs are a file at the attempt's output path already."""

    async def exists(self) -> bool:
        """Return true if there are outputs."""

    async def read(self) -> Literals | OutputError:
        """Return the outputs, or why they can't be used."""

    async def deck_exists(self) -> bool:
        """Return true if there is a report for people."""


class OutputWriter(OutputFilePaths, Protocol):
    """Takes the result of an attempt."""

    async def put(self, reader: OutputReader) -> None:
        """Keep the reader; the engine reads it when the plugin reports success. The last call counts."""


class SecretManager(Protocol):
    """Access to secrets. Their values belong neither in logs nor in events nor in plugin state."""

    async def get(self, key: str) -> str:
        """Return the secret. Raises `SecretNotFound`, which names the places that were searched."""


class CatalogKey(msgspec.Struct, frozen=True):
    """The identity of a cached result: the task, its cache version, its interface, and its inputs. The order of inputs
    does not matter."""

    task: str
    cache_version: str
    inputs: dict[str, Any]
    outputs: dict[str, str] = {}


class DownloadRequest(msgspec.Struct, frozen=True):
    """Copy the cached result of `key` to `target`'s output path."""

    key: CatalogKey
    target: OutputWriter


class UploadRequest(msgspec.Struct, frozen=True):
    """Store the result as that of `key`. `metadata`: what is shown about where it comes from."""

    key: CatalogKey
    artifact_data: OutputReader
    metadata: dict[str, str] = {}


class DownloadResponse(msgspec.Struct, frozen=True):
    """Which requests had a cached result, in the order of the requests. An absent result is no error."""

    cached_results: tuple[bool, ...]

    def get_cached_count(self) -> int:
        """Return the number of results that were cached."""
        return sum(self.cached_results)


class CatalogFuture(Generic[T_co]):
    """A batch in progress. Awaiting it returns the response, or raises the batch's error. It goes on if a coroutine
    that awaits it is cancelled.

    The catalog makes it; `taken` is called once its response or error was taken: the same requests then are a new
    batch.
    """

    def __init__(self, task: asyncio.Task[T_co], taken: Callable[[], object]) -> None:
        self.task = task
        self._taken = taken
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # an error may stay untaken

    def done(self) -> bool:
        """Return true if the response or the error is there."""
        return self.task.done()

    def result(self) -> T_co:
        """Return the response, or raise the batch's error. Raises `asyncio.InvalidStateError` before it is done."""
        if self.task.done():
            self._taken()
        return self.task.result()

    def __await__(self) -> Generator[Any, None, T_co]:
        yield from asyncio.wait([self.task]).__await__()
        return self.result()


class AsyncCatalog(Protocol):
    """Cached results by task and inputs. Batches run in the background, and survive the round in this process only."""

    def download(self, requests: Sequence[DownloadRequest]) -> CatalogFuture[DownloadResponse]:
        """Start to fetch results. Repeating a batch joins the one in progress."""

    def upload(self, requests: Sequence[UploadRequest]) -> CatalogFuture[None]:
        """Start to store results. Repeating a batch joins the one in progress."""
