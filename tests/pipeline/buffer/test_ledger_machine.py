"""The ledger against a model of it: any order of calls, repetitions, lost acknowledgements and crashes keeps the counts right."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.buffer.service import BufferService
from pipeline.errors import AttemptRefused, CapacityFull, LateCommit, NotSelectable, RolloutError
from pipeline.records import GROUP_STATES
from tests.pipeline.buffer.helpers import fast_folder, make_column, make_group, make_settings, new_run

LIVE = ("pending", "running", "written", "ready")


class LedgerMachine(RuleBasedStateMachine):
    """The model: ordinal -> state, the current attempt of each, and what was promised to be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = fast_folder()
        self.paths = new_run(self.folder.name)
        self.settings = make_settings(keep_groups=1, poison_after=4)
        self.state: dict[int, str] = {}
        self.step_of: dict[int, int] = {}
        self.current: dict[int, object] = {}
        self.attempts: list = []
        self.late: set[tuple[int, int]] = set()
        self.started = self.lost = 0
        self.selected: dict[int, tuple[int, ...]] = {}
        self.written_ever: set[int] = set()
        self.buffer = None
        self.reopen(epoch=False)

    def do(self, call):
        return self.loop.run_until_complete(call)

    def teardown(self) -> None:
        self.do(self.buffer.close())
        self.loop.close()
        self.folder.cleanup()

    def among(self, data, *wanted: str) -> int | None:
        found = sorted(ordinal for ordinal, state in self.state.items() if state in wanted)
        return data.draw(st.sampled_from(found)) if found else None

    def refresh_lost(self, ordinal: int) -> None:
        """Poison is the one drop that happens by itself."""
        row = self.row(ordinal)
        self.state[ordinal] = "dropped" if row["reason"] == "poison" else "pending"

    def row(self, ordinal: int):
        query = "SELECT * FROM ledger WHERE ordinal = ?"
        return self.do(self.buffer._read(lambda db: db.execute(query, (ordinal,)).fetchone()))

    # the life of slots

    @rule()
    def assign(self):
        step = max(self.step_of.values(), default=0) + 1
        used = sum(state in LIVE for state in self.state.values())
        try:
            slots = self.do(self.buffer.assign(step, 2, None))
        except CapacityFull:
            assert used + 2 > self.settings.capacity or "dropped" in self.state.values()
            return
        assert used + 2 <= self.settings.capacity
        assert [slot.ordinal for slot in slots] == [len(self.state), len(self.state) + 1]
        for slot in slots:
            self.state[slot.ordinal], self.step_of[slot.ordinal] = "pending", step
        assert self.do(self.buffer.assign(step, 2, None)) == slots

    @rule(data=st.data())
    def replace(self, data):
        ordinal = self.among(data, "dropped")
        if ordinal is not None:
            new = self.do(self.buffer.replace(ordinal, None))
            assert self.do(self.buffer.replace(ordinal, None)) == new
            if new is not None and new.ordinal not in self.state:
                assert new.ordinal == len(self.state)
                self.state[new.ordinal], self.step_of[new.ordinal] = "pending", new.step

    @rule(data=st.data())
    def close_rollout(self, data):
        if self.step_of:
            self.do(self.buffer.close_rollout(data.draw(st.sampled_from(sorted(set(self.step_of.values()))))))

    @rule(data=st.data())
    def discard(self, data):
        ordinal = self.among(data, *LIVE, "dropped")
        if ordinal is not None:
            assert self.do(self.buffer.discard(ordinal, "because")) is (self.state[ordinal] != "dropped")
            self.state[ordinal] = "dropped"

    # attempts

    @rule(data=st.data())
    def start_attempt(self, data):
        ordinal = self.among(data, *GROUP_STATES)
        if ordinal is None:
            return
        if self.state[ordinal] == "running":
            self.lost += 1
        try:
            attempt = self.do(self.buffer.start_attempt(ordinal, 0, "w"))
        except AttemptRefused:
            if self.state[ordinal] in ("pending", "running"):
                self.refresh_lost(ordinal)
            assert self.state[ordinal] not in ("pending", "running")
            return
        assert ordinal not in self.written_ever, "rolled out again"
        assert self.state[ordinal] in ("pending", "running")
        self.started += 1
        self.state[ordinal], self.current[ordinal] = "running", attempt
        self.attempts.append(attempt)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), needs=st.booleans(), times=st.integers(1, 2))
    def commit(self, data, needs, times):
        attempt = data.draw(st.sampled_from(self.attempts))
        ordinal = attempt.ordinal
        group = make_group(attempt, self.step_of[ordinal], ("teacher",) if needs else ())
        for _ in range(times):
            stood = self.row(ordinal)["attempt"] == attempt.number and ordinal in self.written_ever
            try:
                new = self.do(self.buffer.commit(attempt, group))
            except LateCommit:
                assert self.state[ordinal] != "running" or self.current[ordinal] != attempt
                self.late.add((ordinal, attempt.number))
                continue
            assert new is not stood
            if new:
                assert self.state[ordinal] == "running" and self.current[ordinal] == attempt
                self.state[ordinal] = "written" if needs else "ready"
                self.written_ever.add(ordinal)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), outcome=st.sampled_from(["lost", "infra", "data"]))
    def end_attempt(self, data, outcome):
        attempt = data.draw(st.sampled_from(self.attempts))
        ordinal = attempt.ordinal
        end = self.do(self.buffer.end_attempt(attempt, outcome, "why"))
        assert self.do(self.buffer.end_attempt(attempt, outcome, "why")) == end
        if self.state[ordinal] == "running" and self.current[ordinal] == attempt:
            self.lost += outcome == "lost"
            self.state[ordinal] = "pending" if end.again else "dropped"
            assert end.again or end.dropped in ("why", "poison")

    # fields and training

    @rule(data=st.data())
    def mark_produced(self, data):
        ordinal = self.among(data, *GROUP_STATES)
        if ordinal is not None:
            (outcome,) = self.do(self.buffer.mark_produced([make_column(ordinal)])).values()
            assert (outcome == "produced") is (outcome not in ("repeated", "late", "unknown"))
            if self.state[ordinal] == "written":
                assert outcome == "produced"
                self.state[ordinal] = "ready"

    @rule()
    def select(self):
        step = max(self.selected, default=0) + 1
        wanted = [ordinal for ordinal, of in self.step_of.items() if of == step]
        try:
            selection = self.do(self.buffer.select(step))
        except NotSelectable:
            return
        assert sorted(selection.ordinals) == [ordinal for ordinal in wanted if self.state[ordinal] == "ready"]
        assert not any(self.state[ordinal] in ("pending", "running", "written") for ordinal in wanted)
        self.selected[step] = selection.ordinals
        for ordinal in selection.ordinals:
            self.state[ordinal] = "consumed"
        self.do(self.buffer.record_step(step, {}))

    @rule(data=st.data())
    def mark_trained(self, data):
        if self.selected:
            step = data.draw(st.sampled_from(sorted(self.selected)))
            self.do(self.buffer.mark_trained(step, f"c{step}"))
            for earlier in range(1, step + 1):
                self.state.update(dict.fromkeys(self.selected[earlier], "trained"))

    # crashes

    @rule(epoch=st.booleans())
    def reopen(self, epoch):
        """The buffer process dies without a word; with a new run epoch the whole cluster did."""
        if epoch:
            running = [ordinal for ordinal, state in self.state.items() if state == "running"]
            self.lost += len(running)
        if self.buffer is not None:
            self.buffer._reads.close()
            self.buffer._store._db.close()
        self.buffer = BufferService(self.paths, self.settings, threaded=False)
        self.do(self.buffer.open(epoch))
        if epoch:
            for ordinal in running:
                self.refresh_lost(ordinal)

    # what may never break

    @invariant()
    def the_counts_add_up(self):
        status = self.do(self.buffer.status())
        counts = status["ordinals"]
        expected = Counter(self.state.values())
        assert counts == {"fetched": len(self.state), **{state: expected[state] for state in GROUP_STATES}}
        assert status["capacity"]["used"] == sum(expected[state] for state in LIVE) <= self.settings.capacity
        assert sum(status["dropped_by_reason"].values()) == expected["dropped"]
        attempts = {"started": self.started, "lost": self.lost, "late": len(self.late), "regenerated": 0}
        assert status["attempts"] == attempts

    @invariant()
    def nothing_is_trained_twice(self):
        taken = [ordinal for ordinals in self.selected.values() for ordinal in ordinals]
        assert len(taken) == len(set(taken))
        for step, ordinals in self.selected.items():
            assert self.do(self.buffer.select(step)).ordinals == ordinals

    @invariant()
    def what_resume_needs_can_be_read(self):
        held = [ordinal for ordinal, state in self.state.items() if state in ("written", "ready", "consumed")]
        assert [group.ordinal for group in self.do(self.buffer.read(held, True))] == held
        replayed = [ordinal for ordinals in self.do(self.buffer.steps())["selections"].values() for ordinal in ordinals]
        assert [group.ordinal for group in self.do(self.buffer.read(replayed, True))] == replayed
        gone = [ordinal for ordinal, state in self.state.items() if state in ("pending", "running", "dropped")]
        assert self.do(self.buffer.read(gone, True)) == []

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def a_foreign_group_is_refused(self, data):
        attempt = data.draw(st.sampled_from(self.attempts))
        group = make_group(attempt, self.step_of[attempt.ordinal])
        group.attempt += 1
        try:
            self.do(self.buffer.commit(attempt, group))
        except RolloutError as error:
            assert "committed by attempt" in str(error)
        else:
            raise AssertionError("a group of another attempt was taken")


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
