"""Rows in segments, everything else in the database, written by one fenced writer.

Invariant: `write` returns only what is durable. Segments are synced before the transaction that refers to them; every transaction
checks the writer epoch; a job that fails leaves nothing of itself behind and does not touch the others of its transaction.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pipeline.buffer.contents import Payload
from pipeline.buffer.ledger import Ledger, Refusal, lose_running
from pipeline.buffer.schema import get_meta, open_writer, set_meta
from pipeline.buffer.segments import Segments
from pipeline.buffer.settings import BufferSettings
from pipeline.errors import DiskFull, FencedOut, StoreError
from pipeline.paths import RunPaths

logger = logging.getLogger(__name__)

_LITTLE_SPACE = 1024 * 1024
"""SQLite reports some failures for lack of space as plain I/O errors; with less than this free we take them for such."""


@dataclass(frozen=True, slots=True)
class Job:
    operation: Callable[[Ledger], Any]
    payloads: Sequence[Payload] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    value: Any = None
    error: BaseException | None = None


class Store:
    """Used by one thread at a time."""

    def __init__(
        self,
        paths: RunPaths,
        settings: BufferSettings,
        clock: Callable[[], float],
        new_run_epoch: bool,
        run_epoch: int | None = None,
    ) -> None:
        """Take the run over: raises the writer epoch, so that whoever wrote before is refused from now on.

        run_epoch: raises FencedOut, and changes nothing, when it is not the run's newest.
        """
        self._paths = paths
        self._segments = Segments(paths.groups, settings.segment_bytes)
        self._fenced: str | None = None
        self._db = open_writer(paths.database)
        try:
            self._ledger = self._take_over(settings, clock, new_run_epoch, run_epoch)
        except FencedOut:
            self._db.close()
            raise
        except sqlite3.Error as error:
            self._db.close()
            raise self._storage_error(error) from error

    @property
    def run_epoch(self) -> int:
        return self._ledger.run_epoch

    def write(self, jobs: Sequence[Job]) -> list[Outcome]:
        """One transaction for all jobs; an outcome a job, in their order."""
        try:
            self._place(jobs)
            outcomes = self._transact(jobs)
        except (OSError, sqlite3.Error) as error:
            return [Outcome(error=self._storage_error(error)) for _ in jobs]
        except FencedOut as error:
            self._fenced = str(error)
            return [Outcome(error=FencedOut(self._fenced)) for _ in jobs]
        finally:
            self._roll_back()
        self._sweep()
        return outcomes

    def check_fence(self) -> None:
        """Raises FencedOut once a write was refused for its epoch."""
        if self._fenced is not None:
            raise FencedOut(self._fenced)

    def close(self) -> None:
        self._segments.close()
        self._db.close()

    def _take_over(
        self, settings: BufferSettings, clock: Callable[[], float], new_run_epoch: bool, run_epoch: int | None
    ) -> Ledger:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            current = get_meta(self._db, "run_epoch")
            if run_epoch not in (None, current):
                raise FencedOut(f"{self._paths.database} is in run epoch {current}; this process belongs to run epoch {run_epoch}")
            writer_epoch, current = get_meta(self._db, "writer_epoch") + 1, current + int(new_run_epoch)
            set_meta(self._db, "writer_epoch", writer_epoch)
            set_meta(self._db, "run_epoch", current)
            set_meta(self._db, "capacity", settings.capacity)
            ledger = Ledger(self._db, settings, clock, writer_epoch, current)
            if new_run_epoch:
                lose_running(ledger)
            self._db.execute("COMMIT")
        finally:
            self._roll_back()
        return ledger

    def _place(self, jobs: Sequence[Job]) -> None:
        self.check_fence()
        limit = self._ledger.settings.inline_bytes
        for payload in (payload for job in jobs for payload in job.payloads):
            if len(payload.data) > limit:
                payload.segment, payload.offset = self._segments.append(payload.data.data, payload.sha256)
        self._segments.sync()

    def _transact(self, jobs: Sequence[Job]) -> list[Outcome]:
        self._db.execute("BEGIN IMMEDIATE")
        epoch = get_meta(self._db, "writer_epoch")
        if epoch != self._ledger.writer_epoch:
            raise FencedOut(
                f"{self._paths.database} has a newer writer (epoch {epoch}; this one is {self._ledger.writer_epoch}):"
                " nothing more of this process is merged"
            )
        outcomes = [self._apply(job) for job in jobs]
        self._db.execute("COMMIT")
        return outcomes

    def _apply(self, job: Job) -> Outcome:
        self._db.execute("SAVEPOINT job")
        try:
            value = job.operation(self._ledger)
        except sqlite3.OperationalError:
            raise  # the storage itself: the transaction is lost for all of its jobs
        except Exception as error:
            self._db.execute("ROLLBACK TO job")
            return Outcome(error=error)
        finally:
            if self._db.in_transaction:
                self._db.execute("RELEASE job")
        return Outcome(error=value.error) if isinstance(value, Refusal) else Outcome(value)

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            with suppress(sqlite3.Error):  # the error that led here is the one to report; closing rolls back as well
                self._db.execute("ROLLBACK")

    def _sweep(self) -> None:
        """Delete segments that became free. What was acknowledged does not depend on it: a failure is logged, and tried again."""
        if not self._ledger.sweep:
            return
        try:
            self._segments.remove_unused(self._is_used)
            self._ledger.sweep = False
        except (OSError, sqlite3.Error) as error:
            logger.warning("segments of %s could not be removed: %s", self._paths.groups, error)

    def _is_used(self, segment: int) -> bool:
        return self._ledger.one("SELECT 1 FROM payloads WHERE segment = ? LIMIT 1", segment) is not None

    def _storage_error(self, error: OSError | sqlite3.Error) -> StoreError:
        name = getattr(error, "sqlite_errorname", "") or ""
        where = getattr(error, "filename", None) or self._paths.root
        full = name == "SQLITE_FULL" or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if not full and name.startswith("SQLITE_IOERR"):
            space = os.statvfs(self._paths.root)
            full = space.f_bavail * space.f_frsize < _LITTLE_SPACE
        if full:
            return DiskFull(f"no space left in {self._paths.root}: make room, what was acknowledged is safe ({error})")
        return StoreError(f"{where} cannot be written: {error} {name}".rstrip())
