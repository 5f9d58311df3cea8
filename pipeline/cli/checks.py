"""What a configuration names, found before anything starts: data, verifiers, strategy, agents, sandboxes, filters, trackers."""

from __future__ import annotations

from pipeline.agents.loading import load_agent
from pipeline.batcher.strategies import load_strategy
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError
from pipeline.evaluator.spec import specs_from_config
from pipeline.fetcher.catalog import Catalog
from pipeline.fetcher.verifiers import load_verifier
from pipeline.importing import load_callable
from pipeline.observe.trackers import check_trackers
from pipeline.sandboxes.kinds import check_kind
from pipeline.trainer.smollm2 import weights_file


def check_names(config: RunConfig) -> Catalog:
    """The catalog, once every name in the configuration has been found. Raises ConfigError."""
    specs_from_config(config)
    check_trackers(config.observe.trackers)
    if any(source.package is not None for source in (config.student, *config.teachers.values())):
        weights_file()
    load_strategy(config.rollout.strategy)
    for spec in config.specs:
        load_agent(spec.agent)
        check_kind(spec.sandbox)
    if config.rollout.filters.custom is not None:
        load_callable(config.rollout.filters.custom, "rollout.filters.custom")
    catalog = Catalog(config)
    for name in sorted(verifier_names(catalog)):
        load_verifier(name)
    _check_images(config, catalog)
    return catalog


def _check_images(config: RunConfig, catalog: Catalog) -> None:
    kinds = {spec.task_type: spec.sandbox.kind for spec in config.specs}
    for name, shelf in catalog.shelves.items():
        inside = [item.item_id for item in (*shelf.train, *shelf.held_out) if item.metadata.get("swe", {}).get("image")]
        kind = kinds[shelf.settings.task_type]
        if inside and kind != "docker":
            raise ConfigError(f"datasets.{name}: {inside[0]} begins in an image, which needs sandbox.kind 'docker'; it is {kind!r}")


def verifier_names(catalog: Catalog) -> set[str]:
    items = (item for shelf in catalog.shelves.values() for item in (*shelf.train, *shelf.held_out))
    return {item.verifier for item in items}
