"""Backends behind one narrow protocol (`base.Provider`)."""

from core.config import Config
from core.errors import ConfigError
from core.providers.base import Provider
from core.providers.openai import OpenAICompatible
from core.providers.openrouter import OpenRouter
from core.providers.sglang import SGLang

__all__ = ["make_provider"]


def make_provider(backend: str, config: Config) -> Provider:
    """The backend's client; its session lives in the running loop. Raises ConfigError."""
    match backend:
        case "openrouter":
            return OpenRouter(config)
        case "sglang":
            return SGLang(config)
        case "vllm" | "openai":
            return OpenAICompatible(config, backend)
        case _:
            raise ConfigError(
                f"unknown backend {backend!r}; use openrouter, sglang, vllm or openai"
            )
