"""What the service counts of itself, for Prometheus. Names and help texts are part of the contract: they stay."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pipeline.engines.base import EngineInfo

SECONDS = (0.005, 0.02, 0.1, 0.5, 2, 10, 60)
STATUSES = ("queued", "running", "done", "failed", "cancelled")


class ServiceMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        made = {"registry": self.registry, "namespace": "rollout"}
        self._requests = Counter(
            "http_requests", "HTTP requests by route, method and status.", ["route", "method", "status"], **made
        )
        self._seconds = Histogram(
            "http_request_seconds", "Seconds from request to end of reply.", ["route"], buckets=SECONDS, **made
        )
        self._in_flight = Gauge("completions_in_flight", "Completion requests that are being answered.", **made)
        self._jobs = Gauge("evaluations", "Evaluations by status.", ["status"], **made)
        self._version = Gauge("live_weight_version", "Weight version of the live model.", **made)
        self._active = Gauge("engine_active_sequences", "Sequences that the live engine generates now.", **made)
        self._waiting = Gauge("engine_waiting_sequences", "Sequences that wait for a slot of the live engine.", **made)
        self._tokens = Gauge("engine_generated_tokens", "Tokens that the live engine has generated since it started.", **made)

    def seen(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, method, status).inc()
        self._seconds.labels(route).observe(seconds)

    def render(self, in_flight: int, jobs: Mapping[str, int] | None, live: EngineInfo | None) -> bytes:
        """None: could not be asked; the last value stands."""
        self._in_flight.set(in_flight)
        if jobs is not None:
            for status in STATUSES:
                self._jobs.labels(status).set(jobs.get(status, 0))
        if live is not None:
            self._version.set(live.weight_version)
            self._active.set(live.active)
            self._waiting.set(live.waiting)
            self._tokens.set(live.generated_tokens)
        return generate_latest(self.registry)
