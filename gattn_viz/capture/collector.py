"""What may be asked of a capture, what comes back, and the object that gathers it while the model runs.

Axis letters: B batch, H query heads, K KV heads, Q queries of one forward pass, T tokens, D head_dim, C gate
channels. Layers and heads are 1-based in `Request` and `LayerCapture`, as everywhere a person sees one; inside
they are 0-based. Layers count in the order in which they run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gattn_viz.capture import fused
from gattn_viz.capture.attention import Attention, active_taker
from gattn_viz.capture.blocks import WantedMap, attend_in_blocks
from gattn_viz.capture.compiled import kernel_for
from gattn_viz.capture.eager import reduce_weights
from gattn_viz.capture.weighing import Weighing
from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.gate_sums import GateSums, OutputSums
from gattn_viz.metrics.largest import as_large
from gattn_viz.metrics.layer import LayerSums, Need
from gattn_viz.metrics.median import RunningMedian, median
from gattn_viz.metrics.pooling import MapBuilder, MapView
from gattn_viz.metrics.sums import AttentionSums
from gattn_viz.metrics.weights import Weight

Path = Literal["fused", "blocks", "compiled", "eager"]
"""How a layer's attention was computed; see the modules of these names in `gattn_viz.capture`.

`compiled` is blocks with numba's help, `eager` is by the model itself.
"""

OF_ATTENTION: frozenset[Need] = frozenset({"first_token", "learned_sink", "received", "entropy", "row_max"})
OF_GATES: frozenset[Need] = frozenset({"gate_scores", "gate_histogram", "output_histogram"})
OF_OUTPUT: frozenset[Need] = frozenset({"output_before", "output_histogram"})

# Of a query's weights in bfloat16 the sum is off by less than 2^-8.
LARGEST_OFF = 0.02


@dataclass(frozen=True)
class Request:
    """What to take out of each layer.

    Attributes:
        maps: layers whose attention probabilities are kept.
        heads: of which heads; None is all of them, and "mean" their mean, a single map.
        view: which part of a map, exact or pooled.
        weight: what a map's cells hold, see `gattn_viz.metrics.weights`. Means and pooling come after.
        needs: reduce every layer to `LayerSums`, with what is named; empty is no sums.
        gates: layers whose gate logits and gate scores are kept.
        outputs: layers whose attention output is kept, before and after the gate.
        loss: the next-token loss of each prompt too.
        gate_thresholds: scores below the first and above the second are counted.
    """

    maps: frozenset[int] = frozenset()
    heads: tuple[int, ...] | Literal["mean"] | None = None
    view: MapView = MapView()
    weight: Weight = "probability"
    needs: frozenset[Need] = frozenset()
    gates: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()
    loss: bool = False
    gate_thresholds: tuple[float, float] = (0.1, 0.9)


@dataclass
class LayerCapture:
    """What was taken out of one layer for one prompt; None for what was not asked. Float32, on the CPU.

    Attributes:
        layer: from 1.
        paths: how the output and the sums were computed; more than one if one chunk went this way, another that.
        probabilities: (heads kept, queries, keys) of the view, 1 head for their mean; weighted as asked for.
        gate_logits, gate_scores: (T, H, C), before and after the activation; None without a gate too.
        output_before, output_after: (T, H, D), the attention output before and after the gate. Without a gate the
            second is None: the output projection receives the first.
        sums: the layer reduced.
    """

    layer: int
    paths: frozenset[Path] = frozenset()
    probabilities: Tensor | None = None
    gate_logits: Tensor | None = None
    gate_scores: Tensor | None = None
    output_before: Tensor | None = None
    output_after: Tensor | None = None
    sums: LayerSums | None = None


OnLayer = Callable[[int, LayerCapture], None]


@dataclass
class _Partial:
    """One layer of one sequence, while the model runs; with chunks, from the first to the last of them."""

    tokens: int
    heads: int = 0
    queries: int = 0  # that attention was computed of
    paths: set[Path] = field(default_factory=set)
    map: MapBuilder | None = None
    sums: AttentionSums | None = None
    gate_sum: Tensor | None = None  # (H,), mean over channels, summed over tokens
    gates: GateSums | None = None
    gate_tokens: list[Tensor] = field(default_factory=list)  # (Q, H) each
    output_before: OutputSums | None = None
    output_after: OutputSums | None = None
    value_norms: list[Tensor] = field(default_factory=list)  # (H, Q) each
    kept: dict[str, list[Tensor]] = field(default_factory=dict)
    largest: list[NDArray[np.float32]] = field(default_factory=list)  # (Q,) each, of the residual stream
    largest_channel: list[NDArray[np.int64]] = field(default_factory=list)
    median: float = float("nan")
    parts: RunningMedian | None = None  # in place of the median itself, with chunks


@dataclass
class Collector:
    """Gathers one batch. A layer is handed on, and forgotten, as soon as the model is through with it.

    Attributes:
        request: what to keep.
        places: for each sequence, where its tokens lie that are not padding.
        on_layer: called with (sequence, layer's capture) at the end of each layer.
        chunk: which of the batch's places the forward pass of the moment is about.
        projections: by layer, what `head_factors` gives; for maps of the weight `output`.
        indirect: attention modules whose gate multiplies what another module made of their output.
    """

    request: Request
    places: list[slice]
    on_layer: OnLayer
    chunk: range
    projections: Mapping[int, Tensor] = field(default_factory=dict)
    indirect: Collection[nn.Module] = ()
    layer: int | None = None  # that is running
    passed: int = 0  # layers of this forward pass that have begun
    gates: dict[int, Tensor] = field(default_factory=dict)  # (B, Q, H, C), of layers on their way to attention
    running: dict[int, list[_Partial]] = field(default_factory=dict)

    @property
    def first_query(self) -> int:
        return self.chunk.start

    @property
    def weighs_by_gate(self) -> bool:
        """Whether maps need gate scores while attention is computed."""
        return self.request.weight in ("gate", "output")

    def place(self, sequence: int) -> slice:
        return self.places[sequence]

    def begin_pass(self) -> None:
        self.passed = 0

    def begin_layer(self) -> None:
        self.layer = self.passed
        self.passed += 1

    def attend(self, attention: Attention) -> Tensor:
        """Compute a sequence's attention by the cheapest path that gives what is asked for."""
        layer = self._running_layer()
        partial = self._partials(layer)[attention.sequence]
        needs = self.request.needs & OF_ATTENTION
        if attention.sink_logit is None:
            needs -= {"learned_sink"}
        if partial.heads == 0:
            self._begin(partial, layer, attention.heads, attention.q.device, needs)
        if attention.first_query != partial.queries:
            raise _not_in_turn(layer)
        partial.queries += len(attention.q)
        if "values" in self.request.needs:
            new = attention.v[:, attention.v.shape[1] - len(attention.q) :]  # cached ones are counted already
            norms = new.norm(dim=-1)
            partial.value_norms.append(norms.repeat_interleave(attention.q.shape[2], 0))
        wanted = self._wanted(partial, layer, attention)

        path: Path = _choose_path(attention, needs)
        pooled = path == "fused" and wanted is not None and _can_pool(attention, wanted)
        if wanted is not None and not pooled and _has_most_rows(attention, wanted):
            path = "blocks"  # which go through most of the rows anyway
        # of maps and first tokens alone torch makes less work than the kernel, which has one way for everything
        kernel = kernel_for(attention) if path == "blocks" and "entropy" in needs else None
        if kernel is not None:
            path = "compiled"
        partial.paths.add(path)
        if path == "fused":
            output, lse = fused.attend(attention)
            if partial.sums is not None:
                _add_fused(partial.sums, needs, attention, lse)
            if wanted is not None and pooled:
                fused.add_pooled_map(attention, wanted)
            elif wanted is not None:
                attend_in_blocks(attention, output=None, wanted=wanted)
        else:
            output = attention.q.new_empty(*attention.q.shape[:3], attention.v.shape[-1])
            attend_in_blocks(
                attention, output=output, sums=partial.sums, needs=needs, wanted=wanted, kernel=kernel
            )
        return output

    def add_weights(self, weights: Tensor, local_size: int | None) -> None:
        """The attention weights of a layer that computes its attention itself.

        Args:
            weights: (B, H, Q, keys), with keys from the batch's first place to the chunk's last.
            local_size: how many keys back a query sees at most; None is all of them.

        Raises:
            GattnVizError: these are not the probabilities of causal attention.
        """
        layer = self._running_layer()
        expected = (len(self.places), weights.shape[1], len(self.chunk), self.chunk.stop)
        if weights.shape != expected:
            raise _no_probabilities(layer, f"have the shape {tuple(weights.shape)}, not {expected}")
        for sequence, (partial, place) in enumerate(zip(self._partials(layer), self.places, strict=True)):
            start, stop = max(place.start, self.chunk.start), min(place.stop, self.chunk.stop)
            if start >= stop:
                continue
            if partial.heads == 0:
                needs = self.request.needs & OF_ATTENTION - {"learned_sink"}
                self._begin(partial, layer, weights.shape[1], weights.device, needs)
            if start - place.start != partial.queries:
                raise _not_in_turn(layer)
            partial.queries += stop - start
            partial.paths.add("eager")
            rows = slice(start - self.chunk.start, stop - self.chunk.start)
            off = reduce_weights(
                weights[sequence, :, rows, place.start : stop],
                start - place.start,
                sums=partial.sums,
                needs=self.request.needs,
                wanted=self._wanted(partial, layer, None),
                local_size=local_size,
            )
            if off > LARGEST_OFF:  # not NaN: broken weights are reported where they are measured
                raise _no_probabilities(
                    layer, f"do not sum to 1 over the keys up to each query (off by {off:.2g})"
                )

    def add_output(self, module: nn.Module, output: Tensor) -> None:
        self.gates.pop(self._running_layer(), None)
        if module not in self.indirect:
            self.add_multiplied(output)

    def add_multiplied(self, output: Tensor) -> None:
        """`output` is (B, Q, H, D): what the gate multiplies, or would if there were one."""
        layer = self._running_layer()
        if layer + 1 in self.request.outputs:
            self._keep(layer, "output_before", output)
        if OF_OUTPUT & self.request.needs:
            histogram = "output_histogram" in self.request.needs
            for partial, tokens in self._each(layer, output):
                sums = OutputSums.of(tokens, histogram=histogram)
                partial.output_before = _plus(partial.output_before, sums)

    def add_gated_output(self, output: Tensor) -> None:
        """`output` is (B, Q, H, D), after the gate."""
        layer = self._running_layer()
        if layer + 1 in self.request.outputs:
            self._keep(layer, "output_after", output)
        if "output_after" in self.request.needs:
            for partial, tokens in self._each(layer, output):
                partial.output_after = _plus(partial.output_after, OutputSums.of(tokens))

    def add_gate(self, logits: Tensor, scores: Tensor) -> None:
        """`logits` and `scores` are (B, Q, H, C)."""
        layer = self._running_layer()
        if self.weighs_by_gate and layer + 1 in self.request.maps:
            self.gates[layer] = scores
        if layer + 1 in self.request.gates:
            self._keep(layer, "gate_logits", logits)
            self._keep(layer, "gate_scores", scores)
        if "gate" in self.request.needs:
            for partial, tokens in self._each(layer, scores):
                total = tokens.float().mean(2).sum(0)
                partial.gate_sum = total if partial.gate_sum is None else partial.gate_sum + total
        if OF_GATES & self.request.needs:
            for partial, tokens in self._each(layer, scores):
                sums = GateSums.of(
                    tokens,
                    self.request.gate_thresholds,
                    begins=partial.gates is None,
                    histogram="gate_histogram" in self.request.needs,
                )
                partial.gates = _plus(partial.gates, sums)
        if "gate_tokens" in self.request.needs:
            for partial, tokens in self._each(layer, scores):
                partial.gate_tokens.append(tokens.float().mean(2))

    def end_layer(self, residual: Tensor) -> None:
        """The model is through with a layer; `residual` (B, Q, hidden) is the residual stream after it."""
        layer = self._running_layer()
        self.layer = None
        if self.gates.pop(layer, None) is not None:  # attention takes it: it came too late
            raise GattnVizError(
                f"layer {layer + 1} computes its gate after its attention; expected it before, for weighted maps: "
                "choose the weight probability"
            )
        if layer not in self.running:
            return  # not softmax attention: a hybrid model's linear layers have nothing to show
        if "residual" in self.request.needs:
            if residual.shape[:2] != (len(self.places), len(self.chunk)):
                raise GattnVizError(
                    f"layer {layer + 1} gives {tuple(residual.shape)}; expected a residual stream of (batch, "
                    "tokens, channels): leave out the measures max_activation*"
                )
            for partial, tokens in self._each(layer, residual):
                _add_residual(partial, tokens)
        if self.chunk.stop >= max(place.stop for place in self.places):
            for sequence, partial in enumerate(self.running.pop(layer)):
                capture = self._finish(layer, partial)
                own = active_taker.set(None)  # a run of the model from within `on_layer` is not ours
                try:
                    self.on_layer(sequence, capture)
                finally:
                    active_taker.reset(own)

    def _running_layer(self) -> int:
        assert self.layer is not None  # an anatomy has no attention elsewhere
        return self.layer

    def _partials(self, layer: int) -> list[_Partial]:
        if layer not in self.running:
            self.running[layer] = [_Partial(place.stop - place.start) for place in self.places]
        return self.running[layer]

    def _begin(
        self, partial: _Partial, layer: int, heads: int, device: torch.device, needs: frozenset[Need]
    ) -> None:
        partial.heads = heads
        if self.request.needs:
            partial.sums = AttentionSums.zeros(heads, partial.tokens, needs, device)
        if layer + 1 in self.request.maps:
            asked = self.request.heads
            kept = partial.heads if asked is None else 1 if asked == "mean" else len(asked)
            partial.map = MapBuilder(kept, partial.tokens, self.request.view)

    def _wanted(self, partial: _Partial, layer: int, attention: Attention | None) -> WantedMap | None:
        if partial.map is None:
            return None
        weighing = None if attention is None else self._weighing(layer, attention)
        if self.request.heads == "mean":
            return WantedMap(partial.map, None, weighing)
        every = range(1, partial.heads + 1)
        return WantedMap(partial.map, [head - 1 for head in self.request.heads or every], weighing)

    def _weighing(self, layer: int, attention: Attention) -> Weighing | None:
        if self.request.weight == "probability":
            return None
        gate = self.gates.get(layer)
        if gate is not None:
            first = attention.first_query + attention.padding - self.chunk.start
            gate = gate[attention.sequence, first : first + len(attention.q)]
        projection = self.projections[layer] if self.request.weight == "output" else None
        return Weighing(self.request.weight, attention, gate, projection)

    def _keep(self, layer: int, name: str, batch: Tensor) -> None:
        """Copies that outlive the forward pass: float32, on the CPU, sharing no memory with the model's."""
        for partial, tokens in self._each(layer, batch):
            copy = tokens.detach().to("cpu", torch.float32, copy=True)
            partial.kept.setdefault(name, []).append(copy)

    def _each(self, layer: int, batch: Tensor) -> Iterator[tuple[_Partial, Tensor]]:
        """Each sequence that has a token in the chunk, with its part of a (B, Q, ...) tensor, padding left out."""
        for sequence, (partial, place) in enumerate(zip(self._partials(layer), self.places, strict=True)):
            start, stop = max(place.start, self.chunk.start), min(place.stop, self.chunk.stop)
            if start < stop:
                yield partial, batch[sequence, start - self.chunk.start : stop - self.chunk.start]

    def _finish(self, layer: int, partial: _Partial) -> LayerCapture:
        sums = partial.sums
        return LayerCapture(
            layer + 1,
            paths=frozenset(partial.paths),
            probabilities=None if partial.map is None else partial.map.result(),
            **{name: torch.cat(parts) for name, parts in partial.kept.items()},
            sums=None
            if sums is None
            else LayerSums(
                tokens=partial.tokens,
                heads=partial.heads,
                first_token=_to_numpy(sums.first_token),
                first_row=_to_numpy(sums.first_row),
                learned_sink=_to_numpy(sums.learned_sink),
                learned_sink_first_row=_to_numpy(sums.learned_sink_first_row),
                received=_to_numpy(sums.received),
                entropy=_to_numpy(sums.entropy),
                entropy_ratio=_to_numpy(sums.entropy_ratio),
                ratio_queries=sums.ratio_queries,
                queries_of_key=_to_numpy(sums.queries_of_key),
                uniform_first=_to_numpy(sums.uniform_first),
                row_max=_to_numpy(sums.row_max),
                gate_mean=None if partial.gate_sum is None else _to_numpy(partial.gate_sum / partial.tokens),
                gates=partial.gates,
                gate_tokens=_to_numpy(torch.cat(partial.gate_tokens).T) if partial.gate_tokens else None,
                output_before=partial.output_before,
                output_after=partial.output_after,
                value_norm=_to_numpy(torch.cat(partial.value_norms, 1)) if partial.value_norms else None,
                **_activations(partial),
            ),
        )


def _choose_path(attention: Attention, needs: frozenset[Need]) -> Path:
    """The fused kernel where it gives all that is asked for, and gives it faster than blocks do.

    With entropy it runs twice. On a CPU, one pass of blocks takes less (`benchmarks/`); a GPU's kernels never
    write scores to memory, which there decides.
    """
    cheap: frozenset[Need] = frozenset({"first_token"})
    if attention.q.device.type != "cpu":
        cheap |= {"entropy"}
    return "fused" if needs <= cheap and fused.can_fuse(attention) else "blocks"


def _can_pool(attention: Attention, wanted: WantedMap) -> bool:
    return wanted.weighing is None and fused.can_pool(attention, wanted.builder)


def _has_most_rows(attention: Attention, wanted: WantedMap) -> bool:
    """Whether a map shows half of the queries or more."""
    rows, first = wanted.builder.rows, attention.first_query
    shown = min(rows.stop, first + len(attention.q)) - max(rows.start, first)
    return 2 * shown >= len(attention.q)


def _add_fused(sums: AttentionSums, needs: frozenset[Need], attention: Attention, lse: Tensor) -> None:
    every = slice(0, attention.heads)
    if "first_token" in needs:
        first = fused.first_token(attention, lse).flatten(1, 2).T
        sums.add_first_token(every, attention.first_query, first)
    if "entropy" in needs:
        first_count = attention.first_query + 1
        seen = torch.arange(first_count, first_count + len(lse), device=lse.device)
        sums.add_entropy(every, fused.entropy(attention).flatten(1, 2).T, seen)


def _no_probabilities(layer: int, found: str) -> GattnVizError:
    return GattnVizError(
        f"the attention weights that layer {layer + 1} returns {found}; expected the probabilities of causal "
        "attention: this model is not supported"
    )


def _not_in_turn(layer: int) -> GattnVizError:
    return GattnVizError(
        f"layer {layer + 1} does not attend to the tokens in their order, each once; expected it to: this model "
        "is not supported"
    )


Sums = TypeVar("Sums", GateSums, OutputSums)


def _plus(before: Sums | None, more: Sums) -> Sums:
    return more if before is None else before + more


def _add_residual(partial: _Partial, tokens: Tensor) -> None:
    size = tokens.detach().float().abs().flatten(1).cpu().numpy()  # (Q, hidden); of hyper-connections, all streams
    partial.largest.append(size.max(1))
    partial.largest_channel.append(size.argmax(1))
    if len(size) == partial.tokens:
        partial.median = median(size)
    else:
        partial.parts = partial.parts or RunningMedian()
        partial.parts.add(size)


def _activations(partial: _Partial) -> dict[str, Any]:
    """What `LayerSums` says of the residual stream; nothing if it was not asked for."""
    if not partial.largest:
        return {}
    size = np.concatenate(partial.largest)  # (T,)
    position = int(as_large(size).argmax())
    return {
        "max_activation": float(size.max()),
        "max_activation_position": position,
        "max_activation_channel": int(np.concatenate(partial.largest_channel)[position]),
        "median_activation": partial.median if partial.parts is None else partial.parts.result(),
    }


def _to_numpy(tensor: Tensor | None) -> NDArray[np.float64] | None:
    return None if tensor is None else tensor.detach().cpu().double().numpy()
