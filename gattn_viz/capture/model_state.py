"""The states that a model is in while it is captured, and out of which it comes again whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from transformers import PreTrainedConfig, PreTrainedModel

from gattn_viz.errors import GattnVizError

_captured: set[int] = set()  # the ids of configurations whose models are being captured
_captured_lock = Lock()


@contextmanager
def alone(model: PreTrainedModel) -> Iterator[None]:
    """Let no second capture begin while the context lasts: of the model, or of one that shares a configuration.

    Where attention goes is written in the configuration: one capture would change it under the other.
    """
    configs = {id(config) for config in _configurations(model)}
    with _captured_lock:
        if configs & _captured:
            raise GattnVizError(
                f"{type(model).__name__}, or a model that shares its configuration, is being captured already; "
                "expected one capture at a time: wait for the other, or take a copy of the model"
            )
        _captured.update(configs)
    try:
        yield
    finally:
        with _captured_lock:
            _captured.difference_update(configs)


def _configurations(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The model's, its parts' and those inside of them, each once."""
    found: dict[int, PreTrainedConfig] = {}
    configs = (getattr(part, "config", None) for part in model.modules())
    waiting = [config for config in configs if isinstance(config, PreTrainedConfig)]
    while waiting:
        config = waiting.pop(0)
        if id(config) not in found:
            found[id(config)] = config
            inside = [getattr(config, name, None) for name in config.sub_configs]
            waiting += [config for config in inside if config is not None]
    return list(found.values())


@contextmanager
def attending_by(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Set the model to an attention function, and back. `eager` is its own, whether it goes through the interface.

    Raises:
        GattnVizError: the model does not look its attention function up.
    """
    before = [(config, config._attn_implementation_internal) for config in _configurations(model)]
    try:
        if implementation == "eager":
            for config, _ in before:
                config._attn_implementation_internal = implementation
        else:
            model.set_attn_implementation(implementation)
        decoder = model.get_decoder()
        config = decoder.config if isinstance(decoder, PreTrainedModel) else model.config
        for other, _ in before:  # that of a module which was taken from another model
            if type(other) is type(config) and config._attn_implementation == implementation:
                other._attn_implementation_internal = implementation
        if config._attn_implementation != implementation:
            # transformers only warns, and goes on with eager attention
            raise GattnVizError(
                f"{type(model).__name__} does not use transformers' attention interface: "
                "its maps cannot be captured"
            )
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own  # without its sub-configurations


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """No dropout; each module's training mode is as before afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
