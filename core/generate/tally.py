"""One backend's spend lines, added up. Pure; in whole picodollars, so that sums are exact."""

import msgspec

from core.budget import to_pico
from core.schema import SpendLine


class Tally(msgspec.Struct, kw_only=True):
    """`start_usd`: the account's total before the run's first request; None: it never said.

    `certain`: billed and looked up. `worst`: all uncertain ones ever, at their worst case.
    `adjusted`: corrections by the account. `unproven`: uncertain ones since the last correction.
    `others_pay`: somebody else is billed as well (BYOK, case C40), so that the account's total is
    not all that counts."""

    start_usd: float | None = None
    sent: int = 0
    certain: int = 0
    worst: int = 0
    adjusted: int = 0
    unproven: int = 0
    others_pay: bool = False

    def add(self, line: SpendLine) -> None:
        """One line. Whether it closes a dispatch is its reader's business."""
        amount = to_pico(line.cost_usd)
        match line.kind:
            case "dispatch":
                self.sent += 1
            case "account":
                self.start_usd = line.account_usd
            case "billed" | "looked_up":
                self.certain += amount
                self.others_pay |= to_pico(line.cap_usd) != amount
            case "uncertain":
                self.worst += amount
                self.unproven += amount
            case "adjusted":
                self.adjusted += amount
                self.unproven = 0

    def correction(self, rest: int) -> int:
        """What to add to the books when the uncertain ones really cost `rest` together."""
        return rest - self.worst - self.adjusted
