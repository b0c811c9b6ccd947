"""JSONL rows with their line numbers. Any fault is one line: file:line, what, what to do."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.errors import PromptError


def rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object). Blank lines are passed over."""
    try:
        file = path.open(encoding="utf-8-sig")
    except OSError as e:
        raise PromptError(f"{path}: cannot be read ({e.strerror}); give a JSONL file") from e
    with file:
        number = 0
        try:
            for number, line in enumerate(file, 1):
                if line.isspace():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise PromptError(f"{path}:{number}: not a JSON object; one object a line")
                yield number, row
        except UnicodeDecodeError as e:
            raise PromptError(f"{path}:{number + 1}: not UTF-8; convert the file") from e
        except (json.JSONDecodeError, RecursionError) as e:
            what = e.msg if isinstance(e, json.JSONDecodeError) else "nested too deeply"
            raise PromptError(f"{path}:{number}: not JSON ({what}); mend the line") from e
