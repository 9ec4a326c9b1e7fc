"""Train one variant of the demo trio.

    python -m training.train --variant baseline

Same data, same order, same steps and, where the shapes agree, the same initial values for every variant. The run
writes `training/runs/<variant>/`: a checkpoint (replaced atomically; run the command again to go on) and
`log.jsonl`, a line for every evaluation on held-out prose.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gattn_viz.models.configuration import GatedQwen3Config
from gattn_viz.models.modeling import GatedQwen3ForCausalLM
from training.data import Corpus, batch, held_out_batch
from training.fast import speed_up
from training.measure import measure
from training.recipe import RECIPE, VARIANTS, Recipe, Stage

RUNS = Path(__file__).parent / "runs"


def make_config(recipe: Recipe, variant: str, layers: int, bos: int, eos: int) -> GatedQwen3Config:
    return GatedQwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=recipe.num_attention_heads,
        num_key_value_heads=recipe.num_key_value_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=True,
        initializer_range=recipe.initializer_range,
        use_qk_norm=recipe.use_qk_norm,
        headwise_attn_output_gate=variant == "gate_headwise",
        elementwise_attn_output_gate=variant == "gate_elementwise",
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=eos,
    )


@torch.no_grad()
def initialise(model: GatedQwen3ForCausalLM, recipe: Recipe) -> None:
    """Initial values by parameter name, so that what two variants share starts out the same.

    `q_proj` holds the query and the gate rows of each KV group: the query rows are the baseline's, the gate rows
    have their own.
    """
    config = model.config
    for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
            continue
        generator = torch.Generator().manual_seed(recipe.seed * 100_003 + index)
        groups = config.num_key_value_heads
        if name.endswith("q_proj.weight"):
            query_rows = config.num_attention_heads * config.head_dim // groups
            values = torch.randn(groups, query_rows, config.hidden_size, generator=generator)
            gate_rows = parameter.shape[0] // groups - query_rows
            gate = torch.randn(groups, gate_rows, config.hidden_size, generator=generator)
            values = torch.cat([values, gate], dim=1).flatten(0, 1)
        else:
            values = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(values * recipe.initializer_range)


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    parameters = [parameter for _, parameter in sorted(model.named_parameters())]
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": recipe.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=0.0,
        betas=recipe.betas,
        eps=recipe.eps,
        fused=True,
    )


def source_layer(layer: int, shallow: int) -> int:
    """Of which layer (from 0) of a model of `shallow` layers a layer of the deeper one is a copy.

    The first layer reads embeddings and stays the only one of its kind: 1 2 3 -> 1 2 3 2 3 2 3. A model of one
    layer can only double.
    """
    return layer if layer < shallow else 1 + (layer - 1) % max(1, shallow - 1) if shallow > 1 else 0


@torch.no_grad()
def grow(
    model: GatedQwen3ForCausalLM, optimizer: torch.optim.AdamW, layers: int, variant: str, recipe: Recipe
) -> tuple[GatedQwen3ForCausalLM, torch.optim.AdamW]:
    """A deeper model whose layers are copies of `model`'s, with copies of AdamW's moments too."""
    config = model.config
    shallow = config.num_hidden_layers
    deep_config = make_config(recipe, variant, layers, config.bos_token_id, config.eos_token_id)
    deep = GatedQwen3ForCausalLM(deep_config)
    deep_optimizer = make_optimizer(deep, recipe)
    source = dict(model.named_parameters())
    for name, parameter in deep.named_parameters():
        old = name
        if name.startswith("model.layers."):
            _, _, number, rest = name.split(".", 3)
            old = f"model.layers.{source_layer(int(number), shallow)}.{rest}"
        parameter.copy_(source[old])
        state = optimizer.state.get(source[old])
        if state:
            deep_optimizer.state[parameter] = {key: value.clone() for key, value in state.items()}
    return deep, deep_optimizer


def stage_at(recipe: Recipe, step: int) -> tuple[Stage, int]:
    """The stage of a step, and how many steps of that stage came before it."""
    for stage in recipe.stages:
        if step < stage.steps:
            return stage, step
        step -= stage.steps
    raise IndexError(f"the recipe has {recipe.steps} steps")


def learning_rate(recipe: Recipe, step: int) -> float:
    stage, done = stage_at(recipe, step)
    start, end = stage.lr
    return (start + (end - start) * done / stage.steps) * min(1.0, (done + 1) / max(1, stage.warmup))


def save(
    path: Path, model: GatedQwen3ForCausalLM, optimizer: torch.optim.Optimizer, step: int, recipe: Recipe
) -> None:
    """Write a checkpoint beside the last one, then put it in its place."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "layers": model.config.num_hidden_layers,
        "recipe": recipe.to_dict(),
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def train(
    variant: str,
    recipe: Recipe,
    corpus: Corpus,
    directory: Path,
    *,
    until: int | None = None,
    fast: bool = True,
) -> GatedQwen3ForCausalLM:
    """Train `variant`, or go on from the checkpoint in `directory`.

    Args:
        until: stop after this step, as if interrupted; by default train to the recipe's end.
        fast: compiled layers and bfloat16 products (see `training.fast`).
    """
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint, log = directory / "checkpoint.pt", directory / "log.jsonl"
    # EOS is the token after BOS in `train_tokenizer`
    bos, eos = corpus.bos, corpus.bos + 1
    step, layers = 0, recipe.stages[0].layers
    stored: dict[str, Any] | None = None
    if checkpoint.exists():
        stored = torch.load(checkpoint, weights_only=True)
        if json.dumps(stored["recipe"]) != json.dumps(recipe.to_dict()):
            raise SystemExit(f"{checkpoint} was made with another recipe: move it away or restore the recipe")
        step, layers = stored["step"], stored["layers"]
    else:
        log.write_text("")
    model = GatedQwen3ForCausalLM(make_config(recipe, variant, layers, bos, eos))
    optimizer = make_optimizer(model, recipe)
    if stored is None:
        initialise(model, recipe)
    else:
        model.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])

    def prepare() -> None:
        model.train()
        if fast:
            model.set_attn_implementation("sdpa")
            speed_up(model)

    prepare()
    held_out = torch.from_numpy(held_out_batch(corpus, 64, 64))
    started, first_step, running = time.time(), step, []
    last = recipe.steps if until is None else min(until, recipe.steps)
    while step < last:
        stage, _ = stage_at(recipe, step)
        if stage.layers != model.config.num_hidden_layers:
            model, optimizer = grow(model, optimizer, stage.layers, variant, recipe)
            prepare()
        ids = torch.from_numpy(batch(corpus, recipe, stage, step))
        lr = learning_rate(recipe, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss: Tensor = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        running.append(loss.item())
        step += 1
        if step % recipe.evaluate_every == 0 or step == recipe.steps:
            figures = measure(model, held_out)
            line = {
                "step": step,
                "depth": stage.layers,
                "lr": round(lr, 6),
                "loss": round(float(np.mean(running)), 4),
                "held_out_loss": round(figures.loss, 4),
                "first_token_mass": round(float(np.mean(figures.layers)), 4),
                "uniform_null": round(figures.uniform_null, 4),
                "layers": [round(value, 2) for value in figures.layers],
                "heads": [[round(float(value), 2) for value in heads] for heads in figures.first_token_mass],
                "gate_mean": round(float(figures.gate_mean.mean()), 4) if figures.gate_mean.size else None,
                "max_activation": round(float(figures.max_activation.max()), 1),
                "grad_norm": round(float(norm), 3),
                "seconds_per_step": round((time.time() - started) / (step - first_step), 3),
            }
            running = []
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
        if step % recipe.checkpoint_every == 0 or step == last:
            save(checkpoint, model, optimizer, step, recipe)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--runs", type=Path, default=RUNS, help="where the run's directory is made")
    parser.add_argument("--recipe", type=Path, help="JSON whose values replace those of training/recipe.py")
    parser.add_argument("--slow", action="store_true", help="neither compile nor use bfloat16 products")
    args = parser.parse_args()
    torch.set_num_threads(1)
    recipe = Recipe.from_dict(json.loads(args.recipe.read_text())) if args.recipe else RECIPE
    train(args.variant, recipe, Corpus.load(recipe), args.runs / args.variant, fast=not args.slow)


if __name__ == "__main__":
    main()
