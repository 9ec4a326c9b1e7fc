"""The numbers behind the paper's figures: a tidy table for each, from one pass over each model.

    data = paper_data(["baseline", "gate_headwise"], figures=["first_token_by_layer", "summary"])
    data.frames["first_token_by_layer"]         # model, layer, first_token_mass, uniform_null

What a table holds is what its figure draws, no more: `gattn_viz.drawing.paper` draws it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pandas as pd

from gattn_viz import tables
from gattn_viz.capture.anatomy import anatomy
from gattn_viz.capture.collector import Request
from gattn_viz.capture.run import capture, check_request
from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.gate_measures import GATE_MEASURES
from gattn_viz.metrics.gate_sums import GATE_BINS
from gattn_viz.metrics.measures import SINK_MEASURES, FirstRow, Options
from gattn_viz.metrics.over_prompts import ModelSums
from gattn_viz.metrics.pooling import MapView
from gattn_viz.models.loading import LoadedModel
from gattn_viz.models.names import VARIANTS
from gattn_viz.pipeline.gates import any_gate
from gattn_viz.pipeline.maps import check_softmax, choose_layers, learned_sinks
from gattn_viz.pipeline.run import OnModel, Progress, Run, check_finite, each_model, find_models, log
from gattn_viz.pipeline.stats import Wanted, measure
from gattn_viz.prompts import EncodedPrompt, Prompt
from gattn_viz.tokens import token_labels

MAP_CELLS = 128
"""Rows and columns of a map at most: it is printed an inch or two wide."""

SCORE_BINS = 64
"""Of the histogram of gate scores from 0 to 1, all of one width. `GATE_BINS` has each of their edges.

Where scores are larger than 1 it goes to the next power of 2.
"""

THRESHOLDS = {"01": 0.01, "001": 0.001}
"""Below which an output element is small, as the measures spell it."""

# arXiv 2505.06708, Table 4: 15A2B mixture-of-experts models, weights not released, on the paper's own data.
PAPER_ROWS = pd.DataFrame(
    {
        "source": "paper, Table 4",
        "model": ["baseline", "gate_headwise", "gate_elementwise"],
        "gate_mean": [np.nan, 0.172, 0.116],
        "max_activation": [1053.0, 98.0, 94.0],
        "first_token_mass": [0.467, 0.073, 0.048],
        "perplexity": [6.026, 5.792, 5.761],
    }
)


@dataclass(frozen=True)
class ModelRun:
    """A model and the prompts in its tokens, for captions.

    Attributes:
        model: its label.
        checkpoint: which one, in words, without the path of a directory.
        dtype, device: of the run.
        layers: how many.
        heads: how many each has, such as `16`; `2 or 4` if they differ.
        gated: whether its attention output has a gate.
        gate: what kind, and where it comes from; None of the paper's own models.
        prompts: the prompts' ids.
        lengths: T of each.
        chat: whether they are user turns of the tokenizer's chat template.
    """

    model: str
    checkpoint: str
    dtype: str
    device: str
    layers: int
    heads: str
    gated: bool
    gate: str | None
    prompts: tuple[str, ...]
    lengths: tuple[int, ...]
    chat: bool = False


@dataclass
class PaperData:
    """What was measured.

    Attributes:
        frames: a tidy table for each figure. A figure that needs a gate is left out where no model has one.
        models: in order.
        first_row: the policy of `first_token_mass`.
        attention: how each model's attention was computed; `none` where only its maps were asked for.
    """

    frames: dict[str, pd.DataFrame] = field(default_factory=dict)
    models: list[ModelRun] = field(default_factory=list)
    first_row: FirstRow = "exclude"
    attention: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What the tables are made from: rows a layer, rows a model, sums a model, and the cells of the maps."""

    layers: pd.DataFrame
    models: pd.DataFrame
    sums: list[ModelSums]
    maps: list[pd.DataFrame]


@dataclass(frozen=True)
class FrameKind:
    """One figure's table.

    Attributes:
        measures: what has to be measured for it.
        build: makes it.
        needs_gate: whether it is empty without a gate.
        by_layer: whether its figure has the layer on the x axis.
    """

    measures: tuple[str, ...]
    build: Callable[[Measured], pd.DataFrame]
    needs_gate: bool = False
    by_layer: bool = False


def paper_data(
    models: Sequence[str] = VARIANTS,
    prompts: Sequence[Prompt | str] | None = None,
    *,
    figures: Sequence[str] | None = None,
    layers: Sequence[int] | Literal["all"] | None = None,
    first_row: FirstRow = "exclude",
    x: tables.X = "layer",
    run: Run = Run(),
    progress: Progress | None = None,
    on_model: OnModel | None = None,
) -> PaperData:
    """The tables of the paper's figures.

    Each model is loaded once and runs each prompt once; for `attention_maps` it runs the first prompt once more.

    Args:
        models, prompts, run: see `sink_stats`.
        figures: names in `FRAMES`; None is all.
        layers: of the maps, see `attention_maps`.
        first_row: whether the first query counts in `first_token_mass`.
        x: `depth` gives the tables of figures by layer a column of relative depth, over which they are then drawn.

    Raises:
        GattnVizError: no such figure; only figures of gates are asked for and no model has one; a model, prompt or
            layer that cannot be used.
    """
    chosen = choose_figures(figures)
    tables.check_x(x)
    if all(FRAMES[name].needs_gate for name in chosen) and not any_gate(models, run):
        raise GattnVizError(
            f"no gate in {', '.join(find_models(models, run))}, and nothing else was asked for than "
            f"{', '.join(chosen)}; expected a model with a gate on its attention output, such as gate_headwise: "
            "add one, or ask for other figures"
        )
    data = PaperData(first_row=first_row)
    maps: list[pd.DataFrame] = []

    def on_each(label: str, loaded: LoadedModel, encoded: Sequence[EncodedPrompt]) -> None:
        if on_model is not None:
            on_model(label, loaded, encoded)
        data.models.append(_model_run(label, loaded, encoded))
        if "attention_maps" in chosen:
            maps.append(_maps(label, loaded, encoded[0], layers, run))

    measured = _measure(models, prompts, chosen, Options(first_row=first_row), run, progress, on_each, data)
    measured.maps.extend(maps)
    for name in chosen:
        frame = FRAMES[name].build(measured)
        if x == "depth" and FRAMES[name].by_layer and not frame.empty:
            frame = tables.with_depth(frame, {run.model: run.layers for run in data.models})
        if frame.empty:
            log.warning("%s: no model has a gate: left out", name)
        else:
            data.frames[name] = frame
    return data


def choose_figures(names: Sequence[str] | None) -> list[str]:
    """The figures of these names, in the order of `FRAMES`; None is all.

    Raises:
        GattnVizError: a name that none has, or no name.
    """
    wanted = list(FRAMES) if names is None else list(names)
    unknown = [name for name in wanted if name not in FRAMES]
    if unknown or not wanted:
        what = f"no figure {unknown[0]!r}" if unknown else "no figure was asked for"
        raise GattnVizError(f"{what}; expected some of {', '.join(FRAMES)}")
    return [name for name in FRAMES if name in wanted]


def _measure(
    models: Sequence[str],
    prompts: Sequence[Prompt | str] | None,
    figures: Sequence[str],
    options: Options,
    run: Run,
    progress: Progress | None,
    on_model: OnModel,
    data: PaperData,
) -> Measured:
    """Run the models for what the figures need; if they need maps alone, hand the models to `on_model` alone."""
    names = {name for figure in figures for name in FRAMES[figure].measures}
    every = {one.name: one for one in (*GATE_MEASURES, *SINK_MEASURES)}  # the gate's mean is the sinks' own
    wanted = Wanted(
        tuple(one for name, one in every.items() if name in names),
        by="layer",
        options=options,
        gate_required=all(FRAMES[figure].needs_gate for figure in figures),
    )
    if not wanted.measures:
        for label, loaded, _ in each_model(models, prompts, run, on_model):
            data.attention[label] = "none"
            del loaded
        return Measured(pd.DataFrame(), pd.DataFrame(), [], [])
    by_layer, sums = measure(models, prompts, wanted, run, progress, on_model)
    data.attention = {model: " and ".join(paths) for model, paths in by_layer.attrs["attention_path"].items()}
    by_layer.attrs.clear()
    return Measured(by_layer, tables.summarise(sums, "model"), sums, [])


def _model_run(label: str, loaded: LoadedModel, encoded: Sequence[EncodedPrompt]) -> ModelRun:
    return ModelRun(
        model=label,
        checkpoint=loaded.source.without_path,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=loaded.device.type,
        layers=len(anatomy(loaded.model).layers),
        heads=" or ".join(map(str, anatomy(loaded.model).heads())),
        gated=bool(anatomy(loaded.model).gates),
        gate=anatomy(loaded.model).gate_in_words,
        prompts=tuple(prompt.prompt.id for prompt in encoded),
        lengths=tuple(len(prompt.ids) for prompt in encoded),
        chat=encoded[0].chat,
    )


def _maps(
    label: str,
    loaded: LoadedModel,
    prompt: EncodedPrompt,
    layers: Sequence[int] | Literal["all"] | None,
    run: Run,
) -> pd.DataFrame:
    """The cells of some layers' maps on one prompt, mean over heads, those left out whose keys are all later."""
    parts = anatomy(loaded.model)
    chosen = choose_layers(layers, parts.attending)
    view = MapView(max_cells=MAP_CELLS)
    request = Request(maps=frozenset(chosen), heads="mean", view=view, needs=frozenset({"learned_sink"}))
    check_request(loaded.model, request, label)
    check_softmax(chosen, parts, label)
    cells = view.cells(len(prompt.ids))
    [captured] = capture(loaded.model, [prompt.ids], request, chunk=run.chunk)
    rows, columns = np.nonzero(cells.causal_pairs())
    starts = np.array(cells.queries.starts)
    tokens = token_labels(loaded.tokenizer, prompt.ids)
    sinks = learned_sinks([captured[layer] for layer in chosen], "mean")
    found = []
    for n, layer in enumerate(chosen):
        probabilities = captured[layer].probabilities
        assert probabilities is not None
        values = probabilities[0].numpy()[rows, columns]
        check_finite(values.sum(), layer, label, prompt.prompt.id)
        columns_of_layer = {
            "model": label,
            "prompt": prompt.prompt.id,
            "layer": layer,
            "query": starts[rows],
            "key": starts[columns],
            "key_token": [tokens[key - 1] if cells.pool is None else "" for key in starts[columns]],
            "probability": values,
            "cell": cells.queries.size,
            "tokens": cells.tokens,
            **({} if sinks is None else {"learned_sink_mass": sinks[n, 0]}),
        }
        found.append(pd.DataFrame(columns_of_layer))
    return pd.concat(found, ignore_index=True)


def _columns(*names: str) -> Callable[[Measured], pd.DataFrame]:
    """Measures by layer, as they are; without a model that has none of the last of them.

    `first_token_visible` comes with `first_token_mass` where some queries do not see the first token.
    """

    def build(measured: Measured) -> pd.DataFrame:
        columns = ["model", "layer", *names]
        if "first_token_mass" in names and (measured.layers["first_token_visible"] < 1).any():
            columns.insert(columns.index("uniform_null") + 1, "first_token_visible")
        found = measured.layers[columns]
        return found[found[names[-1]].notna()].reset_index(drop=True)

    return build


def _attention_maps(measured: Measured) -> pd.DataFrame:
    return pd.concat(measured.maps, ignore_index=True)


def _gate_distribution_by_layer(measured: Measured) -> pd.DataFrame:
    """How many scores of a layer's heads, tokens and channels lie in each bin."""
    every = (layer.gates for sums in measured.sums for layer in sums.pooled.values())
    largest = max((gates.largest.max() for gates in every if gates is not None), default=1)
    top = 2.0 ** max(0, math.ceil(math.log2(largest))) if largest > 0 else 1
    edges = np.linspace(0, top, SCORE_BINS + 1)
    bin_of = np.minimum((GATE_BINS.edges[:-1] / top * SCORE_BINS).astype(int), SCORE_BINS - 1)
    found = []
    for sums in measured.sums:
        for number, layer in sorted(sums.pooled.items()):
            if layer.gates is None or layer.gates.histogram is None:
                continue
            counts = np.zeros(SCORE_BINS, np.int64)
            np.add.at(counts, bin_of, layer.gates.histogram.sum(0))
            about = {"model": sums.model, "layer": number}
            found.append(pd.DataFrame({**about, "low": edges[:-1], "high": edges[1:], "count": counts}))
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame()


def _gate_distribution(measured: Measured) -> pd.DataFrame:
    """The same of all layers together."""
    by_layer = _gate_distribution_by_layer(measured)
    if by_layer.empty:
        return by_layer
    return by_layer.groupby(["model", "low", "high"], sort=False)["count"].sum().reset_index()


def _output_magnitude(measured: Measured) -> pd.DataFrame:
    stages = {"before": measured.layers["output_before"], "after": measured.layers["output_after"]}
    return _stacked(measured.layers, [({"stage": stage}, values) for stage, values in stages.items()], "mean_abs")


def _output_sparsity(measured: Measured) -> pd.DataFrame:
    stages = {"before": "before", "after": "after", "before x mean gate": "scaled"}
    parts: list[tuple[dict[str, str | float], pd.Series]] = [
        ({"threshold": threshold, "stage": stage}, measured.layers[f"output_{spelt}_below_{digits}"])
        for digits, threshold in THRESHOLDS.items()
        for stage, spelt in stages.items()
    ]
    return _stacked(measured.layers, parts, "share_below")


def _stacked(
    layers: pd.DataFrame, parts: Sequence[tuple[dict[str, str | float], pd.Series]], name: str
) -> pd.DataFrame:
    """Columns under each other, each with what it is about; without what a model without a gate lacks."""
    found = pd.concat(
        [layers[["model", "layer"]].assign(**about, **{name: values}) for about, values in parts],
        ignore_index=True,
    )
    return found[found[name].notna()].reset_index(drop=True)


def _summary(measured: Measured) -> pd.DataFrame:
    """A row a model, and below them the paper's own."""
    ours = measured.models[["model", *PAPER_ROWS.columns[2:], "uniform_null", "n_prompts", "tokens", "first_row"]]
    found = pd.concat([ours.assign(source="this run"), PAPER_ROWS], ignore_index=True)
    found = found.astype({"n_prompts": "Int64", "tokens": "Int64"})
    return found[["source", *ours.columns]]


SPARSITY = tuple(f"output_{stage}_below_{n}" for stage in ("before", "after", "scaled") for n in THRESHOLDS)

FRAMES: dict[str, FrameKind] = {
    "first_token_by_layer": FrameKind(
        ("first_token_mass", "uniform_null", "first_token_visible"),
        _columns("first_token_mass", "uniform_null"),
        by_layer=True,
    ),
    "attention_maps": FrameKind((), _attention_maps),
    # the median for its histogram
    "gate_distribution": FrameKind(("gate_mean", "gate_q50"), _gate_distribution, needs_gate=True),
    "gate_distribution_by_layer": FrameKind(
        ("gate_mean", "gate_q50"), _gate_distribution_by_layer, needs_gate=True
    ),
    "output_magnitude": FrameKind(("output_before", "output_after"), _output_magnitude, by_layer=True),
    "output_sparsity": FrameKind(SPARSITY, _output_sparsity, by_layer=True),
    "sinks_and_activations": FrameKind(
        ("first_token_mass", "uniform_null", "first_token_visible", "max_activation"),
        _columns("first_token_mass", "uniform_null", "max_activation"),
        by_layer=True,
    ),
    "gate_by_layer": FrameKind(("gate_mean",), _columns("gate_mean"), needs_gate=True, by_layer=True),
    "summary": FrameKind(
        ("first_token_mass", "uniform_null", "gate_mean", "max_activation", "perplexity"), _summary
    ),
}
