"""Words that several figures share."""

from __future__ import annotations

import pandas as pd


def counts_in_words(table: pd.DataFrame, column: str) -> str:
    """What all models of a table have in common, `2,094`, or each model's own: `2,094 (a), 1,870 (b)`."""
    counts = {str(model): f"{rows[column].iloc[0]:,}" for model, rows in table.groupby("model", sort=False)}
    if len(set(counts.values())) == 1:
        return next(iter(counts.values()))
    return ", ".join(f"{count} ({model})" for model, count in counts.items())
