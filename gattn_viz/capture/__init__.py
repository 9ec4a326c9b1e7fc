"""Capture: run a model over prompts and take what was asked for out of each layer, changing nothing.

`attention` is the attention function that sees the probabilities, `eager` takes them from models that compute
their own, `collector` keeps what was asked for, `hooks` reads gates and residual stream, `checks` looks at what is
passed, and `run` puts them together: start there.
"""
