"""The exposition that Prometheus reads: names, labels and help texts are those of docs/metrics.md, and each has all three."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from deployments.metrics import ServiceMetrics
from pipeline.engines.base import EngineInfo

TABLE = Path(__file__).parents[2] / "docs" / "metrics.md"
LIVE = EngineInfo("k", "r", "d", 30, "d", 7, 64, 8, 2, 1, 100, 0)


def exposed() -> dict[str, tuple[str, str, str]]:
    """name -> (type, labels, help), as Prometheus would parse them."""
    metrics = ServiceMetrics()
    metrics.seen("GET", "/healthz", 200, 0.1)
    text = metrics.render(1, {"running": 2}, LIVE).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        if not family.name.endswith("_created"):  # when a counter or a histogram began: added by the library to each of them
            labels = next(list(sample.labels) for sample in family.samples if not sample.name.endswith("_bucket"))
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name] = (family.type, ", ".join(labels), family.documentation)
    return found


def documented() -> dict[str, tuple[str, str, str]]:
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in TABLE.read_text().splitlines()]
    return {row[0]: (row[1], row[2], row[3]) for row in rows if row[0].startswith("rollout_")}


def test_what_prometheus_reads_is_what_the_documentation_lists():
    assert exposed() == documented()
    assert all(help_text for _, _, help_text in exposed().values())


def test_what_could_not_be_asked_keeps_its_last_value():
    metrics = ServiceMetrics()
    metrics.render(0, {"running": 2}, LIVE)
    samples = [
        sample for family in text_string_to_metric_families(metrics.render(0, None, None).decode()) for sample in family.samples
    ]
    values = {(sample.name, tuple(sample.labels.values())): sample.value for sample in samples}
    assert values["rollout_live_weight_version", ()] == 7 and values["rollout_evaluations", ("running",)] == 2
