"""Tokenizer files of a hub repository, from the local cache or, only when asked, over the network.

Promises: data files by name and nothing else, so that no code of a checkpoint arrives, let alone
runs; one commit for all of them; Kimi's vocabulary is the known one. Every failure is one line.
`huggingface_hub` is imported when a hub name is looked up, not before.
"""

import hashlib
import logging
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

from core.errors import TokenizerError

KIMI_FILES = ("tiktoken.model", "tokenizer_config.json", "config.json", "generation_config.json")
TEMPLATE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)
NEEDED = 2
"""So many of the files, from the first on, must be there; the rest may be missing."""
# tinker-cookbook's pins; all three hold the tokenizer that the golden vectors were made with.
REVISIONS = {
    "moonshotai/Kimi-K2-Thinking": "a51ccc050d73dab088bf7b0e2dd9b30ae85a4e55",
    "moonshotai/Kimi-K2.5": "2426b45b6af0da48d0dcce71bbce6225e5c73adc",
    "moonshotai/Kimi-K2.6": "b5aabbfb20227ed42becbf5541dbffd213942c58",
}
KIMI_SHA256 = "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103"
"""Of their tiktoken.model."""
REACH_S = 10.0
_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w][\w./-]*))?")


class HubName(NamedTuple):
    """`revision`: a commit, a branch or a tag."""

    repo: str
    revision: str

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}"


def hub_name(text: str) -> HubName | None:
    """`owner/name` or `owner/name@revision`; None for what can only be a path. Without a revision:
    the pinned one where this module knows it, else the branch `main`."""
    match = _NAME.fullmatch(text)
    return HubName(match[1], match[2] or REVISIONS.get(match[1], "main")) if match else None


def cached(name: HubName, files: tuple[str, ...]) -> Path | None:
    """The folder with the files, without any network; None when one that is needed is missing.
    Raises TokenizerError, as `download` does: what was refused once lies in the cache."""
    from huggingface_hub import try_to_load_from_cache

    found = [
        try_to_load_from_cache(name.repo, file, revision=name.revision) for file in files[:NEEDED]
    ]
    if not all(isinstance(f, str) for f in found):
        return None
    folder = Path(str(found[0])).parent
    _refuse_other(name._replace(revision=folder.name), folder, files)
    return folder


def download(name: HubName, files: tuple[str, ...]) -> Path:
    """Fetch what is not in the cache yet; returns the folder, whose name is the commit."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    _refuse_unreachable(name)
    first = _fetched(name, files[0], needed=True)
    assert first is not None
    at_commit = name._replace(revision=first.parent.name)
    for i, file in enumerate(files[1:], 1):
        _fetched(at_commit, file, needed=i < NEEDED)
    _refuse_other(at_commit, first.parent, files)
    return first.parent


def _refuse_other(at_commit: HubName, folder: Path, files: tuple[str, ...]) -> None:
    if at_commit.repo not in REVISIONS or files is not KIMI_FILES:
        return
    found = hashlib.sha256((folder / files[0]).read_bytes()).hexdigest()
    if found != KIMI_SHA256:
        raise TokenizerError(
            f"{at_commit}: tiktoken.model has sha256 {found[:12]}, Kimi's has"
            f" {KIMI_SHA256[:12]}; do not use it",
            kind="tokenizer_mismatch",
        )


def _refuse_unreachable(name: HubName) -> None:
    """The hub's library tries six times, over 20 s, what a machine without network cannot do."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        raise TokenizerError(f"{name}: not in the hub's cache, and HF_HUB_OFFLINE forbids to ask")
    try:
        asked = urllib.request.Request(ENDPOINT, method="HEAD")
        urllib.request.urlopen(asked, timeout=REACH_S).close()
    except urllib.error.HTTPError:
        return  # it answers
    except (OSError, ValueError) as e:
        raise TokenizerError(
            f"{name}: the hub {_public(ENDPOINT)} cannot be reached ({_reason(e)}); fetch it where"
            " there is a network, and name the folder"
        ) from e


def _fetched(name: HubName, file: str, needed: bool) -> Path | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name.repo, file, revision=name.revision, library_name="eyas"))
    except Exception as e:  # the hub's own, its HTTP client's, the disk's: all mean "not here"
        absent = isinstance(e, EntryNotFoundError) and not isinstance(e, LocalEntryNotFoundError)
        if absent and not needed:
            return None
        raise TokenizerError(f"{name}: {file} could not be fetched ({_reason(e)})") from e


def _reason(error: BaseException) -> str:
    """Its first line. The hub wraps the true cause, a refused connection for example, in advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    said = f": {_public(lines[0])[:200]}" if lines else ""
    return type(error).__name__ + said


def _public(text: str) -> str:
    """Without the passwords and signatures that addresses may hold."""
    return re.sub(r"(?<=://)[^\s/@]*@|\?\S*", "", text)
