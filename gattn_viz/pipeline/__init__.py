"""What a notebook calls: models and prompts in, tables and figures out.

    from gattn_viz import sink_stats, attention_maps, draw_maps

    sink_stats(["baseline", "gate_headwise"], by="layer")                # a pandas DataFrame
    [maps] = attention_maps(["gate_headwise"], layers=[1, 7, 21, 28])    # arrays
    draw_maps(maps)                                                      # a matplotlib Figure

The command line is a thin layer over this module. Models are loaded one after the other, each let go before the
next, unless `compare` times them.
"""

from gattn_viz.pipeline.comparison import Comparison, compare
from gattn_viz.pipeline.gate_scores import GateMaps, gate_map_table, gate_maps
from gattn_viz.pipeline.gates import gate_stats, gate_tokens
from gattn_viz.pipeline.heads import head_table
from gattn_viz.pipeline.maps import AttentionMaps, attention_maps
from gattn_viz.pipeline.run import Run
from gattn_viz.pipeline.stats import sink_stats

__all__ = [
    "AttentionMaps",
    "Comparison",
    "GateMaps",
    "Run",
    "attention_maps",
    "compare",
    "gate_map_table",
    "gate_maps",
    "gate_stats",
    "gate_tokens",
    "head_table",
    "sink_stats",
]
