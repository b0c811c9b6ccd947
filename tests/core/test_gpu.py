"""Sampling the machine: every NVML call may be missing, and no GPU is a fact."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from core import gpu
from core.config import parse
from core.errors import UsageError
from core.gpu import HostSampler, available_gpus, gpu_rows
from core.pipeline.stages import refuse_what_is_missing, selected
from tests.faults.rig import wait_for

ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetCount": 2,
    "nvmlDeviceGetName": b"NVIDIA H200",
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=5 << 30, total=141 << 30),
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=93),
    "nvmlDeviceGetPowerUsage": 612_000,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetTemperature": 71,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
}


def board(monkeypatch: pytest.MonkeyPatch, missing: Iterable[str] = ()) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda i: f"gpu{i}")
    for name, answer in ANSWERS.items():

        def call(*_: Any, name: str = name, answer: Any = answer) -> Any:
            if name in missing:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return answer

        monkeypatch.setattr(pynvml, name, call)


def test_a_board_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    board(monkeypatch)
    first, second = gpu_rows()
    assert (first.index, second.index, first.name) == (0, 1, "NVIDIA H200")
    assert (first.util_pct, first.power_w, first.power_limit_w) == (93.0, 612.0, 700.0)
    assert (first.mem_used_bytes, first.mem_total_bytes, first.temp_c) == (5 << 30, 141 << 30, 71.0)
    assert first.throttle == "power cap"


@pytest.mark.parametrize(
    ("device", "boards", "why"),
    [
        ("cpu", 0, ""),
        ("mps", 0, ""),
        ("cuda", 2, ""),
        ("cuda:1", 2, ""),
        ("cuda:2", 2, "this host has 2 GPUs, counted from 0"),
        ("cuda:1", 1, "this host has 1 GPU, counted from 0"),
        ("cuda", 0, "this host has no GPU"),
    ],
)
def test_a_device_that_is_not_there_is_told_without_torch(
    monkeypatch: pytest.MonkeyPatch, device: str, boards: int, why: str
) -> None:
    monkeypatch.setattr(gpu, "available_gpus", lambda: [object()] * boards)
    monkeypatch.setattr(Path, "exists", lambda self: False)
    assert gpu.why_missing(device) == why
    config = parse({"target": {"device": device}, "run": {"stages": ["generate"]}}, "t")
    refuse_what_is_missing(config, selected(config))  # nothing that needs it runs
    config = parse({"target": {"device": device}}, "t")
    if not why:
        refuse_what_is_missing(config, selected(config))
        return
    with pytest.raises(UsageError, match=r"leave stage extract out of run\.stages") as caught:
        refuse_what_is_missing(config, selected(config))
    assert f'target.device = "{device}": {why}' in str(caught.value)


def test_a_target_without_weights_is_refused_before_anything_is_paid(tmp_path: Path) -> None:
    target = {"kind": "hf", "path": str(tmp_path), "tokenizer": "t"}
    config = parse({"target": target}, "t")
    with pytest.raises(UsageError, match=r"no config\.json of a model; .* leave stage extract"):
        refuse_what_is_missing(config, selected(config))
    generating = parse({"target": target, "run": {"stages": ["generate", "audit"]}}, "t")
    refuse_what_is_missing(generating, selected(generating))
    (tmp_path / "config.json").write_text("{}")
    refuse_what_is_missing(config, selected(config))


def test_a_driver_that_nvml_does_not_show_gets_the_benefit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "available_gpus", list)
    monkeypatch.setattr(Path, "exists", lambda self: str(self) == "/dev/kfd")
    assert gpu.why_missing("cuda:7") == ""


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_every_call_may_be_unsupported(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    board(monkeypatch, {name})
    rows = available_gpus()
    assert len(rows) == (0 if name == "nvmlDeviceGetCount" else 2)
    board(monkeypatch, set(ANSWERS) - {"nvmlDeviceGetCount"})
    assert [r.util_pct for r in gpu_rows()] == [None, None]


def test_no_driver_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert available_gpus() == []


def test_the_sampler_hands_out_each_reading_once(tmp_path: Path) -> None:
    sampler = HostSampler(tmp_path, interval_s=0.01)
    assert sampler.sample() is None
    sampler.start()
    seen: list[Any] = []

    def two() -> bool:
        if (host := sampler.sample()) is not None:
            seen.append(host)
        return len(seen) >= 2

    wait_for(two, "two readings")
    sampler.stop()
    first, second = seen
    assert first is not second
    assert first.cpus >= 1 and 0 < first.ram_used_bytes < first.ram_total_bytes
    assert 0 < first.disk_free_bytes <= first.disk_total_bytes


def test_a_disk_that_is_gone_reads_as_nothing(tmp_path: Path) -> None:
    host = HostSampler(tmp_path / "gone").read([])
    assert (host.disk_free_bytes, host.disk_total_bytes, host.gpus) == (0, 0, [])


def test_network_rates_are_differences(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counters = [
        SimpleNamespace(bytes_recv=100, bytes_sent=10),
        SimpleNamespace(bytes_recv=300, bytes_sent=50),
    ]
    times = iter([10.0, 12.0])
    monkeypatch.setattr(gpu.psutil, "net_io_counters", lambda: counters.pop(0))
    monkeypatch.setattr(gpu.time, "monotonic", lambda: next(times))
    sampler = HostSampler(tmp_path)
    assert sampler.read([]).net_rx_bytes_s == 0.0
    host = sampler.read([])
    assert (host.net_rx_bytes_s, host.net_tx_bytes_s) == (100.0, 20.0)
