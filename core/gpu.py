"""The machine, once a second: NVML for GPUs, psutil for the rest, sampled in a thread.

Promises: never raises and never blocks the caller; a quantity that a driver does not offer is None,
a machine without a GPU has an empty list. Knows nothing about runs."""

import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pynvml

from core import events as ev

_THROTTLE_REASONS = (
    ("nvmlClocksThrottleReasonHwThermalSlowdown", "thermal"),
    ("nvmlClocksThrottleReasonSwThermalSlowdown", "thermal"),
    ("nvmlClocksThrottleReasonHwPowerBrakeSlowdown", "power brake"),
    ("nvmlClocksThrottleReasonHwSlowdown", "hardware"),
    ("nvmlClocksThrottleReasonSwPowerCap", "power cap"),
)


def _ask(function: str, *arguments: Any) -> Any:
    """One NVML call; None when the driver or the board does not support it."""
    try:
        return getattr(pynvml, function)(*arguments)
    except (pynvml.NVMLError, AttributeError):
        return None


def gpu_rows() -> list[ev.GpuRow]:
    """All boards that NVML shows. The caller has initialised NVML."""
    rows = []
    for index in range(_ask("nvmlDeviceGetCount") or 0):
        handle = _ask("nvmlDeviceGetHandleByIndex", index)
        if handle is not None:
            rows.append(_gpu_row(index, handle))
    return rows


def _gpu_row(index: int, handle: Any) -> ev.GpuRow:
    name = _ask("nvmlDeviceGetName", handle) or ""
    memory = _ask("nvmlDeviceGetMemoryInfo", handle)
    rates = _ask("nvmlDeviceGetUtilizationRates", handle)
    power_mw = _ask("nvmlDeviceGetPowerUsage", handle)
    limit_mw = _ask("nvmlDeviceGetEnforcedPowerLimit", handle)
    celsius = _ask("nvmlDeviceGetTemperature", handle, getattr(pynvml, "NVML_TEMPERATURE_GPU", 0))
    mask = _ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
    reasons = [text for bit, text in _THROTTLE_REASONS if mask & getattr(pynvml, bit, 0)]
    return ev.GpuRow(
        index=index,
        name=name.decode() if isinstance(name, bytes) else str(name),
        util_pct=None if rates is None else float(rates.gpu),
        power_w=None if power_mw is None else power_mw / 1000,
        power_limit_w=None if limit_mw is None else limit_mw / 1000,
        mem_used_bytes=None if memory is None else int(memory.used),
        mem_total_bytes=None if memory is None else int(memory.total),
        temp_c=None if celsius is None else float(celsius),
        throttle=reasons[0] if reasons else "",
    )


def available_gpus() -> list[ev.GpuRow]:
    """One reading of all boards; empty without a driver."""
    if not _init_nvml():
        return []
    try:
        return gpu_rows()
    finally:
        _ask("nvmlShutdown")


def why_missing(device: str) -> str:
    """Why a torch device cannot be on this host; empty when it may be. Only `cuda` can be told
    without torch; a driver that hides its boards from NVML (ROCm, WSL) gets the benefit."""
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return ""
    gpus = len(available_gpus())
    if not gpus and not any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        return "this host has no GPU"
    if gpus and index and int(index) >= gpus:
        return f"this host has {gpus} GPU{'s' * (gpus > 1)}, counted from 0"
    return ""


class HostSampler:
    """`sample()` is the newest Host, or None before the first; a new object for every reading."""

    def __init__(self, disk: Path, interval_s: float = 1.0) -> None:
        self._disk = disk
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._latest: ev.Host | None = None
        self._net: tuple[float, int, int] | None = None
        self._thread = threading.Thread(target=self._run, name="host-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def sample(self) -> ev.Host | None:
        latest, self._latest = self._latest, None
        return latest

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        has_nvml = _init_nvml()
        psutil.cpu_percent()  # the first reading is the start of the interval
        while not self._stop.wait(self._interval_s):
            self._latest = self.read(gpu_rows() if has_nvml else [])
        if has_nvml:
            _ask("nvmlShutdown")

    def read(self, gpus: list[ev.GpuRow]) -> ev.Host:
        """One reading now. Network rates are 0 in the first one."""
        memory = psutil.virtual_memory()
        received_s, sent_s = self._network()
        free = total = 0
        try:
            usage = psutil.disk_usage(str(self._disk))
            free, total = usage.free, usage.total
        except OSError:
            pass  # the folder is gone: 0 says so
        return ev.Host(
            gpus=gpus,
            cpu_pct=psutil.cpu_percent(),
            cpus=psutil.cpu_count() or 0,
            ram_used_bytes=memory.total - memory.available,
            ram_total_bytes=memory.total,
            disk_free_bytes=free,
            disk_total_bytes=total,
            net_rx_bytes_s=received_s,
            net_tx_bytes_s=sent_s,
        )

    def _network(self) -> tuple[float, float]:
        try:
            counters = psutil.net_io_counters()
        except OSError:
            counters = None
        if counters is None:
            return 0.0, 0.0
        now, earlier = time.monotonic(), self._net
        self._net = (now, counters.bytes_recv, counters.bytes_sent)
        if earlier is None or now <= earlier[0]:
            return 0.0, 0.0
        seconds = now - earlier[0]
        return (counters.bytes_recv - earlier[1]) / seconds, (
            counters.bytes_sent - earlier[2]
        ) / seconds


def _init_nvml() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True
