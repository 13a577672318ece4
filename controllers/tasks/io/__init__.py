"""Where an execution's inputs, outputs, secrets and cached results are kept, and how they are read and written.

Plugins take these from their context. What they import is the reader that they put, and the errors.
"""

from controllers.tasks.io.data import (
    BadReference,
    DataDenied,
    DataError,
    DataNotFound,
    DataTooLarge,
    DataUnavailable,
)
from controllers.tasks.io.files import FileOutputReader, MemoryOutputReader
from controllers.tasks.io.literals import BadLiteral
from controllers.tasks.io.secrets import BadSecret, SecretUnavailable

__all__ = [
    "BadLiteral",
    "BadReference",
    "BadSecret",
    "DataDenied",
    "DataError",
    "DataNotFound",
    "DataTooLarge",
    "DataUnavailable",
    "FileOutputReader",
    "MemoryOutputReader",
    "SecretUnavailable",
]
