"""Tasks in this process, or in worker processes of this machine."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait as wait_for_sentinel
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_tasks(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    jobs: int,
    look: Callable[[], None] = lambda: None,
    seconds: float = 0.25,
) -> Iterator[tuple[Task, Result]]:
    """(task, result) as they end, in any order; `look` is called every few moments while waiting.

    With one job everything runs here. Otherwise in processes of one thread each, started anew (a fork would copy
    torch's threads in the middle of their work). They die with this process, also when it is killed.
    """
    if jobs == 1 or len(tasks) <= 1:
        for task in tasks:
            yield task, function(task)
        return
    threads = max(1, cores() // jobs)
    pool = ProcessPoolExecutor(
        min(jobs, len(tasks)), mp_context=get_context("spawn"), initializer=_start_worker, initargs=(threads,)
    )
    try:
        left = iter(tasks)
        # A few for each worker: all at once, every look would go over all that are left.
        waiting: dict[Future[Result], Task] = {pool.submit(function, task): task for task in islice(left, 3 * jobs)}
        while waiting:
            ended, _ = wait(waiting, timeout=seconds, return_when=FIRST_COMPLETED)
            look()
            for future in ended:
                task = waiting.pop(future)
                waiting |= {pool.submit(function, following): following for following in islice(left, 1)}
                yield task, future.result()
        pool.shutdown()
    except BaseException:
        workers = list((pool._processes or {}).values())  # the pool would wait for them to finish
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()
        raise


def _start_worker(threads: int) -> None:
    """Leave Ctrl-C to the parent, end when it ends, and take no more threads than are this worker's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        import torch
    except ModuleNotFoundError:
        return
    torch.set_num_threads(threads)


def _die_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait_for_sentinel([parent.sentinel])
        os._exit(1)
