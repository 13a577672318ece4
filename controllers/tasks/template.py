"""Rendering of commands: `{{ .Name }}` becomes a path, a name or the value of an input, as in Flyte's templates.

One pass splits a text into what stays and what is replaced, so inserted text is never read again: it may hold `{{`,
`$x` or `\\1`. Names are case-insensitive, and `$` may stand for the dot:

Input                   the inputs' file
InputPrefix             the inputs' folder
OutputPrefix            the outputs' folder
RawOutputDataPrefix     the folder of data that outputs refer to
PerRetryUniqueKey       the generated name, as an identifier of letters, digits and "_"
TaskTemplatePath        the file of the task's template; uploaded only if a text has this placeholder
PrevCheckpointPrefix    the last attempt's checkpoints, or two quotes if there are none
CheckpointOutputPrefix  this attempt's checkpoints
Namespace               the namespace in which objects are created
Inputs.NAME             the value of an input; inputs are read only if a text has such a placeholder

Other placeholders stay as they are. Collections are `[a,b]` without quotes; mappings and null have no text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from controllers.tasks.api.data import Blob, InputReader, Literals, OutputFilePaths
from controllers.tasks.api.errors import TaskError
from controllers.tasks.api.plugin import TaskExecutionContext, TaskTemplatePath

_NAMES = (
    "Input|InputPrefix|OutputPrefix|RawOutputDataPrefix|PerRetryUniqueKey|TaskTemplatePath|PrevCheckpointPrefix"
    "|CheckpointOutputPrefix|Namespace"
)
# an input's name is bounded so that a text of many beginnings without an end takes linear time
_PLACEHOLDER = re.compile(rf"\{{\{{\s*+[.$](?:Inputs\.([^}}\s]{{1,256}}+)|({_NAMES}))\s*+\}}\}}", re.IGNORECASE)
_NO_START = re.compile(r"^[^A-Za-z_]+")
_NO_PART = re.compile(r"[^A-Za-z0-9_]+")


class BadTemplate(TaskError, ValueError):
    """A text can't be rendered. The text of the error lists everything that is wrong in it."""

    retryable = False


@dataclass(frozen=True)
class Parameters:
    """What placeholders stand for. `generated_name`: that of the attempt."""

    inputs: InputReader | None
    outputs: OutputFilePaths | None
    generated_name: str
    task: TaskTemplatePath
    namespace: str = ""

    @classmethod
    def of(cls, context: TaskExecutionContext) -> Parameters:
        """Return what placeholders stand for in an attempt."""
        metadata = context.task_execution_metadata
        return cls(
            inputs=context.input_reader,
            outputs=context.output_writer,
            generated_name=metadata.get_task_execution_id().get_generated_name(),
            task=context.task_reader,
            namespace=metadata.get_namespace(),
        )


async def render(texts: Sequence[str], parameters: Parameters) -> list[str]:
    """Return the texts with their placeholders replaced. Raises `BadTemplate`, and what reading the inputs or uploading
    the template raises, which happens only if a placeholder needs it."""
    if not texts:
        return []
    if parameters.inputs is None or parameters.outputs is None:
        missing = "inputs" if parameters.inputs is None else "outputs"
        raise BadTemplate(f"a command can't be rendered without the paths of its {missing}")
    values = _Values(parameters.inputs, parameters.outputs, parameters)
    rendered = []
    for text in texts:
        pieces, problems, end = [], [], 0
        for match in _PLACEHOLDER.finditer(text):
            pieces.append(text[end : match.start()])
            end = match.end()
            try:
                pieces.append(await values.of_input(match[1]) if match[1] else await values.of_name(match[2].lower()))
            except BadTemplate as error:
                problems.append(str(error))
        if problems:
            raise BadTemplate(f"{text!r:.200} can't be rendered: {'; '.join(problems)}")
        rendered.append("".join([*pieces, text[end:]]))
    return rendered


class _Values:
    """The values of placeholders. Inputs are read, and the template is uploaded, at most once."""

    def __init__(self, inputs: InputReader, outputs: OutputFilePaths, parameters: Parameters) -> None:
        self._inputs, self._outputs, self._parameters = inputs, outputs, parameters
        self._literals: Literals | None = None
        self._template_path: str | None = None

    async def of_input(self, name: str) -> str:
        if self._literals is None:
            self._literals = await self._inputs.get()
        if name not in self._literals:
            known = ", ".join(sorted(self._literals)) or "none"
            raise BadTemplate(f"there is no input {name!r} (inputs: {known})")
        return literal_text(self._literals[name], name)

    async def of_name(self, name: str) -> str:
        outputs = self._outputs
        match name:
            case "input":
                return self._inputs.get_input_path()
            case "inputprefix":
                return self._inputs.get_input_prefix_path()
            case "outputprefix":
                return outputs.get_output_prefix_path()
            case "rawoutputdataprefix":
                return outputs.get_raw_output_prefix()
            case "perretryuniquekey":
                return _NO_PART.sub("_", _NO_START.sub("a", self._parameters.generated_name))
            case "prevcheckpointprefix":
                return outputs.get_previous_checkpoints_prefix() or '""'
            case "checkpointoutputprefix":
                return outputs.get_checkpoint_prefix()
            case "namespace":
                return self._parameters.namespace
        if self._template_path is None:
            self._template_path = await self._parameters.task.path()
        return self._template_path


def literal_text(value: Any, name: str) -> str:
    """Return an input's value as a command has it. Raises `BadTemplate` for a value without a text; `name` is in it."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return value
        case int():
            return str(value)
        case float():
            return repr(value)
        case datetime() if value.utcoffset() is not None:
            utc = value.astimezone(UTC).replace(tzinfo=None)
            return f"{_decimal(utc.isoformat(timespec='microseconds'))}Z"
        case timedelta():
            seconds, micros = divmod(abs(value) // timedelta(microseconds=1), 10**6)
            return f"{'-' if value < timedelta() else ''}{_decimal(f'{seconds}.{micros:06}')}s"
        case Blob(uri=uri):
            return uri
        case list() | tuple():
            return f"[{','.join(literal_text(each, name) for each in value)}]"
    raise BadTemplate(f"input {name!r} is a {type(value).__name__}, which has no text")


def _decimal(text: str) -> str:
    """Return the text without zeros at the end of its fraction."""
    return text.rstrip("0").rstrip(".")
