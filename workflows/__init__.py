"""Imports `ray.workflow` once, without its warning that it will go: the pin of Ray is the answer, and the README says so."""

import warnings

import ray

with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    import ray.workflow  # noqa: F401
