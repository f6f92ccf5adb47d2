"""A budgeted folder against a model: three processes that do anything, die anywhere and start again."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmload import CacheFull, faults
from shmload.storage.budgeted_folder import BudgetedFolder
from shmload.storage.file_lease import Lease
from shmload.storage.ledger import HIDDEN
from shmload.storage.reservation import Reservation
from tests.storage.cache.folder_kit import being_written, content, files_on_disk, simulate_kill

CAPACITY = 100
SIZES = st.integers(1, 60)
WHO = st.integers(0, 2)
ANY = st.integers(0, 1000)


class Crash(BaseException):
    """Raised by an armed fault in place of a kill."""


@dataclass
class Process:
    """A process and its operations under way."""

    folder: BudgetedFolder
    leases: list[Lease] = field(default_factory=list)
    writing: list[Reservation] = field(default_factory=list)


class Machine(RuleBasedStateMachine):
    """The model: lengths of the published files, oldest first, and of the files that dead processes were writing."""

    def __init__(self) -> None:
        super().__init__()
        self.path = tempfile.mkdtemp()
        self.files: dict[str, int] = {}
        self.orphans: list[int] = []
        self.num_published = 0
        self.point = ""
        self.hit, faults.hit = faults.hit, self.harm
        self.processes = [Process(self.opened()) for _ in range(3)]

    def teardown(self) -> None:
        faults.hit = self.hit
        for process in self.processes:
            process.folder.close()
        shutil.rmtree(self.path)

    def opened(self) -> BudgetedFolder:
        return BudgetedFolder(self.path, CAPACITY)

    def harm(self, point: str) -> None:
        if point == self.point:
            self.point = ""
            raise Crash

    def leased(self) -> Counter[str]:
        return Counter(lease.name for process in self.processes for lease in process.leases)

    def reserved(self) -> list[int]:
        return [reservation.nbytes for process in self.processes for reservation in process.writing]

    def victims(self, nbytes: int) -> list[str] | None:
        """Returns the files that the model would evict, oldest first; None if these would not suffice."""
        used = sum(self.files.values()) + sum(self.reserved()) + nbytes
        found: list[str] = []
        for name in [name for name in self.files if name not in self.leased()]:
            if used <= CAPACITY:
                break
            found.append(name)
            used -= self.files[name]
        return found if used <= CAPACITY else None

    def evict(self, names: list[str]) -> None:
        for name in names:
            del self.files[name]

    def killed(self, process: Process) -> None:
        self.orphans += [reservation.nbytes for reservation in process.writing]
        process.writing, process.leases = [], []
        simulate_kill(process.folder)

    @rule(who=WHO, nbytes=SIZES)
    def reserve(self, who: int, nbytes: int) -> None:
        process, victims = self.processes[who], self.victims(nbytes)
        self.orphans = []
        if victims is None:
            with pytest.raises(CacheFull):
                process.folder.reserve(nbytes)
            return
        process.writing.append(process.folder.reserve(nbytes))
        self.evict(victims)

    @rule(who=WHO, nbytes=SIZES, point=st.sampled_from(["holding_lock", "after_reserve", "mid_evict"]))
    def die_while_reserving(self, who: int, nbytes: int, point: str) -> None:
        process, victims = self.processes[who], self.victims(nbytes)
        self.point = point
        try:
            process.writing.append(process.folder.reserve(nbytes))
        except CacheFull:
            assert victims is None
            self.orphans = []
        except Crash:
            if point == "mid_evict":
                assert victims
                self.evict(victims[:1])
                self.orphans = []
            elif point == "after_reserve":
                assert victims is not None
                self.evict(victims)
                self.orphans = [nbytes]
            self.killed(process)
        else:
            assert victims == []
            self.orphans = []
        self.point = ""

    @precondition(lambda self: self.reserved())
    @rule(which=ANY, share=st.floats(0, 1), leases=st.booleans())
    def publish(self, which: int, share: float, leases: bool) -> None:
        process, reservation = self.pick(which)
        name, nbytes = f"f{self.num_published:04}", int(reservation.nbytes * share)
        self.num_published += 1
        os.pwrite(reservation.fd, content(name, nbytes), 0)
        process.writing.remove(reservation)
        if leases:
            process.leases.append(reservation.publish_leased(name, nbytes=nbytes))
        else:
            reservation.publish(name, nbytes=nbytes)
        self.files[name] = nbytes

    @precondition(lambda self: self.reserved())
    @rule(which=ANY, point=st.sampled_from(["holding_lock", "before_publish", "after_publish"]))
    def die_while_publishing(self, which: int, point: str) -> None:
        process, reservation = self.pick(which)
        name = f"f{self.num_published:04}"
        self.num_published += 1
        os.pwrite(reservation.fd, content(name, reservation.nbytes), 0)
        self.point = point
        with pytest.raises(Crash):
            reservation.publish(name)
        if point == "after_publish":
            process.writing.remove(reservation)
            self.files[name] = reservation.nbytes
        self.killed(process)

    @precondition(lambda self: self.reserved())
    @rule(which=ANY)
    def abandon(self, which: int) -> None:
        process, reservation = self.pick(which)
        process.writing.remove(reservation)
        reservation.abandon()

    @precondition(lambda self: self.reserved())
    @rule(which=ANY, nbytes=st.integers(1, 40))
    def grow(self, which: int, nbytes: int) -> None:
        _, reservation = self.pick(which)
        if reservation.nbytes + nbytes > CAPACITY:
            with pytest.raises(CacheFull, match="can never"):
                reservation.grow(nbytes)
            return
        victims = self.victims(nbytes)
        self.orphans = []
        if victims is None:
            with pytest.raises(CacheFull):
                reservation.grow(nbytes)
        else:
            reservation.grow(nbytes)
            self.evict(victims)

    @precondition(lambda self: self.files)
    @rule(who=WHO, which=ANY)
    def lease(self, who: int, which: int) -> None:
        process = self.processes[who]
        process.leases.append(process.folder.lease(list(self.files)[which % len(self.files)]))

    @rule(who=WHO, which=ANY)
    def release(self, who: int, which: int) -> None:
        leases = self.processes[who].leases
        if leases:
            leases.pop(which % len(leases)).release()

    @precondition(lambda self: self.files)
    @rule(who=WHO, which=ANY)
    def discard(self, who: int, which: int) -> None:
        name = list(self.files)[which % len(self.files)]
        is_free = name not in self.leased()
        assert is_free == self.processes[who].folder.discard(name)
        if is_free:
            del self.files[name]

    @rule(who=WHO)
    def die_anywhere(self, who: int) -> None:
        self.killed(self.processes[who])

    @rule(who=WHO)
    def leave(self, who: int) -> None:
        process = self.processes[who]
        process.writing, process.leases = [], []
        process.folder.close()

    @rule()
    def damage_the_ledger(self) -> None:
        with open(f"{self.path}/{HIDDEN}/ledger", "r+b") as file:
            file.write(b"damaged!")

    @rule(name=st.sampled_from(["theirs", "more"]))
    def put_a_foreign_file(self, name: str) -> None:
        Path(self.path, name).write_bytes(bytes(1000))

    @invariant()
    def the_folder_is_the_models(self) -> None:
        there = files_on_disk(self.path)
        assert self.files == there
        assert sorted(self.reserved() + self.orphans) == sorted(being_written(self.path).values())
        assert sum(there.values()) + sum(being_written(self.path).values()) <= CAPACITY
        for name, nbytes in there.items():
            assert content(name, nbytes) == Path(self.path, name).read_bytes()

    @invariant()
    def every_process_knows_it(self) -> None:
        leased = len(self.leased())
        for process in self.processes:
            assert list(self.files.items()) == [(kept.name, kept.nbytes) for kept in process.folder.files()]
            assert leased == process.folder.statistics().num_leased

    def pick(self, which: int) -> tuple[Process, Reservation]:
        found = [(process, each) for process in self.processes for each in process.writing]
        return found[which % len(found)]


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=int(os.environ.get("SHMLOAD_EXAMPLES", "30")),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
