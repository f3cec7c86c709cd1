"""As it happens to users: processes are killed, run beside each other, and meet a full disk."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from assay.results.store import Store
from tests.results.processes import ROOT, end, go, ids_on_disk, start, worker
from tests.results.records import make_record
from tests.results.worker import identity

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and locks of POSIX")


def all_ids(groups: int, rows: int) -> set[str]:
    return {identity(group, row) for group in range(groups) for row in range(rows)}


def test_kill_minus_nine_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    """Killed again and again, it goes on where it was, and no row is broken, lost or there twice."""
    groups, rows, kills = 40, 50, 10
    chance = random.Random(0)
    kept: list[str] = []
    for _ in range(kills):
        process = worker(tmp_path, groups, rows, pause=0.0005)
        go(process)
        time.sleep(chance.uniform(0.0, 0.1))
        process.kill()
        assert end(process) == -signal.SIGKILL, "it must not have ended before it is killed"
        found = ids_on_disk(tmp_path)
        assert max(Counter(found).values(), default=1) == 1
        assert set(found) >= set(kept), "a row that was whole is gone"
        kept = found
    assert 0 < len(kept) < groups * rows
    last = worker(tmp_path, groups, rows)
    go(last)
    assert end(last) == 0
    assert Counter(ids_on_disk(tmp_path)) == Counter(all_ids(groups, rows))


@pytest.mark.parametrize("count", [2, 4])
def test_processes_share_a_folder(tmp_path: Path, count: int) -> None:
    """Each row exactly once, and each process does a part."""
    groups, rows = 30, 5
    processes = [worker(tmp_path, groups, rows, pause=0.001) for _ in range(count)]
    for process in processes:
        go(process)
    assert [end(process) for process in processes] == [0] * count
    assert Counter(ids_on_disk(tmp_path)) == Counter(all_ids(groups, rows))
    assert len(list(tmp_path.glob("*.jsonl"))) == count


def test_others_take_over_from_a_process_that_is_killed(tmp_path: Path) -> None:
    groups, rows = 20, 5
    victim, *others = [worker(tmp_path, groups, rows, pause=0.002) for _ in range(3)]
    for process in (victim, *others):
        go(process)
    time.sleep(0.03)
    victim.kill()
    assert end(victim) == -signal.SIGKILL
    assert [end(process) for process in others] == [0, 0]
    assert Counter(ids_on_disk(tmp_path)) == Counter(all_ids(groups, rows))


LIMITED = """
import resource, sys
from pathlib import Path
from assay.results.store import Store, StoreError
from tests.results.records import make_record
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # Python ignores the signal: the write is cut or fails
store = Store(Path(sys.argv[1]))
try:
    for i in range(1000):
        store.append(make_record(id=str(i)))
except StoreError as error:
    print(len(store.done), error)
"""


def test_a_file_that_may_not_grow_keeps_its_rows(tmp_path: Path) -> None:
    """The kernel itself cuts the write in the middle of a row, as a full disk does."""
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    count, _, message = done.stdout.partition(" ")
    (path,) = tmp_path.glob("*.jsonl")
    assert str(path) in message
    assert "Make room" in message
    assert ids_on_disk(tmp_path) == [str(i) for i in range(int(count))]
    assert 0 < int(count) < 50
    assert path.read_bytes().endswith(b"\n"), "half a row must be taken back"
    with Store(tmp_path) as store:  # with room again, it goes on
        store.append(make_record(id=count))
    assert len(ids_on_disk(tmp_path)) == int(count) + 1


HOLDER = """
import os, sys
from pathlib import Path
from assay.results.store import Store
store = Store(Path(sys.argv[1]))
with store.claim("a") as ours:
    assert ours
    print("ready", flush=True)
    sys.stdin.readline()
"""


def test_a_claim_excludes_other_processes_and_ends_with_its_own(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for kill in (True, False):
        holder = start("-c", HOLDER, str(tmp_path))
        with store.claim("a") as ours, store.claim("b") as another:
            assert (ours, another) == (False, True)
        if kill:
            holder.kill()
        else:
            go(holder)
        end(holder)
        with store.claim("a") as ours:
            assert ours


def test_waiting_for_a_claim(tmp_path: Path) -> None:
    waiter = HOLDER.replace('claim("a")', 'claim("a", wait=True)').replace(
        "with store", "print('ready', flush=True)\nwith store"
    )
    with Store(tmp_path).claim("a") as ours:
        assert ours
        process = start("-c", waiter, str(tmp_path))
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"  # now it has it
    go(process)
    assert end(process) == 0


def test_one_process_claims_a_name_once(tmp_path: Path) -> None:
    """The kernel would give a process its own lock again, and drop all its locks when any descriptor is closed."""
    one, two = Store(tmp_path), Store(tmp_path)
    with one.claim("a") as first:
        with two.claim("a") as second, one.claim("a") as third:
            assert (first, second, third) == (True, False, False)
        with pytest.raises(ValueError, match="this process holds 'a' already"), two.claim("a", wait=True):
            pass
        two.close()
        other = start("-c", HOLDER.replace("assert ours", "assert not ours"), str(tmp_path))
        go(other)
        assert end(other) == 0, "the first claim was lost"
    with two.claim("a") as again:
        assert again


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors")
def test_claims_share_one_descriptor(tmp_path: Path) -> None:
    def claim_one_of_each() -> int:
        with Store(tmp_path).claim("a"), Store(tmp_path).claim("b"):
            return len(list(Path("/proc/self/fd").iterdir()))

    assert claim_one_of_each() == claim_one_of_each()


def test_a_claim_ends_with_an_error(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(KeyError), store.claim("a"):
        raise KeyError
    with store.claim("a") as ours:
        assert ours


FORKED = """
import os, sys
from pathlib import Path
from assay.results.store import Store
from tests.results.records import make_record
store = Store(Path(sys.argv[1]))
store.append(make_record(id="parent"))
with store.claim("a") as ours:
    assert ours
    if os.fork() == 0:
        with store.claim("a") as ours:
            store.append(make_record(id="child"))
            os._exit(10 if ours else 11)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 11, "parent and child both have the claim"
store.append(make_record(id="parent again"))
assert store.refresh() == {"child"}
"""


def test_a_forked_child_has_its_own_file_and_claims(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKED, str(tmp_path)], cwd=ROOT, check=True)
    assert sorted(ids_on_disk(tmp_path)) == ["child", "parent", "parent again"]
    assert sorted(path.read_bytes().count(b"\n") for path in tmp_path.glob("*.jsonl")) == [1, 2]
