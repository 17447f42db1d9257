"""Clocks, medians and the file of results: what every benchmark needs, without heavy imports."""

import json
import os
import platform
import time
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import quantiles
from typing import Any


@dataclass(frozen=True)
class Cost:
    """What a stretch of steps took on one rank."""

    wall_s: float
    cpu_s: float


def now() -> Cost:
    """The clocks of this process."""
    return Cost(time.perf_counter(), time.process_time())


def since(start: Cost) -> Cost:
    """What has passed on the clocks."""
    end = now()
    return Cost(end.wall_s - start.wall_s, end.cpu_s - start.cpu_s)


def against_neighbours(values: list[float], plain: list[float]) -> list[float]:
    """Each value divided by the mean of the plain ones before and after it."""
    return [2 * value / (before + after) for value, before, after in zip(values, plain, plain[1:], strict=False)]


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": middle, "low": low, "high": high}


def shown(value: dict[str, float], digits: int = 2) -> str:
    """A spread as text: the median, and the quartiles in brackets."""
    return f"{value['median']:.{digits}f} [{value['low']:.{digits}f}, {value['high']:.{digits}f}]"


def write(path: Path, results: Any, setting: dict[str, Any] | None = None) -> None:
    """The figures as JSON, with what they were measured on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = {"date": date.today().isoformat(), "machine": machine(), "setting": setting, "results": results}
    path.write_text(json.dumps(text, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """The kind of machine, and how busy it was."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {"cpu": cpu, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "torch": version("torch")}
