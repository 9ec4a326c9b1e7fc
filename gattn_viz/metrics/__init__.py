"""What is measured: pure functions of arrays, and the table that names them.

`sums` reduces attention to what the measures need, some rows at a time (torch, on the device where the rows live),
`pooling` to the part of a map that is asked for. `measures` turns one layer's sums into one number for each head
(numpy), `over_prompts` adds prompts up, and `bootstrap` resamples them. Nothing here knows of models or files.
"""
