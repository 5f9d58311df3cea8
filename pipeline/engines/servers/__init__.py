"""Programs that run in an engine's own environment: they import that engine, starlette and the standard library, not `pipeline`."""
