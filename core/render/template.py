"""Any other model family: its `tokenizer.json` and its own Jinja chat template, sandboxed.

Promises the text that `apply_chat_template` prints and ids in which no user, system or tool text
becomes a special token. Does not know the structure of completions: a text reply can then only be
taken whole.
"""

import datetime
import hashlib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox
import tokenizers

from core.errors import RenderError, TokenizerError
from core.render.base import RenderedPrompt, refuse_preserving
from core.render.history import native_history
from core.schema import Message, Tool

# Put inside a special token's spelling in user text, so that it is not found in the rendered text.
# A non-character of Unicode: no model text holds it, and it is taken out again before encoding.
_BREAK = "\ufdd0"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class JsonTokenizer:
    """A `tokenizer.json` through the `tokenizers` library."""

    def __init__(self, data: bytes) -> None:
        spec = json.loads(data)
        self._whole = tokenizers.Tokenizer.from_str(data.decode())
        self.specials: dict[str, int] = {t["content"]: t["id"] for t in spec["added_tokens"]}
        self.skippable = frozenset(t["id"] for t in spec["added_tokens"] if t["special"])
        self._special_ids = set(self.specials.values())
        self._byte_level = "ByteLevel" in json.dumps(spec.get("decoder"))
        # Without added tokens and post-processor, text can only become ordinary tokens.
        plain = {**spec, "added_tokens": [], "post_processor": None}
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(plain))
        self.vocab_size: int = self._whole.get_vocab_size(with_added_tokens=True)
        self.sha256 = hashlib.sha256(data).hexdigest()
        self.hashes = {"tokenizer.json": self.sha256}

    def encode_ordinary(self, text: str) -> list[int]:
        return list(self._plain.encode(_clean(text), add_special_tokens=False).ids)

    def encode_special(self, text: str) -> list[int]:
        return list(self._whole.encode(_clean(text), add_special_tokens=False).ids)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.token_bytes(i) for i in ids)

    def decode(self, ids: Sequence[int]) -> str:
        for token_id in ids:
            self._token(token_id)
        return str(self._whole.decode(list(ids), skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token_id in self._special_ids:
            return token.encode()
        if self._byte_level:
            return bytes(self._byte_of[c] for c in token)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("\u2581", " ").encode()

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def _token(self, token_id: int) -> str:
        token = self._whole.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            raise TokenizerError(
                f"token id {token_id}: not in a vocabulary of {self.vocab_size}",
                kind="token_id_unknown",
            )
        return str(token)

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """GPT-2's alphabet: printable Latin-1 bytes as themselves, the rest from U+0100 on."""
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [b for b in range(256) if b not in set(printable)]
        shifted = {chr(0x100 + i): b for i, b in enumerate(others)}
        return {chr(b): b for b in printable} | shifted


class TemplateRenderer:
    """Renders through the template of a tokenizer directory."""

    variant = "template"
    grammar = None

    def __init__(self, tokenizer: JsonTokenizer, template: str, config: dict[str, Any]) -> None:
        self.tokenizer = tokenizer
        self._names = {key: _content(config.get(key)) for key in ("bos_token", "eos_token")}
        self.end_id = tokenizer.specials.get(self._names["eos_token"])
        # Longest first: a special that begins with another one must win.
        spellings = sorted(tokenizer.specials, key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, spellings)) or r"(?!)")
        environment = _environment()
        self._template = environment.from_string(template)
        asks_for = jinja2.meta.find_undeclared_variables(environment.parse(template))
        self.preserves_thinking = "preserve_thinking" in asks_for

    @classmethod
    def load(cls, directory: Path) -> "TemplateRenderer":
        """Raises TokenizerError in one line."""
        try:
            data = (directory / "tokenizer.json").read_bytes()
            config = json.loads((directory / "tokenizer_config.json").read_bytes())
            file = directory / "chat_template.jinja"
            template = file.read_text() if file.exists() else _template_of(config)
        except OSError as e:
            raise TokenizerError(
                f"{e.filename}: cannot be read ({e.strerror}); a template tokenizer directory holds"
                " tokenizer.json, tokenizer_config.json and a chat template"
            ) from e
        except (ValueError, KeyError, TypeError) as e:
            raise TokenizerError(
                f"{directory}: no chat template, neither in the config nor as a file ({e})"
            ) from e
        try:
            return cls(JsonTokenizer(data), template, config)
        except jinja2.TemplateError as e:
            raise TokenizerError(f"{directory}: chat template is not Jinja: {e}") from e
        except Exception as e:  # the `tokenizers` library raises bare Exception
            raise TokenizerError(f"{directory}/tokenizer.json: not readable: {e}") from e

    def render(
        self,
        messages: list[Message],
        tools: list[Tool] | None,
        thinking: bool,
        preserve_thinking: bool = False,
    ) -> RenderedPrompt:
        if preserve_thinking and not self.preserves_thinking:
            raise refuse_preserving(self)
        history = native_history(messages)
        found: set[str] = set()
        shielded = [m if m["role"] == "assistant" else self._shield(m, found) for m in history]
        try:
            text = self._template.render(
                messages=shielded,
                tools=self._shield(tools, found) if tools else None,
                add_generation_prompt=True,
                thinking=thinking,
                enable_thinking=thinking,
                **({"preserve_thinking": True} if preserve_thinking else {}),
                **self._names,
            )
        except (jinja2.TemplateError, TypeError, ValueError, RecursionError) as e:
            raise RenderError(f"chat template: {e}", kind="template_refused") from e
        clean = text.replace(_BREAK, "")
        try:
            clean.encode()
        except UnicodeEncodeError as e:
            raise RenderError("messages: lone surrogate", kind="lone_surrogate") from e
        return RenderedPrompt(
            text=clean,
            ids=self._ids(text) if found else self.tokenizer.encode_special(text),
            tools_mode="json" if tools else None,
            control_strings=sorted(found),
        )

    def _shield(self, value: Any, found: set[str]) -> Any:
        if isinstance(value, str):
            return self._specials.sub(lambda m: self._broken(m[0], found), value)
        if isinstance(value, list):
            return [self._shield(v, found) for v in value]
        if isinstance(value, dict):
            return {k: self._shield(v, found) for k, v in value.items()}
        return value

    @staticmethod
    def _broken(special: str, found: set[str]) -> str:
        found.add(special)
        return special[0] + _BREAK + special[1:]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for match in self._specials.finditer(text):
            ids += self.tokenizer.encode_ordinary(text[start : match.start()].replace(_BREAK, ""))
            ids.append(self.tokenizer.specials[match[0]])
            start = match.end()
        return ids + self.tokenizer.encode_ordinary(text[start:].replace(_BREAK, ""))


def _clean(text: str) -> str:
    """`tokenizers` takes UTF-8 only: a lone surrogate becomes U+FFFD, as tiktoken does it."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _content(token: Any) -> str:
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else ""


def _template_of(config: dict[str, Any]) -> str:
    template = config["chat_template"]
    if isinstance(template, list):
        named = {t["name"]: t["template"] for t in template}
        template = named["default"]
    if not isinstance(template, str):
        raise TypeError("chat_template is not text")
    return template


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda f: datetime.datetime.now().strftime(f)
    return environment


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    """Unlike Jinja's own filter: no HTML escapes, non-ASCII kept (as transformers does it)."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
