"""What is measured: pure functions of arrays, and the table that names them.

`sums` reduces attention probabilities to what the measures need, a block of rows at a time (torch, on the
device where the block lives). `measures` turns one layer's sums into one number for each head (numpy).
Nothing here knows of models, prompts or files.
"""
