"""Models: the project's gated Qwen3, and finding and loading a causal LM by name."""
