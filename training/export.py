"""Write trained variants as the demo trio: bfloat16 safetensors, config and tokenizer, a directory each.

python -m training.export                     # every variant that has a checkpoint
python -m training.export --variant baseline
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoTokenizer

from gattn_viz.models.modeling import GatedQwen3ForCausalLM
from training.data import TOKENIZER
from training.recipe import VARIANTS, Recipe
from training.train import RUNS, make_config

DEMO = Path(__file__).parent.parent / "gattn_viz" / "demo"


def export(variant: str, checkpoint: Path, directory: Path) -> None:
    """Write the checkpoint's model to `directory`, where from_pretrained and AutoTokenizer find it."""
    stored = torch.load(checkpoint, weights_only=True)
    recipe = Recipe.from_dict(stored["recipe"])
    if stored["step"] < recipe.steps:
        print(f"{variant}: stopped at step {stored['step']} of {recipe.steps}")
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    config = make_config(recipe, variant, stored["layers"], tokenizer.bos_token_id, tokenizer.eos_token_id)
    model = GatedQwen3ForCausalLM(config)
    model.load_state_dict(stored["model"])
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    settings = directory / "tokenizer_config.json"
    values = json.loads(settings.read_text())
    for key in ("is_local", "local_files_only"):  # how this one was loaded, not what it is
        values.pop(key, None)
    settings.write_text(json.dumps(values, indent=2) + "\n")
    for path in directory.iterdir():
        path.chmod(0o644)
    size = sum(path.stat().st_size for path in directory.iterdir()) / 1e6
    print(f"{variant}: step {stored['step']}, {model.num_parameters():,} parameters, {size:.1f} MB, {directory}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS, action="append")
    parser.add_argument("--runs", type=Path, default=RUNS)
    parser.add_argument("--demo", type=Path, default=DEMO, help="where the variants' directories are made")
    args = parser.parse_args()
    for variant in args.variant or VARIANTS:
        checkpoint = args.runs / variant / "checkpoint.pt"
        if checkpoint.exists():
            export(variant, checkpoint, args.demo / variant)
        else:
            print(f"{variant}: no {checkpoint}")


if __name__ == "__main__":
    main()
