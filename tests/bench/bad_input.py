"""CPU seconds for replies that nobody should send: `python -m tests.bench.bad_input [CHARS]`.

The inputs of `tests/core/reconstruct/test_bad_input.py` at a megabyte (or CHARS), twice: without a
count and with a wrong one, which is when hypotheses are searched. `x prose`: times what as many
characters of ordinary words cost, so that what grows faster than its size shows.
"""

import sys
import time

from core.config import TARGET_DIR
from core.reconstruct import StopOffsets, judge
from core.render.base import load_renderer
from tests.core.reconstruct.replies import prompt_of, rollout_of
from tests.core.reconstruct.test_bad_input import TABLE
from tests.kimi_files import KIMI


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    directory = KIMI if (KIMI / "tiktoken.model").exists() else TARGET_DIR
    renderer = load_renderer(directory, "kimi-k2.5")
    write = sys.stdout.write
    write(f"{n} characters, {directory.name} vocabulary, CPU seconds of one thread\n")
    prose = [0.0, 0.0]
    for name, bad in TABLE.items():
        body = bad.body(n)
        write(f"{name:<26}")
        for i, billed in enumerate((None, 5)):
            rollout = rollout_of(body, billed)
            start = time.process_time()
            sample = judge(rollout, prompt_of(), renderer, StopOffsets())
            used = time.process_time() - start
            prose[i] = prose[i] or used
            told = sample.error_class or sample.verdict
            write(f" {used:6.3f} s {used / prose[i]:5.1f} x prose  {told:<24}")
        write("\n")


if __name__ == "__main__":
    main()
