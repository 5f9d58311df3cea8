"""The models and the tokenizer of a run, found in the cache or made there. Every process asks here, and one of them makes it.

Importing this module imports no torch: a process that needs only the tokenizer stays light.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.models import ModelSource
from pipeline.config.schema import RunConfig
from pipeline.fetcher.catalog import Catalog

if TYPE_CHECKING:
    from pipeline.trainer.supervised import Progress


def tokenizer_folder(config: RunConfig, catalog: Catalog, cache: Path) -> Path:
    """The folder whose tokenizer files the student uses."""
    if config.student.architecture is None:
        return student_folder(config, catalog, cache)
    from pipeline.trainer.tokenizer import ensure_tokenizer

    return ensure_tokenizer(catalog.texts, cache)


def student_folder(config: RunConfig, catalog: Catalog, cache: Path, progress: Progress | None = None) -> Path:
    """Weight version 0."""
    return _model(config.student, "students", catalog, sorted(config.datasets), cache, progress)


def teacher_folder(config: RunConfig, alias: str, catalog: Catalog, cache: Path, progress: Progress | None = None) -> Path:
    """A teacher learns from the data sets that it will score; one that scores none, from all."""
    scored = [name for name in sorted(config.datasets) if config.teacher_of(name) == alias]
    return _model(config.teachers[alias], "teachers", catalog, scored or sorted(config.datasets), cache, progress)


def _model(source: ModelSource, kind: str, catalog: Catalog, datasets: list[str], cache: Path, progress: Progress | None) -> Path:
    from pipeline.trainer.models import ensure_model

    def pairs() -> list:
        return [pair for name in datasets for pair in catalog.pairs(name, "train")]

    return ensure_model(source, kind=kind, catalog_texts=catalog.texts, catalog_pairs=pairs, cache=cache, progress=progress)
