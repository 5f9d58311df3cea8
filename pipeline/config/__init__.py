"""The configuration: pydantic models, loading, overrides and provenance. Imports neither ray nor torch."""
