"""Attention maps, attention-sink statistics and gate scores of gated-attention language models.

The names below are what a notebook needs. They are loaded when first used, so that importing the package, and
with it `gattn-viz --help`, costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gattn_viz.drawing.gates import draw_gate_maps, draw_gate_text
    from gattn_viz.drawing.heads import draw_heads
    from gattn_viz.drawing.maps import Look, draw_first_token, draw_grid, draw_maps
    from gattn_viz.drawing.paper import draw_paper_figure, read_paper_table
    from gattn_viz.errors import GattnVizError
    from gattn_viz.metrics.compared import CompareOptions
    from gattn_viz.metrics.gate_measures import GateOptions
    from gattn_viz.metrics.measures import Options
    from gattn_viz.metrics.pooling import MapView
    from gattn_viz.models.loading import load
    from gattn_viz.models.names import resolve
    from gattn_viz.pipeline import (
        AttentionMaps,
        Comparison,
        GateMaps,
        Run,
        attention_maps,
        compare,
        gate_map_table,
        gate_maps,
        gate_stats,
        gate_tokens,
        head_table,
        sink_stats,
    )
    from gattn_viz.pipeline.captions import caption
    from gattn_viz.pipeline.paper import PaperData, paper_data
    from gattn_viz.prompts import Prompt, read_prompts
    from gattn_viz.recipe import read_recipe

__version__ = version("gattn-viz")

_HOMES = {
    "AttentionMaps": "pipeline",
    "CompareOptions": "metrics.compared",
    "Comparison": "pipeline",
    "GateMaps": "pipeline",
    "GateOptions": "metrics.gate_measures",
    "GattnVizError": "errors",
    "Look": "drawing.maps",
    "MapView": "metrics.pooling",
    "Options": "metrics.measures",
    "PaperData": "pipeline.paper",
    "Prompt": "prompts",
    "Run": "pipeline",
    "attention_maps": "pipeline",
    "caption": "pipeline.captions",
    "compare": "pipeline",
    "draw_first_token": "drawing.maps",
    "draw_gate_maps": "drawing.gates",
    "draw_gate_text": "drawing.gates",
    "draw_grid": "drawing.maps",
    "draw_heads": "drawing.heads",
    "draw_maps": "drawing.maps",
    "draw_paper_figure": "drawing.paper",
    "gate_map_table": "pipeline",
    "gate_maps": "pipeline",
    "gate_stats": "pipeline",
    "gate_tokens": "pipeline",
    "head_table": "pipeline",
    "load": "models.loading",
    "paper_data": "pipeline.paper",
    "read_paper_table": "drawing.paper",
    "read_prompts": "prompts",
    "read_recipe": "recipe",
    "resolve": "models.names",
    "sink_stats": "pipeline",
}

__all__ = [
    "AttentionMaps",
    "CompareOptions",
    "Comparison",
    "GateMaps",
    "GateOptions",
    "GattnVizError",
    "Look",
    "MapView",
    "Options",
    "PaperData",
    "Prompt",
    "Run",
    "attention_maps",
    "caption",
    "compare",
    "draw_first_token",
    "draw_gate_maps",
    "draw_gate_text",
    "draw_grid",
    "draw_heads",
    "draw_maps",
    "draw_paper_figure",
    "gate_map_table",
    "gate_maps",
    "gate_stats",
    "gate_tokens",
    "head_table",
    "load",
    "paper_data",
    "read_paper_table",
    "read_prompts",
    "read_recipe",
    "resolve",
    "sink_stats",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
