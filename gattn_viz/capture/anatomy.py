"""What a model's layers are made of: which attend, in which order they run, and where their gates are.

Names and configurations say where a gate should be. It is looked for at work, once for each model: that

    attention output x gate scores = what the output projection receives

which a gate hooked at the wrong place, a wrong split, or something that stands between does not give. The classes
that `gate_adapters` does not know are searched for a module whose output, as gate logits, fits that formula.

Axis letters: T tokens, H query heads, V head_dim of values, C gate channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gattn_viz.capture.observation import Call, SeenLayer, observe
from gattn_viz.models.gate_adapters import (
    ACTIVATIONS,
    LAYOUTS,
    GateAdapter,
    HeadShape,
    adapter_of,
    find_module,
)


@dataclass(frozen=True)
class Gate:
    """A layer's gate, seen at work.

    Attributes:
        attention: the attention module.
        channels: scores of one head at one token, 1 or V.
        is_late: whether it is computed after attention, from what the attention module takes.
        inferred: whether it was found by its effect, its class being unknown.
    """

    adapter: GateAdapter
    attention: nn.Module
    shape: HeadShape
    channels: int
    is_late: bool = False
    inferred: bool = False

    @property
    def kind(self) -> str:
        """`headwise` or `elementwise`."""
        return "headwise" if self.channels == 1 else "elementwise"

    @property
    def in_words(self) -> str:
        """Such as `elementwise, sigmoid of q_proj`."""
        words = f"{self.kind}, {self.adapter.activation or 'sigmoid'} of {self.adapter.source}"
        if self.adapter.activation == "softplus":
            words += ", which has no upper bound"
        return f"{words}, found by its effect" if self.inferred else words

    def module(self, name: str) -> nn.Module:
        """A part of the attention module, by the adapter's name for it."""
        module = find_module(self.attention, name)
        assert module is not None
        return module


@dataclass(frozen=True)
class Layer:
    """One layer, in the order of running.

    Attributes:
        kind: what mixes its tokens, as the configuration calls it, such as `linear_attention`; else empty.
        attention: its attention module; None without softmax attention.
        shape: of that; None without it. Widths are 0 where they are out of sight, see `eager`.
        gate: None without one, or without one that is known.
        refusal: what was found in the place of a gate that cannot be trusted.
        projection: the module that receives what attention gives, gated where there is a gate; None if there is
            none that does.
    """

    kind: str
    attention: nn.Module | None = None
    shape: HeadShape | None = None
    gate: Gate | None = None
    refusal: str | None = None
    projection: nn.Module | None = None


@dataclass(frozen=True)
class Anatomy:
    """A model's layers in the order of running.

    Attributes:
        implementation: the name of the attention function that the model is captured by.
    """

    layers: tuple[Layer, ...]
    implementation: str

    @property
    def gates(self) -> list[Gate]:
        """Each once: of a looped model, several layers share one."""
        return list({id(layer.gate.attention): layer.gate for layer in self.layers if layer.gate}.values())

    @property
    def attending(self) -> list[int]:
        """The layers with softmax attention, from 1."""
        return [number for number, layer in enumerate(self.layers, start=1) if layer.shape is not None]

    @property
    def gated(self) -> list[int]:
        """The layers with a gate, from 1."""
        return [number for number, layer in enumerate(self.layers, start=1) if layer.gate is not None]

    def heads(self, layers: Iterable[int] | None = None) -> list[int]:
        """The different numbers of heads that some layers have, from 1; None is all, those without have none."""
        chosen = self.attending if layers is None else layers
        shapes = (self.layers[layer - 1].shape for layer in chosen)
        return sorted({shape.heads for shape in shapes if shape is not None})

    @property
    def is_looped(self) -> bool:
        """Whether a module attends in more than one layer."""
        attending = [layer.attention for layer in self.layers if layer.attention is not None]
        return len(set(attending)) < len(attending)

    @property
    def gate_kind(self) -> str | None:
        """`headwise` or `elementwise`; both if layers differ; None without a gate."""
        return " and ".join(sorted({gate.kind for gate in self.gates}, reverse=True)) or None

    @property
    def gate_in_words(self) -> str | None:
        """What kind of gate it is and where it comes from; None without one, and of the paper's own models."""
        words = dict.fromkeys(gate.in_words for gate in self.gates if gate.adapter.activation is not None)
        return "; ".join(words) or None

    @property
    def refusal(self) -> str | None:
        """Why the model's gate cannot be trusted, by the first layer where it cannot."""
        numbered = enumerate(self.layers, start=1)
        return next((f"layer {number}: {layer.refusal}" for number, layer in numbered if layer.refusal), None)


def anatomy(model: PreTrainedModel) -> Anatomy:
    """What the model's layers are made of. It is run for that once, and again when modules of it were exchanged.

    Raises:
        GattnVizError: its attention cannot be seen, or it is being captured.
    """
    made_of = [
        (id(module), id(vars(module).get("forward")), *module._forward_hooks, *module._forward_pre_hooks)
        for module in model.modules()
    ]
    if model not in _known or _known[model][0] != made_of:
        seen, implementation = observe(model)
        kinds = _kinds(model, len(seen))
        layers = tuple(_layer(one, kind, model.dtype) for one, kind in zip(seen, kinds, strict=True))
        _known[model] = made_of, Anatomy(layers, implementation)
    return _known[model][1]


_known: WeakKeyDictionary[nn.Module, tuple[object, Anatomy]] = WeakKeyDictionary()


def _kinds(model: PreTrainedModel, layers: int) -> list[str]:
    """What the configuration calls each layer. Loops go through its list again."""
    config = model.config.get_text_config()
    for name in ("layer_types", "layers_block_type"):
        if kinds := getattr(config, name, None):
            return [str(kinds[index % len(kinds)]) for index in range(layers)]
    return [""] * layers


def _layer(seen: SeenLayer, kind: str, dtype: torch.dtype) -> Layer:
    if seen.attention is None:
        return Layer(kind)
    if seen.output is None:
        return Layer(kind, seen.attention, HeadShape(seen.heads, 0, 0))
    shape = HeadShape(seen.heads, seen.query_width, seen.output.shape[2])
    look = _Look(seen, seen.attention, seen.output, shape, tolerance=2 * torch.finfo(dtype).eps)
    gate, refusal = None, None
    adapter = adapter_of(seen.attention)
    projection = look.receiver()
    if adapter is not None:
        gate, refusal = look.at(adapter)
    elif type(projection) not in (nn.Linear, Conv1D):  # something that may have a gate in it, or one behind it
        gate = look.around()
        refusal = look.suspicion() if gate is None and projection is None else None
    if gate is not None:  # what stands before it is no linear layer, and mixes what the keys give
        projection = gate.module(gate.adapter.reaches) if gate.adapter.multiplies is None else None
    return Layer(kind, seen.attention, shape, gate, refusal, projection)


@dataclass(frozen=True)
class _Look:
    """One layer looked at for a gate; what differs by no more than `tolerance` of the largest number is equal."""

    seen: SeenLayer
    attention: nn.Module
    output: Tensor
    shape: HeadShape
    tolerance: float

    def at(self, adapter: GateAdapter) -> tuple[Gate | None, str | None]:
        """The gate where the adapter says it is; or what is wrong with it."""
        source, reaches = self._call(adapter.source), self._call(adapter.reaches)
        multiplied = self.output if adapter.multiplies is None else self._given(adapter.multiplies)
        seen = None if source is None else adapter.see(self.attention, source.taken, source.given, self.shape)
        if seen is None or multiplied is None or reaches is None or reaches.taken is None:
            return None, f"{adapter.source} gives no gate of {self.shape.heads} heads: the gate cannot be trusted"
        logits, scores = seen
        expected = multiplied * self._rows(scores)
        off = _off(self._rows(reaches.taken), expected)
        allowed = self.tolerance * float(expected.nan_to_num().abs().max())
        if off > allowed:
            return None, (
                f"attention output x gate is not what {adapter.reaches} receives (off by {off:.2g}, expected at "
                f"most {allowed:.2g}): the gate cannot be trusted"
            )
        is_late = any(call is source for call in self.seen.after)
        return Gate(adapter, self.attention, self.shape, logits.shape[-1], is_late), None

    def around(self) -> Gate | None:
        """A gate anywhere in the attention module, by its effect."""
        if not self.output.any():
            return None  # any gate would fit
        names = {module: name for name, module in self.attention.named_modules() if name}
        after = [call for call in self.seen.after if call.module in names]
        multiplied = [None, *(names[call.module] for call in after if self._fits(call.given))]
        reached = [names[call.module] for call in after if self._fits(call.taken)]
        sources = [names[call.module] for call in (*self.seen.before, *after) if call.module in names]
        for adapter in (
            GateAdapter(source, layout, activation, multiplies=of, reaches=to)
            for to in reached
            for of in multiplied
            for source in sources
            for layout in LAYOUTS
            for activation in ACTIVATIONS
        ):
            gate, _ = self.at(adapter)
            if gate is not None:
                return replace(gate, inferred=True)
        return None

    def receiver(self) -> nn.Module | None:
        """The first module that takes the attention output as it is."""
        allowed = self.tolerance * float(self.output.nan_to_num().abs().max())
        for call in self.seen.after:
            if self._fits(call.taken) and _off(self._rows(call.taken), self.output) <= allowed:
                return call.module
        return None

    def suspicion(self) -> str | None:
        """What is said if the attention output looks as if it were gated, by something that is not known."""
        large = self.output.abs() > 1e-3 * self.output.abs().max()
        for call in self.seen.after:
            if self._fits(call.taken):
                ratio = (self._rows(call.taken) / self.output)[large]
                if ratio.numel() and 0 < float(ratio.min()) < float(ratio.max()) < 1:
                    return (
                        f"attention's output is multiplied by {ratio.min():.2g} to {ratio.max():.2g} before "
                        f"{type(call.module).__name__} receives it, a gate perhaps, but not one that is known"
                    )
        return None

    def _call(self, name: str) -> Call | None:
        module = find_module(self.attention, name)
        return next((call for call in (*self.seen.before, *self.seen.after) if call.module is module), None)

    def _given(self, name: str) -> Tensor | None:
        call = self._call(name)
        return self._rows(call.given) if call is not None and self._fits(call.given) else None

    def _fits(self, x: Tensor | None) -> bool:
        return x is not None and x.numel() == self.output.numel()

    def _rows(self, x: Tensor | None) -> Tensor:
        """(T, H, V or C) of what a module took or gave, float32 on the CPU."""
        assert x is not None
        return x.detach().float().cpu().reshape(len(self.output), self.shape.heads, -1)


def _off(x: Tensor, expected: Tensor) -> float:
    """The largest difference. Broken weights, which are reported where they are measured, do not count."""
    return float((x - expected).abs().nan_to_num(0).max())
