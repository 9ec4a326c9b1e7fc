"""Models: the project's gated Qwen3, and finding and loading a causal LM by name.

`configuration`, `attention` and `modeling` are the model itself. `names` finds a checkpoint, `checkpoint_config`
and `loading` read it, `libraries` turns what transformers and the Hub raise into one line, `description` says what
it is.
"""
