from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from gattn_viz import Run, attention_maps, read_recipe
from gattn_viz.figures.save import read_metadata
from gattn_viz.metrics.pooling import MapView
from gattn_viz.metrics.weights import Weight
from tests.cli.conftest import Cli

PROMPT = ("-p", "the cat sat on the mat")
TEN_AND_MORE = "the cat sat on the mat and the dog sat on the log while the rain fell on the roof "
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


def raw_maps(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.mark.parametrize(
    ("arguments", "view", "said"),
    [
        ([], MapView(), "T = 10"),
        (["--max-cells", "4"], MapView(max_cells=4), "T = 10, max over 3 x 3 cells"),
        (
            ["--max-cells", "4", "--pool", "mean", "--drop-first"],
            MapView(None, (2, None), 4, "mean"),
            "T = 10, first key left out, mean over 3 x 3 cells",
        ),
        (["--queries", "3-5", "--keys", "2-4"], MapView((3, 5), (2, 4)), "T = 10, queries 3-5, keys 2-4"),
        (["--queries", "-5", "--keys", "3-"], MapView((1, 5), (3, 5)), "T = 10, queries 1-5, keys 3-5"),
        # keys after the last query would all be blank
        (["--queries", "4"], MapView((4, 4), (1, 4)), "T = 10, query 4, keys 1-4"),
        (
            ["--queries", "9-", "--drop-first"],
            MapView((9, None), (2, None)),
            "T = 10, queries 9-10, first key left out",
        ),
        (["--keys", "1"], MapView(None, (1, 1)), "T = 10, key 1"),
    ],
)
def test_views(cli: Cli, tmp_path: Path, tiny_trio: Path, arguments: list[str], view: MapView, said: str) -> None:
    prompt = ("-p", TEN_AND_MORE, "--max-tokens", "10")
    done = cli("maps", "-m", "baseline", "--layers", "2", *prompt, *FAST, "--raw", *arguments)
    assert done.code == 0, done.err
    run = Run(checkpoints=str(tiny_trio), max_tokens=10)
    [expected] = attention_maps(["baseline"], [TEN_AND_MORE], layers=[2], view=view, run=run)
    tensors, metadata = raw_maps(tmp_path / "figs" / "maps_baseline.safetensors")
    np.testing.assert_array_equal(tensors["layer_2"], expected.probabilities[0])
    assert metadata["view"] == said
    assert metadata["pool"] == ("none" if "over" not in said else "max" if "max" in said else "mean")
    queries = expected.cells.queries
    assert json.loads(metadata["queries"]) == {"first": queries.first, "last": queries.last, "size": queries.size}
    assert json.loads(metadata["keys"])["first"] == expected.cells.keys.first
    assert len(json.loads(metadata["tokens"])) == 10
    of_figure = read_metadata(tmp_path / "figs" / "maps_baseline.png")
    assert of_figure["view"] == said
    assert of_figure["attention path"] == expected.attention_path


@pytest.mark.parametrize(
    ("weight", "quantity"),
    [
        ("probability", "attention probability"),
        ("value", "probability x value norm (L2)"),
        ("gate", "probability x norm of gate * value (L2)"),
        ("output", "norm added to the residual stream (L2)"),
    ],
)
def test_weights(cli: Cli, tmp_path: Path, tiny_trio: Path, weight: Weight, quantity: str) -> None:
    done = cli("maps", "-m", "gate_elementwise", "--layers", "2", *PROMPT, *FAST, "--raw", "--weight", weight)
    assert done.code == 0, done.err
    run = Run(checkpoints=str(tiny_trio))
    [expected] = attention_maps(["gate_elementwise"], [PROMPT[1]], layers=[2], weight=weight, run=run)
    tensors, metadata = raw_maps(tmp_path / "figs" / "maps_gate_elementwise.safetensors")
    np.testing.assert_array_equal(tensors["layer_2"], expected.probabilities[0])
    assert (metadata["weight"], metadata["quantity"]) == (weight, quantity)
    assert read_metadata(tmp_path / "figs" / "maps_gate_elementwise.png")["quantity"] == quantity


def test_no_gate_to_weigh_with(cli: Cli) -> None:
    """Before any weights are read: the model that has one is named first."""
    done = cli("maps", "-m", "gate_headwise", "-m", "baseline", *PROMPT, "--weight", "gate")
    assert done.code == 1
    assert done.out == ""
    assert "no gate in baseline; expected models with a gate on the attention output" in done.err
    assert "layers of" not in done.err
    assert cli("maps", "-m", "baseline", *PROMPT, "--weight", "norm").code == 2


def test_a_long_prompt_is_pooled_by_default(cli: Cli, tmp_path: Path, tiny_trio: Path) -> None:
    shutil.copytree(tiny_trio / "baseline", tmp_path / "long")
    config = json.loads((tmp_path / "long" / "config.json").read_text())
    (tmp_path / "long" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 600}))
    arguments = ("-p", TEN_AND_MORE * 60, "--max-tokens", "515", "--chunk", "100", "--raw", *FAST)
    done = cli("maps", "-m", "./long", "--layers", "1", *arguments)
    assert done.code == 0, done.err
    tensors, metadata = raw_maps(tmp_path / "figs" / "maps_long.safetensors")
    assert metadata["view"] == "T = 515, max over 2 x 2 cells"
    assert tensors["layer_1"].shape == (1, 258, 258)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--queries", "9-4"],
            "--queries is '9-4'; expected positions such as 100-200, 100-, -200 or 100, counted",
        ),
        (["--keys", "0-4"], "--keys is '0-4'"),
        (["--keys", "-"], "--keys is '-'"),
        (["--keys", "1,2"], "--keys is '1,2'"),
        (["--keys", "1-2-3"], "--keys is '1-2-3'"),
        (["--queries", "9" * 5000], "--queries is"),
        (["--queries", "-4", "--keys", "5-"], "the keys from 5 on come after the queries up to 4"),
        (["--keys", "1", "--drop-first"], "--keys is 1, which --drop-first leaves out"),
        (["--max-cells", "0"], "should be greater than or equal to 1"),
        (["--pool", "median"], "median"),
    ],
)
def test_views_that_are_none(cli: Cli, arguments: list[str], message: str) -> None:
    done = cli("maps", "-m", "no-such-model", *PROMPT, *arguments)
    assert done.code == 2
    # click breaks the message's lines in a box
    assert message in " ".join(done.err.replace("│", " ").split())


def test_a_view_beyond_the_prompt(cli: Cli) -> None:
    done = cli("maps", "-m", "baseline", "-p", TEN_AND_MORE, "--max-tokens", "10", "--queries", "8-11")
    assert done.code == 1
    assert "no queries 8-11: prompt 'prompt-1' has T = 10; expected positions 1 to 10" in done.err


def test_a_whole_file_is_one_prompt(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "two.txt").write_text("the cat\nthe dog\n")
    done = cli("maps", "-m", "baseline", "--layers", "1", "--prompts", "two.txt", "--whole-file", *FAST)
    assert done.out.split() == ["figs/maps_baseline.png"]
    assert cli("maps", "-m", "baseline", *PROMPT, "--whole-file").code == 2


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


def test_no_figure_overwrites_another_whose_whole_name_is_alike(cli: Cli, tiny_trio: Path, tmp_path: Path) -> None:
    """Model `m` on prompt `a_b` and model `m_a` on `b`; names that differ by case; a prompt that ends in -2."""
    for name in ("m", "m_a", "M"):
        (tmp_path / name).symlink_to(tiny_trio / "baseline")
    lines = "\n".join(f'{{"id": "{name}", "text": "the cat"}}' for name in ("a_b", "b", "b-2"))
    (tmp_path / "p.jsonl").write_text(lines)
    models = ("-m", "./m", "-m", "./m_a", "-m", "./M")
    done = cli("maps", *models, "--layers", "1", "--prompts", "p.jsonl", *FAST)
    assert done.code == 0, done.err
    written = done.out.split()
    assert len({path.casefold() for path in written}) == len(written) == 3 * (3 + 1)
    assert len(list((tmp_path / "figs").iterdir())) == 12
    # each is the map of whose name its own recipe says
    labels = set()
    for path in written:
        recipe = read_recipe(path)
        labels.add((*recipe.file.models, recipe.file.prompt))
    assert len(labels) == 12


def test_a_prompts_file_whose_name_is_no_utf8(cli: Cli, tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / name).write_text("the cat")
    arguments = ("-m", "baseline", "--prompts", name, "--whole-file")
    done = cli("maps", *arguments, "--layers", "1", "--raw", *FAST)
    assert done.code == 0, done.err
    assert read_recipe(tmp_path / "figs" / "maps_baseline.png").prompts.ids == ("caf\N{REPLACEMENT CHARACTER}",)
    done = cli("sink-stats", *arguments, "--per-prompt", "--by", "model", "-o", "table.csv")
    assert done.code == 0, done.err
    assert "caf\N{REPLACEMENT CHARACTER}" in (tmp_path / "table.csv").read_text()
    assert cli("recipe", "table.csv").code == 0
