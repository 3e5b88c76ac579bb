"""Models of Hugging Face: their mixtures with expert parallelism, and dense ones made into mixtures.

Nothing here imports ``transformers`` or ``peft``: modules are known by the names of their classes.
"""
