"""The recipe of a file: what its numbers were made with, kept in the file itself or beside it.

    from gattn_viz import read_recipe

    read_recipe("figs/maps_grid.png").command_line     # gattn-viz maps --layers 1,7,21,28
    read_recipe("sinks.csv").models[0].weights_sha256

`content` is what it says, `stored` where it is kept, `agreement` whether the numbers of two files agree.
"""

from gattn_viz.recipe.content import FileMade, MapSummary, ModelUsed, PromptsUsed, Recipe
from gattn_viz.recipe.stored import read_recipe

__all__ = ["FileMade", "MapSummary", "ModelUsed", "PromptsUsed", "Recipe", "read_recipe"]
