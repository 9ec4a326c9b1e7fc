"""The command line: one file a command, each a thin layer over `gattn_viz.pipeline`.

Nothing here may import torch, transformers, pandas or matplotlib at its top: `gattn-viz --help` answers at once.
"""
