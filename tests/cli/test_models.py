from __future__ import annotations

from pathlib import Path

from gattn_viz.models.names import OFFICIAL_REPO
from tests.cli.conftest import Cli


def test_lists_what_each_variant_stands_for(cli: Cli, tiny_trio: Path) -> None:
    lines = cli("models").out.splitlines()
    assert len(lines) == 4
    for variant, line in zip(("baseline", "gate_headwise", "gate_elementwise"), lines[1:], strict=True):
        assert line.split() == [variant, "directory", str(tiny_trio / variant)]


def test_official_is_listed_without_the_network(cli: Cli) -> None:
    done = cli("models", "--checkpoints", "official")
    assert done.code == 0
    assert f"Hub {OFFICIAL_REPO}, revision main, subfolder 1B_gate_headwise" in done.out


def test_describes_a_model(cli: Cli) -> None:
    done = cli("models", "gate_headwise")
    facts = {line[:17].strip(): line[17:].strip() for line in done.out.splitlines()}
    assert facts["type"] == "gated_qwen3"
    assert facts["layers"] == "3"
    assert facts["heads"] == "4, 2 KV, of 8"
    assert facts["gate"] == "headwise, per KV group in q_proj"
    # 300 x 32 embeddings, tied; a layer: q 36, k 16, v 16 rows of 32, o 32 x 32, q and k norm 8 each,
    # MLP 3 x 48 x 32, two norms of 32; a final norm of 32
    layer = (36 + 16 + 16) * 32 + 32 * 32 + 16 + 3 * 48 * 32 + 64
    total = 300 * 32 + 3 * layer + 32
    assert facts["parameters"] == f"{total:,}"
    assert facts["of the gate"] == f"{3 * 4 * 32} ({3 * 4 * 32 / total:.2%})"
    assert facts["BOS"] == "<s>"


def test_describes_several_side_by_side(cli: Cli) -> None:
    done = cli("models", "baseline", "gate_elementwise")
    line = next(line for line in done.out.splitlines() if line.startswith("gate "))
    assert line.split() == ["gate", "none", "elementwise,", "per", "KV", "group", "in", "q_proj"]


def test_lists_a_variant_that_is_missing(cli: Cli, tiny_trio: Path, tmp_path: Path) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "baseline").symlink_to(tiny_trio / "baseline")
    done = cli("models", "--checkpoints", "some")
    assert done.code == 0
    _, baseline, headwise, _ = done.out.splitlines()
    assert baseline.split() == ["baseline", "directory", "some/baseline"]
    assert headwise.split()[:2] == ["gate_headwise", "none:"]
