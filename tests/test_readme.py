"""The README's tree names every module with the first sentence of its docstring.

`python -m tests.test_readme` writes it again."""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- tree -->\n```\n", "```\n<!-- /tree -->"
WIDTH = 96


def gloss(path: Path) -> str:
    """The docstring's first sentence, cut at a word when it is long."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split())
    sentence = re.split(r"(?<=[^.])[.;](?:\s|$)", text, maxsplit=1)[0]
    return (
        sentence
        if len(sentence) <= WIDTH
        else sentence[:WIDTH].rsplit(" ", 1)[0].rstrip(",") + " …"
    )


def tree() -> str:
    lines: list[str] = []
    for top in ("core", "console"):
        folders = sorted({p.parent for p in (ROOT / top).rglob("*.py")})
        for folder in folders:
            depth = len(folder.relative_to(ROOT).parts) - 1
            init = gloss(folder / "__init__.py") if (folder / "__init__.py").exists() else ""
            lines.append(f"{'  ' * depth + folder.name + '/':<26}{init}".rstrip())
            for path in sorted(folder.glob("*.py")):
                if path.name != "__init__.py":
                    lines.append(f"{'  ' * (depth + 1) + path.name:<26}{gloss(path)}".rstrip())
    return "\n".join(lines) + "\n"


def test_the_readme_names_every_module() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert BEGIN in text and END in text
    assert text.split(BEGIN)[1].split(END)[0] == tree(), "run: python -m tests.test_readme"


def test_every_module_says_what_it_promises() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for top in ("core", "console")
        for path in (ROOT / top).rglob("*.py")
        if path.stat().st_size and not gloss(path)
    ]
    assert silent == []


if __name__ == "__main__":
    readme = ROOT / "README.md"
    before, rest = readme.read_text(encoding="utf-8").split(BEGIN)
    readme.write_text(before + BEGIN + tree() + END + rest.split(END)[1], encoding="utf-8")
    sys.stderr.write("README.md: tree written\n")
