"""The built-in target: its corpus, its tokenizer and weights, and the gateway that serves it."""

from pathlib import Path

TARGET_DIR = Path(__file__).parent / "target"
"""tiktoken.model, tokenizer_config.json, config.json, model.safetensors: the layout of a Kimi
checkpoint."""
