"""The run's own eyes: live audit, tripwires, canaries and the disk forecast, and what is done about
what they see.

Everything is called on the loop. Asks for a halt or for a scope to be stopped; stops
nothing itself."""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec

from core import events as ev
from core.audit.live import LiveAudit
from core.audit.tripwires import Observation, Price
from core.config import Config
from core.errors import EyasError, Tripped
from core.store import RunDir


class Halt(msgspec.Struct, frozen=True):
    """A request to the engine: stop everything, for this reason."""

    source: str
    by: str
    reason: str
    error: EyasError | None = None


class Scopes(Protocol):
    """The part of the generator that acts on one provider or dataset."""

    def stop_scope(self, kind: str, name: str, reason: str = "") -> None: ...
    def canary(self, provider: str, dataset: str, passed: bool) -> None: ...
    def prices(self) -> Mapping[str, tuple[float, float]]: ...


class Watch:
    """`trips`: in words, everything that stopped a part of the run. `scopes` is set while requests
    are in flight."""

    def __init__(
        self,
        run: RunDir,
        config: Config,
        emit: Callable[[ev.Event], None],
        ask_halt: Callable[[Halt], None],
    ) -> None:
        self._run = run
        self._keep_bytes = config.run.min_free_disk_bytes
        self._emit = emit
        self._ask_halt = ask_halt
        self._live = LiveAudit(config)
        self.trips: list[str] = []
        self.scopes: Scopes | None = None
        self._priced = False

    def sampled(self, seen: Observation) -> None:
        """What was seen in a sample that ended its prompt."""
        if self.scopes is not None and not self._priced:  # known once requests are in flight
            self._priced = True
            for provider, (prompt, completion) in self.scopes.prices().items():
                self._live.wires.set_price(provider, Price(prompt, completion))
        self._act(self._live.observe(seen))

    def event(self, event: ev.Event) -> None:
        """What passes through the journal: failed prompts, training steps, evaluations."""
        match event:
            case ev.Outcome(outcome="failed"):
                provider = event.provider or event.backend
                self._act(self._live.fail(provider, event.dataset, event.cost_usd or 0.0))
            case ev.Train():
                self._live.wires.loss(event.step, event.loss, event.grad_norm)
                self._act(self._live.wires.check())
            case ev.Evaluated():
                self._live.wires.acceptance(event.acceptance_length)
                self._act(self._live.wires.check())

    def disk(self, host: ev.Host, stats: ev.Stats | None) -> None:
        """Stop before the disk is full: below the configured floor, or when the rest will not
        fit."""
        if not host.disk_total_bytes:
            return
        if host.disk_free_bytes < self._keep_bytes:
            free = f"{host.disk_free_bytes / 1e9:.2f} GB free"
            advice = "below run.min_free_disk_bytes; free some, then resume"
            self._ask_halt(Halt("disk", "", f"{free}, {advice}"))
        elif stats is not None and self.scopes is not None:
            files = (self._run.completions, self._run.spend)
            written = sum(f.stat().st_size for f in files if f.exists())
            self._live.wires.disk(
                host.disk_free_bytes, written, stats.done, stats.prompts, self._keep_bytes
            )
            self._act(self._live.wires.check())

    def _act(self, events: Iterable[ev.Tripwire | ev.Canary]) -> None:
        for event in events:
            self._emit(event)
            if isinstance(event, ev.Canary):
                if self.scopes is not None:
                    self.scopes.canary(event.provider, event.dataset, event.passed)
                if not event.passed:
                    self.trips.append(f"canary of {event.provider} on {event.dataset} failed")
                continue
            self.trips.append(f"tripwire {event.name} ({event.scope})")
            if event.action == "halt":
                words = f"{event.name} ({event.scope}): {event.saw}; {event.advice}"
                self._ask_halt(Halt("tripwire", event.name, event.saw, Tripped(words)))
            elif self.scopes is not None:
                kind = event.action.removeprefix("stop_")
                self.scopes.stop_scope(kind, event.scope, f"tripwire {event.name}")
