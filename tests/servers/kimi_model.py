"""Model folders that a real server can load under Kimi's tokenizer, made from files beside the
checkout: nothing of them is committed."""

import json
import shutil
from pathlib import Path

from core.embedded import TARGET_DIR
from tests.kimi_files import KIMI
from tests.servers.serving import KIMI_CODE

TOKENIZER = ("tiktoken.model", "tokenizer_config.json")
CODE = ("tokenization_kimi.py", "tool_declaration_ts.py", "chat_template.jinja")
VOCABULARY = 163_840
END = 163_586
LENGTH = 131_072
"""Context of the random model: the longest golden prompts have 60,000 characters in one run."""


def random_kimi(folder: Path, seed: int = 0) -> Path:
    """A random Llama (4 layers, 64 wide) over Kimi's whole vocabulary: its prompts are Kimi's, its
    completions noise."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        bos_token_id=163_584,
        eos_token_id=END,
        pad_token_id=163_839,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    _add_tokenizer(folder, KIMI)
    return folder


def embedded_target(folder: Path) -> Path:
    """The built-in model: it really thinks and calls, in Kimi's grammar over a small vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TARGET_DIR / name, folder / name)
    _add_tokenizer(folder, TARGET_DIR)
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    return folder


def _add_tokenizer(folder: Path, source: Path) -> None:
    for name in TOKENIZER:
        shutil.copy(source / name, folder / name)
    for name in CODE:
        shutil.copy(KIMI_CODE / name, folder / name)
    path = folder / "tokenizer_config.json"
    told = json.loads(path.read_text())
    told["auto_map"] = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    told["tokenizer_class"] = "TikTokenTokenizer"
    path.write_text(json.dumps(told))
