"""The ReplayBuffer actor: the only writer of the run's ledger."""

from __future__ import annotations

from deployments.hosting import StageActor, forwards
from pipeline.buffer.api import BufferClient
from pipeline.buffer.service import BufferService
from pipeline.buffer.settings import BufferSettings


@forwards(*(name for name in vars(BufferClient) if not name.startswith("_")))
class ReplayBuffer(StageActor):
    """The driver has raised the run epoch before it made this actor, so a restart never does; in an epoch that is over it fails."""

    stage = "replay_buffer"

    def __init__(self, root: str, run_epoch: int) -> None:
        self.run_epoch = run_epoch
        super().__init__(root)

    async def build(self) -> BufferService:
        service = BufferService(self.paths, BufferSettings.from_config(self.config))
        await service.open(run_epoch=self.run_epoch)
        return service

    async def report(self, service: BufferService) -> None:
        await service.report_stage(self.identified(service.report()))
