from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from gattn_viz import Run, attention_maps
from tests.cli.conftest import Cli

PROMPT = ("-p", "the cat sat on the mat")
FAST = ("--dpi", "40")


def test_one_model(cli: Cli, tmp_path: Path) -> None:
    done = cli("maps", "--model", "gate_headwise", "--layers", "1,3", *PROMPT, *FAST)
    assert done.code == 0
    assert done.out.split() == ["figs/maps_gate_headwise.png"]
    with Image.open(tmp_path / "figs" / "maps_gate_headwise.png") as image:
        assert image.format == "PNG"
        assert min(image.size) > 60


def test_several_models_give_a_grid_too(cli: Cli, tmp_path: Path) -> None:
    done = cli("maps", *PROMPT, *FAST, "-o", "out")
    assert done.out.split() == [
        "out/maps_baseline.png",
        "out/maps_gate_headwise.png",
        "out/maps_gate_elementwise.png",
        "out/maps_grid.png",
    ]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        path.removeprefix("out/") for path in done.out.split()
    )


def test_several_prompts_have_figures_of_their_own(cli: Cli) -> None:
    done = cli("maps", "-m", "baseline", "-p", "the cat", "-p", "the dog", *FAST)
    assert done.out.split() == ["figs/maps_baseline_prompt-1.png", "figs/maps_baseline_prompt-2.png"]


@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
def test_formats(cli: Cli, tmp_path: Path, kind: str) -> None:
    assert cli("maps", "-m", "baseline", *PROMPT, *FAST, "--format", kind).code == 0
    content = (tmp_path / "figs" / f"maps_baseline.{kind}").read_bytes()
    assert content.startswith({"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}[kind])


@pytest.mark.parametrize("heads", ["mean", "all", "1,3-4"])
def test_heads_and_raw_maps(cli: Cli, tmp_path: Path, tiny_trio: Path, heads: str) -> None:
    done = cli("maps", "-m", "baseline", "--layers", "1-2", "--heads", heads, *PROMPT, *FAST, "--raw")
    assert done.code == 0, done.err
    asked = [1, 3, 4] if heads == "1,3-4" else heads
    [expected] = attention_maps(
        ["baseline"],
        [PROMPT[1]],
        layers=[1, 2],
        heads=asked,
        run=Run(checkpoints=str(tiny_trio)),  # type: ignore[arg-type]
    )
    with safe_open(tmp_path / "figs" / "maps_baseline.safetensors", "numpy") as file:
        assert sorted(file.keys()) == ["layer_1", "layer_2"]
        for index, name in enumerate(("layer_1", "layer_2")):
            np.testing.assert_array_equal(file.get_tensor(name), expected.probabilities[index])
        metadata = file.metadata()
    assert metadata["heads"] == {"mean": "mean", "all": "[1, 2, 3, 4]", "1,3-4": "[1, 3, 4]"}[heads]
    assert json.loads(metadata["tokens"]) == expected.tokens


def test_looks(cli: Cli) -> None:
    for look in (
        ["--scale", "sqrt"],
        ["--scale", "log"],
        ["--vmax", "0.2"],
        ["--drop-first"],
        ["--layers", "all"],
    ):
        assert cli("maps", "-m", "baseline", *PROMPT, *FAST, *look).code == 0, look


def test_awkward_tokens(cli: Cli) -> None:
    """Mathtext, other scripts, line breaks and emoji, with any warning an error."""
    text = "$\\frac{$ 你好 नमस्ते مرحبا 🙂\n\t$x_1$ {}"
    assert cli("maps", "-m", "baseline", "-p", text, *FAST).code == 0


def test_one_token(cli: Cli) -> None:
    assert cli("maps", "-m", "baseline", *PROMPT, "--max-tokens", "1", *FAST).code == 0


def test_cut_prompts_are_said(cli: Cli) -> None:
    done = cli("maps", "-m", "baseline", *PROMPT, "--max-tokens", "3", *FAST)
    assert "warning: baseline: prompt 'prompt-1' cut to 3 tokens" in done.err


def test_no_figure_overwrites_another(cli: Cli, tiny_trio: Path, tmp_path: Path) -> None:
    """Models and prompts whose names are alike once they are part of a file's name, and one called `grid`."""
    (tmp_path / "grid").symlink_to(tiny_trio / "gate_headwise")
    lines = "\n".join(f'{{"id": "{name}", "text": "the cat"}}' for name in ("a/b", "a-b", "/", "x" * 300))
    (tmp_path / "p.jsonl").write_text(lines)
    (tmp_path / "baseline").symlink_to(tiny_trio / "baseline")
    models = ("-m", "baseline", "-m", "./baseline", "-m", "./grid")
    done = cli("maps", *models, "--layers", "1", "--prompts", "p.jsonl", *FAST)
    assert done.code == 0, done.err
    written = done.out.split()
    assert len(written) == len(set(written)) == 4 * (3 + 1)
    assert len(list((tmp_path / "figs").iterdir())) == 16
