"""Vendor packages are found at run time; this says why one cannot be used."""

from __future__ import annotations

from collections.abc import Callable


def load_failure(package: str, install: str, load: Callable[[], object]) -> str | None:
    """Why `load`, which imports `package`, fails, in one sentence; None if it does not. `install` is what to
    type for it."""
    try:
        load()
    except ModuleNotFoundError as missing:
        return f"it needs the package '{missing.name}' ({install})"
    except (ImportError, OSError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return f"the package '{package}' does not load here: {first}"
    return None
