"""Any measures of attention sinks and of gates, head by head, in one table."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.compared import CompareOptions
from gattn_viz.metrics.gate_measures import GATE_MEASURES, WITHOUT_GATE
from gattn_viz.metrics.measures import SINK_MEASURES, choose_measures
from gattn_viz.models.names import VARIANTS
from gattn_viz.pipeline.gates import require_gate
from gattn_viz.pipeline.run import OnModel, Progress, Run
from gattn_viz.pipeline.stats import Wanted, measure
from gattn_viz.prompts import Prompt

KEYS = ["model", "layer", "head"]


def head_table(
    models: Sequence[str] = VARIANTS,
    prompts: Sequence[Prompt | str] | None = None,
    *,
    measures: Sequence[str] = ("first_token_mass", "gate_mean"),
    run: Run = Run(),
    progress: Progress | None = None,
    on_model: OnModel | None = None,
) -> pd.DataFrame:
    """What `sink_stats` and `gate_stats` say of each head, with their default options, in the order asked for.

    Args:
        measures: names in `SINK_MEASURES` and `GATE_MEASURES`, but `perplexity`, which is a model's.
        models, prompts, run: see `sink_stats`.

    Returns:
        the columns model, layer and head, the measures, and what stands behind them (`n_prompts`, `tokens`, ...).

    Raises:
        GattnVizError: a measure that is none of a head; all need a gate and no model has one; whatever
            `sink_stats` raises.
    """
    names = list(dict.fromkeys(measures))
    of_heads = {one.name: one for one in (*GATE_MEASURES, *SINK_MEASURES) if one.name != "perplexity"}
    if "perplexity" in names:
        raise GattnVizError("perplexity is one number a model; expected measures of heads: leave it out")
    choose_measures(names, tuple(of_heads.values()))
    only_gates = set(names) <= {one.name for one in GATE_MEASURES} - set(WITHOUT_GATE)
    if only_gates:
        require_gate(models, run)
    chosen = tuple(of_heads[name] for name in names)
    wanted = Wanted(chosen, options=CompareOptions(), gate_required=only_gates)
    table, _ = measure(models, prompts, wanted, run, progress, on_model)
    rest = [column for column in table if column not in (*KEYS, *names)]
    result = table[[*KEYS, *names, *rest]]
    result.attrs = table.attrs
    return result
