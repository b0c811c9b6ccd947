"""The built-in target: its corpus, its tokenizer and weights, and the gateway that serves it."""

from core.config import TARGET_DIR

__all__ = ["TARGET_DIR"]
