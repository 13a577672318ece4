"""The files of an execution: its task and inputs, and for each attempt outputs, error, report, raw data, checkpoints.

    executions/<execution>/task.json               the template
    executions/<execution>/inputs.json             a document of literals
    executions/<execution>/<attempt>/outputs.json  a document of literals
    executions/<execution>/<attempt>/error.json    an error, see below
    executions/<execution>/<attempt>/deck.html     a report for people
    executions/<execution>/<attempt>/checkpoints/
    raw/<shard>/<execution>-<attempt>/             what outputs refer to

The error is `{"error": {"code": "…", "message": "…", "kind": "USER", "recoverable": true}}`; the kinds are USER, SYSTEM
and UNKNOWN. `<shard>` spreads raw data over 1296 prefixes, because object stores limit the rate of requests per prefix.

The objects here are made for one round, and read a file at most once in it.
"""

from __future__ import annotations

import string
from typing import Any

import msgspec

from controllers.tasks.api.data import DataStore as Blobs
from controllers.tasks.api.data import Literals, OutputError, OutputFilePaths, OutputReader
from controllers.tasks.api.names import fnv1a
from controllers.tasks.api.phase import ErrorKind, ExecutionError
from controllers.tasks.api.plugin import TaskTemplate
from controllers.tasks.io.data import BadReference, DataNotFound, DataStore, DataTooLarge
from controllers.tasks.io.literals import BadLiteral, decode_literals, encode_literals, literals_of
from store.decoding import Undecodable, from_json, json_decoder
from store.redaction import Redactor

MAX_ERROR_MESSAGE = 4096  # characters; an event carries it
MAX_ERROR_CODE = 128  # characters
MAX_ERROR_FILE = 1024 * 1024  # bytes
_SHARD = string.ascii_lowercase + string.digits


class _Error(msgspec.Struct, frozen=True):
    code: str = "Unknown"
    message: str = ""
    kind: ErrorKind = ErrorKind.UNKNOWN
    recoverable: bool = False


class _ErrorFile(msgspec.Struct, frozen=True):
    error: _Error | None = None


def raw_shard(name: str) -> str:
    """Return the two characters for a name: FNV-1a-32 of its UTF-8 bytes, modulo 36², as Flyte's shard selector."""
    first, second = divmod(fnv1a(name) % len(_SHARD) ** 2, len(_SHARD))
    return _SHARD[first] + _SHARD[second]


class TaskFile:
    """The template, for work that reads it itself; see `TaskReader`."""

    def __init__(self, data: DataStore, execution: str, template: TaskTemplate) -> None:
        self._data, self._template = data, template
        self._path = data.construct_reference(data.base, "executions", execution, "task.json")
        self._written = False

    async def read(self) -> TaskTemplate:
        """Return the template."""
        return self._template

    async def path(self) -> str:
        """Return the reference of the template, and write it on the first call. Raises `DataError`."""
        if not self._written:
            await self._data.write(self._path, msgspec.json.encode(self._template))
            self._written = True
        return self._path


class InputFile:
    """The inputs of an execution; see `InputReader`. `inline`: those that its spec has, as JSON. Without any, they are
    the file at the input path, which the operator may have put there because they are large."""

    def __init__(self, data: DataStore, execution: str, inline: dict[str, Any]) -> None:
        self._data, self._inline = data, inline
        self._prefix = data.construct_reference(data.base, "executions", execution)
        self._inputs: Literals | None = None

    def get_input_prefix_path(self) -> str:
        """Return the folder of the inputs."""
        return self._prefix

    def get_input_path(self) -> str:
        """Return the file of the inputs; `publish` writes it."""
        return f"{self._prefix}/inputs.json"

    async def get(self) -> Literals:
        """Return the inputs; empty without inputs. Raises `DataError`, and `BadLiteral` for values that are none."""
        if self._inputs is None:
            if self._inline:
                self._inputs = literals_of(self._inline)
            else:
                try:
                    self._inputs = decode_literals(await self._data.read(self.get_input_path()))
                except DataNotFound:
                    self._inputs = {}
        return self._inputs

    async def publish(self) -> None:
        """Write the file unless it is there, for work that reads it itself. Raises as `get`."""
        if not (await self._data.head(self.get_input_path())).exists:
            await self._data.write(self.get_input_path(), encode_literals(await self.get()))


class OutputFiles:
    """The paths of one attempt, and what its plugin put; see `OutputWriter`. `attempt` counts from 0. `recovered`: the
    checkpoints of an execution that this one recovers, "" if there is none."""

    def __init__(self, data: DataStore, execution: str, attempt: int, *, recovered: str = "") -> None:
        self.reader: OutputReader | None = None
        self._data, self._attempt, self._recovered = data, attempt, recovered
        self._execution = data.construct_reference(data.base, "executions", execution)
        name = f"{execution}-{attempt}"
        self._raw = data.construct_reference(data.base, "raw", raw_shard(name), name)

    def get_output_prefix_path(self) -> str:
        """Return the folder of the outputs."""
        return f"{self._execution}/{self._attempt}"

    def get_output_path(self) -> str:
        """Return the file of the outputs."""
        return f"{self.get_output_prefix_path()}/outputs.json"

    def get_error_path(self) -> str:
        """Return the file of the error."""
        return f"{self.get_output_prefix_path()}/error.json"

    def get_deck_path(self) -> str:
        """Return the file of the report."""
        return f"{self.get_output_prefix_path()}/deck.html"

    def get_raw_output_prefix(self) -> str:
        """Return the folder of raw data."""
        return self._raw

    def get_checkpoint_prefix(self) -> str:
        """Return the folder of this attempt's checkpoints."""
        return f"{self.get_output_prefix_path()}/checkpoints"

    def get_previous_checkpoints_prefix(self) -> str:
        """Return the folder of the last attempt's checkpoints; those that were recovered, or "", for the first."""
        return f"{self._execution}/{self._attempt - 1}/checkpoints" if self._attempt else self._recovered

    async def put(self, reader: OutputReader) -> None:
        """Keep the reader. The last call counts."""
        self.reader = reader

    async def collect(self) -> Literals | OutputError | None:
        """Return the outputs of an attempt that the plugin reports as a success, an error that makes it a failure, or
        None if the plugin put no reader. A reader without outputs counts as empty outputs.

        Outputs in memory are written to the output path. Raises `DataError` if they can't be read or written now.
        """
        if self.reader is None:
            return None
        if await self.reader.is_error():
            return await self.reader.read_error()
        if not await self.reader.exists():
            return {}
        outputs = await self.reader.read()
        if not isinstance(outputs, OutputError) and not await self.reader.is_file():
            try:
                await self._data.write(self.get_output_path(), encode_literals(outputs))
            except DataTooLarge as error:
                return _failure("OutputsTooLarge", str(error), recoverable=False)
            except BadLiteral as error:
                return _failure("OutputsBadFormat", str(error), recoverable=False)
        return outputs


class MemoryOutputReader:
    """A result that the plugin has itself; see `OutputReader`. `error` wins over `outputs`; without both, there are no
    outputs."""

    def __init__(self, outputs: Literals | None = None, error: OutputError | None = None) -> None:
        self._outputs, self._error = outputs, error

    async def is_error(self) -> bool:
        """Return true if there is an error."""
        return self._error is not None

    async def read_error(self) -> OutputError:
        """Return the error."""
        return self._error or _failure("ErrorFileNotFound", "the result has no error", kind=ErrorKind.SYSTEM)

    async def is_file(self) -> bool:
        """Return false."""
        return False

    async def exists(self) -> bool:
        """Return true if there are outputs."""
        return self._outputs is not None

    async def read(self) -> Literals | OutputError:
        """Return the outputs."""
        return self._outputs if self._outputs is not None else _failure("OutputsNotFound", "the result has no outputs")

    async def deck_exists(self) -> bool:
        """Return false."""
        return False


class FileOutputReader:
    """The result that the work has written to the attempt's paths; see `OutputReader`. A file that is too large or
    malformed is a failure of the attempt. `redactor` removes secrets from the error."""

    def __init__(self, data: Blobs, paths: OutputFilePaths, *, redactor: Redactor | None = None) -> None:
        self._data, self._paths = data, paths
        self._redactor = redactor or Redactor()
        self._outputs: Literals | OutputError | None = None

    async def is_error(self) -> bool:
        """Return true if the error file exists. Raises `DataError`."""
        return await self._is_there(self._paths.get_error_path())

    async def read_error(self) -> OutputError:
        """Return the error. A missing, malformed or too large file is an error with a code of its own. Raises
        `DataError` if the file can't be read now."""
        path = self._paths.get_error_path()
        try:
            text = await self._data.read(path, limit=MAX_ERROR_FILE)
        except DataNotFound:
            return _failure("ErrorFileNotFound", f"{path} does not exist", kind=ErrorKind.SYSTEM)
        except DataTooLarge as error:
            return _failure("ErrorFileTooLarge", str(error), recoverable=False)
        except BadReference as error:
            return _failure("ErrorFileBadFormat", str(error), recoverable=False)
        try:
            found = from_json(json_decoder(_ErrorFile), text).error
        except Undecodable as error:
            return _failure("ErrorFileBadFormat", f"{path}: {error}", kind=ErrorKind.SYSTEM)
        if found is None:
            return _failure("ErrorFileBadFormat", f"{path} has no field `error`", kind=ErrorKind.SYSTEM)
        message = self._redactor.text(found.message)
        if len(message) > MAX_ERROR_MESSAGE:
            message = f"{message[:MAX_ERROR_MESSAGE]}… (cut; the whole is in {path})"
        code = self._redactor.text(found.code)[:MAX_ERROR_CODE] or "Unknown"
        return OutputError(ExecutionError(code, message, found.kind), found.recoverable)

    async def is_file(self) -> bool:
        """Return true."""
        return True

    async def exists(self) -> bool:
        """Return true if the file of the outputs exists. Raises `DataError`."""
        return await self._is_there(self._paths.get_output_path())

    async def read(self) -> Literals | OutputError:
        """Return the outputs, or why they can't be used. Raises `DataError` if the file can't be read now."""
        if self._outputs is not None:
            return self._outputs
        path = self._paths.get_output_path()
        try:
            self._outputs = decode_literals(await self._data.read(path))
        except DataNotFound:
            self._outputs = _failure("OutputsNotFound", f"{path} does not exist")
        except DataTooLarge as error:
            self._outputs = _failure("OutputsTooLarge", str(error), recoverable=False)
        except BadReference as error:
            self._outputs = _failure("OutputsBadFormat", str(error), recoverable=False)
        except BadLiteral as error:
            self._outputs = _failure("OutputsBadFormat", f"{path}: {error}", recoverable=False)
        return self._outputs

    async def deck_exists(self) -> bool:
        """Return true if the report exists. Raises `DataError`."""
        return await self._is_there(self._paths.get_deck_path())

    async def _is_there(self, path: str) -> bool:
        """Return true also for what is no file that may be read, such as a link that the work has put there."""
        try:
            return (await self._data.head(path)).exists
        except BadReference:
            return True


def _failure(code: str, message: str, *, kind: ErrorKind = ErrorKind.USER, recoverable: bool = True) -> OutputError:
    return OutputError(ExecutionError(code, message, kind), recoverable)
