"""Console tests draw without animation, in UTC, with the colours of a capable terminal."""

import os
import time

os.environ.update(
    TEXTUAL_ANIMATIONS="none",
    TEXTUAL_SMOOTH_SCROLL="0",
    TERM="xterm-256color",
    COLORTERM="truecolor",
    TZ="UTC",
)
for name in ("NO_COLOR", "TEXTUAL_THEME"):
    os.environ.pop(name, None)
time.tzset()
