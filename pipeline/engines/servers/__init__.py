"""Programs that run in an engine's own environment. They import that engine, starlette and the standard library, never `pipeline`."""
