"""Requests in flight: dispatch gate, limits, retries, budget, exactly one outcome per prompt ->
Rollout.

Promises: a dispatch is on disk before its request leaves, a reply before its outcome is announced;
`spent + reserved <= budget` at every moment; after `halt()` no new request leaves. Knows backends
through `core.providers`, samples only through the `judge` that it is given, and nothing about
consoles."""

from core.generate.abandon import abandon
from core.generate.dispatch import Generator
from core.generate.ports import GenerateResult, Ports, Recovered
from core.generate.resume import recover

__all__ = ["GenerateResult", "Generator", "Ports", "Recovered", "abandon", "recover"]
