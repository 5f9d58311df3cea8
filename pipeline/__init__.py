"""Every stage of the rollout pipeline as plain asyncio Python. Nothing here imports Ray."""
