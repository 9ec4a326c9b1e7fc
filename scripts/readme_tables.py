"""Write the README's tables: of measures from the tables that the code uses, of families from the tests' own list.

python scripts/readme_tables.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gattn_viz.metrics.compared import COMPARED_MEASURES, QUANTITIES
from gattn_viz.metrics.gate_measures import GATE_MEASURES
from gattn_viz.metrics.measures import SINK_MEASURES, Measure

README = Path(__file__).parents[1] / "README.md"
sys.path.insert(0, str(README.parent))

from tests.capture.families import EAGER, FAMILIES  # noqa: E402
from tests.capture.gated_families import GATED, GatedFamily  # noqa: E402
from tests.conftest import GATES  # noqa: E402

OVER_PROMPTS = {
    "queries": "mean, by queries",
    "tokens": "mean, by tokens",
    "other tokens": "mean, by tokens but the first",
    "queries with a choice": "mean, by those queries",
    "prompts": "mean, each alike",
    "predictions": "mean of log, by predictions",
    "largest": "largest",
    "mean at largest": "mean at the largest",
    "most frequent at largest": "most frequent at the largest",
    "most frequent": "most frequent",
    "pooled": "pooled",
}
TABLES = {"measures": SINK_MEASURES, "gate measures": GATE_MEASURES}


def measures_table(measures: tuple[Measure, ...]) -> str:
    """The measures as a Markdown table."""
    lines = ["| column | unit | range | over prompts | definition | source |", "|---|---|---|---|---|---|"]
    for measure in measures:
        low = "" if measure.low is None else f"{measure.low:g}"
        span = f"{low} and up" if measure.high is None else f"{low} to {measure.high:g}"
        cells = [f"`{measure.name}`", measure.unit, span, OVER_PROMPTS[measure.combine], measure.definition]
        lines.append(f"| {' | '.join([*cells, measure.source])} |")
    return "\n".join(lines) + "\n"


def quantities_table() -> str:
    """What `compare` has beside measures, as a Markdown table."""
    measures = {measure.name for measure in COMPARED_MEASURES}
    lines = ["| quantity | unit | definition |", "|---|---|---|"]
    for quantity in QUANTITIES:
        if quantity.name not in measures:
            lines.append(f"| `{quantity.name}` | {quantity.unit} | {quantity.definition} |")
    return "\n".join(lines) + "\n"


def families_table() -> str:
    """The families that the tests run, as a Markdown table; those without gate and learned sink in a line each."""
    lines = ["| family | gate | from | learned sink | layers |", "|---|---|---|---|---|"]
    for name, family in GATED.items():
        gate = f"{family.gate}, {family.activation}" if family.gate else ""
        cells = [f"`{name}`", gate, family.place, "yes" if family.sink else "", _layers(name, family)]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    plain = [name for name in FAMILIES if name not in GATES and name not in GATED]
    own = [name for name in EAGER if not name.startswith("falcon_")]
    return (
        "\n".join(lines)
        + f"\n\nWithout either, checked in the same way: {', '.join(plain)}. By their own weights, a layer at a "
        f"time (see Limits): {', '.join(own)}.\n"
    )


def _layers(name: str, family: GatedFamily) -> str:
    notes = []
    if family.options.get("num_hidden_layers", 2) == 4:
        notes.append("hybrid")
    if len(set(family.heads)) > 1:
        notes.append("heads differ")
    if len(family.layers) > 2:
        notes.append("looped")
    if family.tensor_mask:
        notes.append("chosen keys: a T x T mask")
    if name == "deepseek_v4":
        notes.append("windows only, not compressed keys")
    if family.model not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        notes.append("from Python only")
    return ", ".join(notes)


def with_table(readme: str) -> str:
    """The README's text with the tables put in."""
    tables = {name: measures_table(measures) for name, measures in TABLES.items()}
    tables["compared quantities"] = quantities_table()
    tables["families"] = families_table()
    for name, table in tables.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        before, rest = readme.split(begin)
        _, after = rest.split(end)
        readme = f"{before}{begin}{table}{end}{after}"
    return readme


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
