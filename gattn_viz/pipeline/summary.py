"""The summary of `pipeline.paper` as text to paste: Markdown and LaTeX."""

from __future__ import annotations

import re

import pandas as pd

# A column, its heading, and how its numbers are written.
_COLUMNS = (
    ("gate_mean", "gate mean", ".3f"),
    ("max_activation", "M-Act", ".0f"),
    ("first_token_mass", "F-Attn", ".3f"),
    ("uniform_null", "uniform null", ".3f"),
    ("perplexity", "PPL", ".3f"),
)
_PAPERS = "paper, Table 4 (15A2B MoE, other data)"


def to_markdown(frame: pd.DataFrame) -> str:
    """A table for a README; a `|` in a name is escaped."""
    lines = [["model", "from", *(heading for _, heading, _ in _COLUMNS)]]
    lines.append(["---", "---", *("--:" for _ in _COLUMNS)])
    lines += [[cell.replace("|", "\\|") for cell in row] for row in _rows(frame)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def to_latex(frame: pd.DataFrame) -> str:
    r"""A `tabular` for a paper that loads booktabs, the paper's own rows below a rule."""
    rows = [[_latex(cell) for cell in row] for row in _rows(frame)]
    ours = [row for row in rows if row[1] != _latex(_PAPERS)]
    papers = [row for row in rows if row[1] == _latex(_PAPERS)]
    heading = " & ".join(["model", "from", *(heading for _, heading, _ in _COLUMNS)])
    body = "\\midrule\n".join("".join(f"{' & '.join(row)} \\\\\n" for row in part) for part in (ours, papers))
    return (
        f"\\begin{{tabular}}{{ll{'r' * len(_COLUMNS)}}}\n\\toprule\n{heading} \\\\\n\\midrule\n"
        f"{body}\\bottomrule\n\\end{{tabular}}\n"
    )


def _rows(frame: pd.DataFrame) -> list[list[str]]:
    return [
        [
            str(row["model"]),
            _PAPERS if str(row["source"]).startswith("paper") else str(row["source"]),
            *("" if pd.isna(row[name]) else f"{row[name]:{digits}}" for name, _, digits in _COLUMNS),
        ]
        for _, row in frame.iterrows()
    ]


def _latex(text: str) -> str:
    """Text as it is to be read, its special characters escaped."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return re.sub(r"[\\~^&%$#_{}]", lambda found: special.get(found[0], "\\" + found[0]), text)
