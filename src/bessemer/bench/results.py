"""Measured seconds as figures: tokens a second, their spread, and shares of the machine's peaks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bessemer.bench.machine import Peaks
from bessemer.bench.plan import Demand, Trial
from bessemer.bench.profile import Profile


@dataclass(frozen=True)
class Result:
    """One test on one number of threads. seconds: of each repeat.  peaks: what the machine reached
    right before or after each, or none where that can't be measured.
    """

    test: Trial
    threads: int
    seconds: tuple[float, ...]
    demand: Demand
    peaks: tuple[Peaks, ...] = ()

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each repeat."""
        return [self.test.tokens / s for s in self.seconds]

    @property
    def tokens_per_second(self) -> float:
        """The median."""
        return statistics.median(self.rates)

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def deviation(self) -> float:
        """Sample standard deviation of the rates; 0 for a single repeat."""
        return statistics.stdev(self.rates) if len(self.seconds) > 1 else 0.0

    @property
    def flops_per_second(self) -> float:
        return self.demand.flops / self.median_seconds

    @property
    def weight_bytes_per_second(self) -> float:
        return self.demand.weight_bytes / self.median_seconds

    def shares(self) -> dict[str, float | None]:
        """fma_share: of the multiply-add peak.  bandwidth_share: weights read, of the peak of
        reading memory.  bandwidth_share_with_cache: weights and KV cache.

        Each repeat is compared with the peaks beside it, and the median counts: what a shared
        machine gives changes by a third within minutes.
        """
        names = ("fma_share", "bandwidth_share", "bandwidth_share_with_cache")
        if not self.peaks:
            return dict.fromkeys(names)
        weights, cache = self.demand.weight_bytes, self.demand.cache_bytes
        pairs = list(zip(self.seconds, self.peaks, strict=True))

        def share(amount: int, peak: Callable[[Peaks], float]) -> float:
            return statistics.median(amount / s / peak(p) for s, p in pairs)

        found = (
            share(self.demand.flops, lambda p: p.flops),
            share(weights, lambda p: p.bytes),
            share(weights + cache, lambda p: p.bytes),
        )
        return dict(zip(names, found, strict=True))

    def to_json(self) -> dict[str, Any]:
        rates = self.rates
        first = self.median_seconds if self.test.kind == "pp" else None
        return {
            "test": self.test.name,
            "threads": self.threads,
            "tokens": self.test.tokens,
            "depth": self.test.depth,
            "repeat": len(rates),
            "tokens_per_second": self.tokens_per_second,
            "mean": statistics.fmean(rates),
            "stddev": self.deviation,
            "min": min(rates),
            "max": max(rates),
            "samples": rates,
            "time_to_first_token_s": first,
            "flops_per_second": self.flops_per_second,
            "weight_bytes_per_second": self.weight_bytes_per_second,
            **self.shares(),
        }


@dataclass(frozen=True)
class MemoryUse:
    """Bytes. rss_peak: the most that was resident.  private: shared with no other process, at the
    end; None where the system doesn't tell.  weights, cache: what the model itself needs: its
    weights, and the KV cache of the tokens that were held.
    """

    rss_peak: int
    private: int | None
    weights: int
    cache: int

    @property
    def other(self) -> int:
        """What Python, code, activations and tokenizer take."""
        return self.rss_peak - self.weights - self.cache

    def to_json(self) -> dict[str, Any]:
        return {
            "rss_peak_bytes": self.rss_peak,
            "private_bytes": self.private,
            "weights_bytes": self.weights,
            "kv_bytes": self.cache,
            "other_bytes": self.other,
        }


@dataclass(frozen=True)
class Report:
    """Everything that a run of the bench found."""

    model: dict[str, Any]
    machine: dict[str, Any]
    results: Sequence[Result]
    memory: MemoryUse
    load_seconds: float
    profiles: Sequence[Profile] = field(default=())

    def to_json(self) -> dict[str, Any]:
        found = {
            "model": self.model,
            "machine": self.machine,
            "results": [result.to_json() for result in self.results],
            "memory": self.memory.to_json(),
            "load_s": self.load_seconds,
        }
        if self.profiles:
            found["profiles"] = [profile.to_json() for profile in self.profiles]
        return found
