"""Pieces of the report page: section, fold, table. All text is escaped here."""

from collections.abc import Iterable, Sequence

from core.audit.charts import text


def section(title: str, lede: str, body: str) -> str:
    return f'<section><h2>{text(title)}</h2><p class="lede">{text(lede)}</p>{body}</section>'


def fold(summary: str, body: str) -> str:
    return f"<details><summary>{text(summary)}</summary>{body}</details>"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], words: int, mark: str = "") -> str:
    """The first `words` columns are words, the others numbers. The row that begins with `mark`
    stands out."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{'' if i < words else ' class=n'}>{text(v)}</{tag}>" for i, v in enumerate(row)
        )

    body = "".join(
        f"<tr{' class=mark' if mark and row[0] == mark else ''}>{cells('td', row)}</tr>"
        for row in rows
    )
    head = f"<thead><tr>{cells('th', titles)}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5_400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
