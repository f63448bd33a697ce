"""One thread for every test: the tensors are small, and a second thread waits more than it works. Compiled
code goes to a place of the tests' own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def compiled_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory, and back with the variables that `main` sets for the process."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setenv(name, str(tmp_path_factory.getbasetemp() / name))
        patch.setenv("DSV41_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "compiled"))
        yield tmp_path_factory.getbasetemp() / "compiled"
