"""What a configuration names, found before anything starts: data sets, verifiers, strategy, agents, filters, trackers."""

from __future__ import annotations

from pipeline.agents.loading import load_agent
from pipeline.batcher.strategies import load_strategy
from pipeline.config.schema import RunConfig
from pipeline.evaluator.spec import specs_from_config
from pipeline.fetcher.catalog import Catalog
from pipeline.fetcher.verifiers import load_verifier
from pipeline.importing import load_callable
from pipeline.observe.trackers import check_trackers


def check_names(config: RunConfig) -> Catalog:
    """The catalog, once every name in the configuration has been found. Raises ConfigError."""
    specs_from_config(config)
    check_trackers(config.observe.trackers)
    load_strategy(config.rollout.strategy)
    for spec in config.specs:
        load_agent(spec.agent)
    if config.rollout.filters.custom is not None:
        load_callable(config.rollout.filters.custom, "rollout.filters.custom")
    catalog = Catalog(config)
    for name in sorted(verifier_names(catalog)):
        load_verifier(name)
    return catalog


def verifier_names(catalog: Catalog) -> set[str]:
    items = (item for shelf in catalog.shelves.values() for item in (*shelf.train, *shelf.held_out))
    return {item.verifier for item in items}
