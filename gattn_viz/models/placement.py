"""Where the weights of a model lie: on devices, in the memory of the CPU, on disk."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils.modeling import convert_file_size_to_int

from gattn_viz.errors import GattnVizError

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def check_placement(
    device: str, device_map: str | None, max_memory: str | None, offload_folder: str | None
) -> None:
    """Raise GattnVizError if what is said of the place of a model's weights does not go together."""
    if device_map is not None and device_map not in DEVICE_MAPS:
        raise GattnVizError(
            f"unknown device map {device_map!r}; expected {', '.join(DEVICE_MAPS)}: pass one of them, or --device "
            "for a single device"
        )
    if device_map is not None and device != "auto":
        raise GattnVizError(
            f"both device {device!r} and device map {device_map!r} were given; expected one: leave the other out"
        )
    for name, value in {"max memory": max_memory, "offload folder": offload_folder}.items():
        if value is not None and device_map is None:
            raise GattnVizError(
                f"the {name} {value!r} was given without a device map; expected both: add --device-map auto"
            )


def memory_limits(text: str) -> dict[int | str, int]:
    """`0=10GiB,cpu=20GiB` as what accelerate takes: bytes by the number of an accelerator, or of `cpu`.

    What is not named gets nothing, so a model that does not fit goes to disk.

    Raises:
        GattnVizError: it is not of that form, or there is no such accelerator.
    """
    limits: dict[int | str, int] = {}
    for part in text.split(","):
        place, _, size = part.strip().partition("=")
        if not (place == "cpu" or (place.isdecimal() and len(place) < 4)) or not size:
            raise GattnVizError(
                f"max memory {text!r}: expected devices and sizes such as 0=10GiB,cpu=20GiB, 0 being the first GPU"
            )
        key = int(place) if place.isdecimal() else place
        if key in limits:
            raise GattnVizError(
                f"max memory {text!r}: {place} is there twice; expected one size for it: leave one out"
            )
        try:
            limits[key] = convert_file_size_to_int(size)
        except ValueError as error:
            raise GattnVizError(
                f"max memory {text!r}: {size!r} is no size; expected such as 10GiB, 10GB or 500MB"
            ) from error
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    for number in limits:
        if isinstance(number, int) and number >= count:
            raise GattnVizError(
                f"max memory {text!r} is of GPU {number}, but there are {count}; expected those that are there, "
                "from 0: leave it out"
            )
    return limits


def input_device(model: Any) -> torch.device:
    """Where the model takes its token ids; what accelerate offloads is on `meta` until it runs."""
    embedding = model.get_input_embeddings()
    hook = getattr(embedding, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    return embedding.weight.device if device is None else torch.device(device)


def places(model: Any) -> str:
    """In words, where the weights are: `cpu`, `cuda:0 and cuda:1`, `cpu and disk`."""
    spread = getattr(model, "hf_device_map", None) or {"": model.device}
    names = {f"cuda:{place}" if isinstance(place, int) else str(place) for place in spread.values()}
    *first, last = sorted(names, key=lambda name: ("disk" in name, "cpu" in name, name))
    return f"{', '.join(first)} and {last}" if first else last
