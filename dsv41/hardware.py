"""What the process runs on."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Hardware:
    """`sm` is ten times the compute capability (90 on Hopper), 0 on a CPU; `memory_bytes` is the device's own
    memory."""

    device: str
    sm: int
    name: str
    memory_bytes: int


def detect(device: str = "auto") -> Hardware:
    """Describe a device: "auto" (a GPU if there is one), "cpu", or "cuda[:index]".

    Raises ValueError for any other name and for a GPU that is not there.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, colon, index = device.partition(":")
    if device == "cpu":
        return Hardware("cpu", 0, "CPU", 0)
    if kind != "cuda" or (colon and not index.isdigit()):
        raise ValueError(f"device '{device}' is not one of auto, cpu, cuda, cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise ValueError(f"device '{device}' is not there: this machine shows {count} CUDA device(s)")
    major, minor = torch.cuda.get_device_capability(device)
    properties = torch.cuda.get_device_properties(device)
    return Hardware(device, 10 * major + minor, properties.name, properties.total_memory)


def assume(name: str) -> Hardware:
    """A GPU that need not be here, by its architecture ("sm90"), to ask what would run on it.

    Raises ValueError for any other name.
    """
    match = re.fullmatch(r"sm(\d{2,3})", name)
    if match is None:
        raise ValueError(f"'{name}' is not an architecture such as sm90, sm100 or sm120")
    return Hardware("cuda", int(match[1]), f"SM{match[1]}", 0)
