"""Words that several figures share."""

from __future__ import annotations

import pandas as pd

from gattn_viz.pipeline.captions import of_each


def counts_in_words(table: pd.DataFrame, column: str) -> str:
    """What all models of a table have in common, `2,094`, or each model's own: `2,094 (a), 1,870 (b)`."""
    return of_each({str(model): f"{rows[column].iloc[0]:,}" for model, rows in table.groupby("model", sort=False)})
