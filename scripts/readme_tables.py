"""Write the README's tables of measures from the tables that the code uses.

python scripts/readme_tables.py
"""

from __future__ import annotations

from pathlib import Path

from gattn_viz.metrics.compared import COMPARED_MEASURES, QUANTITIES
from gattn_viz.metrics.gate_measures import GATE_MEASURES
from gattn_viz.metrics.measures import SINK_MEASURES, Measure

README = Path(__file__).parents[1] / "README.md"
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


def with_table(readme: str) -> str:
    """The README's text with the tables put in."""
    tables = {name: measures_table(measures) for name, measures in TABLES.items()}
    tables["compared quantities"] = quantities_table()
    for name, table in tables.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        before, rest = readme.split(begin)
        _, after = rest.split(end)
        readme = f"{before}{begin}{table}{end}{after}"
    return readme


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
