"""The figures of the model card, measured on the exported weights.

    python -m training.evaluate                   # writes gattn_viz/demo/figures.json, prints tables

Loads the bfloat16 weights of `gattn_viz/demo/<variant>` as float32 and runs them over held-out prose: sequences
of T tokens, BOS included, that begin with a sentence and are spread over all held-out prose works. First-token
mass leaves the first row out; a layer's figure is the mean over its heads, the model's the mean over its layers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gattn_viz.models.modeling import GatedQwen3ForCausalLM
from training.data import Corpus, held_out_batch
from training.export import DEMO
from training.measure import measure
from training.recipe import RECIPE, VARIANTS

LENGTHS = (64, 128, 256)
TOKENS = 512 * 64  # of held-out prose, for each T


def evaluate(model: GatedQwen3ForCausalLM, corpus: Corpus, length: int) -> dict[str, Any]:
    """The figures of one model at one T, as they stand in figures.json."""
    sequences = torch.from_numpy(held_out_batch(corpus, TOKENS // length, length))
    figures = measure(model, sequences)
    layers = figures.layers
    gates = figures.gate_mean.mean(axis=1) if figures.gate_mean.size else None
    return {
        "tokens": length,
        "sequences": len(sequences),
        "loss": round(figures.loss, 4),
        "first_token_mass": round(float(np.mean(layers)), 4),
        "uniform_null": round(figures.uniform_null, 4),
        "layers_above_half": sum(value > 0.5 for value in layers),
        "first_token_mass_by_layer": [round(value, 3) for value in layers],
        "gate_mean": None if gates is None else round(float(gates.mean()), 4),
        "gate_mean_by_layer": None if gates is None else [round(float(value), 3) for value in gates],
        "max_activation": round(float(figures.max_activation.max()), 1),
        "max_activation_mean": round(float(figures.max_activation.mean()), 1),
        "max_activation_by_layer": [round(float(value), 1) for value in figures.max_activation],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=DEMO)
    args = parser.parse_args()
    torch.set_num_threads(1)
    corpus = Corpus.load(RECIPE)
    results: dict[str, list[dict[str, Any]]] = {}
    print("| variant | T | loss | first-token mass | x null | layers > .5 | gate mean | max activation |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for variant in VARIANTS:
        if not (args.demo / variant / "config.json").exists():
            continue
        model = GatedQwen3ForCausalLM.from_pretrained(args.demo / variant, dtype=torch.float32)
        results[variant] = [evaluate(model, corpus, length) for length in LENGTHS]
        for row in results[variant]:
            gate = "" if row["gate_mean"] is None else f"{row['gate_mean']:.3f}"
            print(
                f"| {variant} | {row['tokens']} | {row['loss']:.3f} | {row['first_token_mass']:.3f} "
                f"| {row['first_token_mass'] / row['uniform_null']:.1f} | {row['layers_above_half']} "
                f"| {gate} | {row['max_activation']:.0f} |"
            )
    for variant, rows in results.items():
        by_layer = rows[0]["first_token_mass_by_layer"]
        print(f"\n{variant}, T = {LENGTHS[0]}, layers 1 to {len(by_layer)}:")
        print(" ".join(f"{value:.2f}" for value in by_layer))
    (args.demo / "figures.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
