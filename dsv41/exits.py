"""What a mistake costs at the command line: its exit code and its sentence."""

from __future__ import annotations

import torch

from dsv41.model.checkpoint import CheckpointError
from dsv41.runner.parity import ParityError


class DeviceError(Exception):
    """The device is not there, or cannot do what was asked."""


class CheckFailed(Exception):
    """`check` found a difference."""


# The first matching type decides; anything else is a bug and keeps its traceback.
EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (CheckFailed, 1),
    (ParityError, 1),
    (CheckpointError, 3),
    (ValueError, 2),
    (OSError, 3),
    (DeviceError, 4),
    (MemoryError, 5),
    (torch.OutOfMemoryError, 5),
    (RuntimeError, 6),
    (AssertionError, 6),
)
KNOWN = tuple(kind for kind, _ in EXIT_CODES)


def exit_code(error: BaseException) -> int:
    """Of an error of a type in `KNOWN`."""
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def sentence(error: BaseException) -> str:
    """One line. torch's messages are pages long; their first line says what happened."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
