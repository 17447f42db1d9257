"""Llama in plain PyTorch, with not a word of parallelism in it."""
