"""Cut the demo's default prompts from the held-out prose.

    python -m training.prompts                    # writes gattn_viz/demo/prompts.jsonl

Each passage begins where a phrase stands and ends with the first sentence that makes it long enough.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from transformers import AutoTokenizer

from training.data import TOKENIZER
from training.export import DEMO
from training.fetch import WORKS

# id, work, how the passage begins, least number of tokens. The first is short, for maps.
PASSAGES = [
    ("lincoln-history", "sotu-1862_abraham_lincoln_r", "We of this Congress", 20),
    ("persuasion-vanity", "austen-persuasion", "Vanity was the beginning", 80),
    ("persuasion-anne", "austen-persuasion", "Anne hoped she had outlived", 90),
    ("persuasion-letter", "austen-persuasion", "I can listen no longer in silence", 110),
    ("persuasion-kellynch", "austen-persuasion", "Captain Wentworth was come to Kellynch", 90),
    ("persuasion-lane", "austen-persuasion", "Anne was still in the lane", 80),
    ("persuasion-cottage", "austen-persuasion", "She had no dread of these two months", 90),
    ("ruth-moab", "bible-ruth", "Now it came to pass in the days when the judges ruled", 100),
    ("jonah-storm", "bible-jonah", "But the LORD sent out a great wind", 100),
    ("jonah-gourd", "bible-jonah", "And the LORD God prepared a gourd", 90),
    ("jefferson-peace", "sotu-1801_thomas_jefferson_dr", "Whilst we devoutly return thanks", 80),
    ("jefferson-tripoli", "sotu-1801_thomas_jefferson_dr", "To this state of general peace", 100),
    ("lincoln-nations", "sotu-1862_abraham_lincoln_r", "If the condition of our relations", 90),
    ("roosevelt-freedoms", "sotu-1941_franklin_d_roosevelt_d", "In the future days", 110),
    ("kennedy-partners", "sotu-1962_john_f_kennedy_d", "Members of the Congress, the Constitution makes", 100),
    ("kennedy-nations", "sotu-1962_john_f_kennedy_d", "But arms alone are not enough", 110),
]  # fmt: skip

SOURCES = {
    "austen-persuasion": "Jane Austen, Persuasion (1817)",
    "bible-jonah": "King James Bible, Jonah",
    "bible-ruth": "King James Bible, Ruth",
    "sotu-1801_thomas_jefferson_dr": "Thomas Jefferson, State of the Union, 1801",
    "sotu-1862_abraham_lincoln_r": "Abraham Lincoln, State of the Union, 1862",
    "sotu-1941_franklin_d_roosevelt_d": "Franklin D. Roosevelt, State of the Union, 1941",
    "sotu-1962_john_f_kennedy_d": "John F. Kennedy, State of the Union, 1962",
}
MOST = 200  # tokens of a passage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=DEMO / "prompts.jsonl")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    lines = []
    for name, work, beginning, least in PASSAGES:
        text = (WORKS / f"{work}.txt").read_text(encoding="utf-8").replace("\n", " ")
        text = text[text.index(beginning) :]
        for end in re.finditer(r"[.!?][\"']?(?= [A-Z\"'(])", text):
            passage = text[: end.end()]
            tokens = len(tokenizer(passage).input_ids)
            if tokens >= least:
                break
        if tokens > MOST:
            raise SystemExit(f"{name}: {tokens} tokens, more than {MOST}; begin elsewhere")
        print(f"{name}: {tokens} tokens")
        record = {"id": name, "text": passage, "source": SOURCES[work], "licence": "public domain"}
        lines.append(json.dumps(record, ensure_ascii=False))
    args.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
