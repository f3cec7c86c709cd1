# mypy: ignore-errors
"""Who goes on: CTAs, partitions as threads of which one runs, and the check of races by happens-before."""

from __future__ import annotations

import builtins as _py
import math
import random
import threading

import numpy as np

from tests.gluon.errors import (
    _KERNEL_FILES,
    BarrierError,
    Deadlock,
    EmuError,
    Race,
    Unsupported,
    _Abort,
    _active,
    options,
    show,
    stats,
    where,
)


class Cta:
    def __init__(self, world, number, agents=256):
        self.world, self.number, self.agents = world, number, agents
        self.next_agent, self.allocations, self.barriers, self.named = 0, [], [], {}
        self.accesses = []  # (who, kind, where)
        self.alive = 1
        self.smem = 0
        self.ids = world.ids(number)

    def new_agent(self):
        self.next_agent += 1
        if self.next_agent > self.agents:
            raise Unsupported(f"more than {self.agents} partitions and barriers in a CTA: raise Cta(agents=…)")
        return self.next_agent - 1


class Task:
    """A partition (or the kernel before warp_specialize)."""

    def __init__(self, cta, name, number, fn, args, clock=None, warps=4):
        self.cta, self.world, self.name, self.number = cta, cta.world, name, number
        self.fn, self.args, self.warps = fn, args, warps
        self.semaphore = threading.Semaphore(0)
        self.test = self.waiting = None
        self.done, self.result, self.main = False, None, name == "kernel"
        self.agent, self.mma_agent, self.store_agent = cta.new_agent(), cta.new_agent(), cta.new_agent()
        self.clock = np.zeros(cta.agents, np.int64) if clock is None else clock.copy()
        self.clock[self.agent] = 1
        self.mmas: list = []  # issued, not waited for
        self.issued = 0
        self.stores: list = []
        self.stores_issued = 0
        self.unfenced: set = set()
        self.weight = math.exp(self.world.random.gauss(0, 1.2))

    @property
    def label(self):
        return f"CTA {self.cta.number} {self.name}"

    # switching
    def point(self):
        """Another may go on here."""
        world = self.world
        world.steps += 1
        if world.random.random() < world.switch:
            world.reschedule(self)

    def block(self, test, waiting):
        if test():
            self.point()
            return
        self.test, self.waiting = test, (waiting, where())
        self.world.reschedule(self)
        self.test = self.waiting = None

    def tick(self):
        """What comes after is not ordered before what was just told to others."""
        self.clock[self.agent] += 1

    def merge(self, clock):
        np.maximum(self.clock, clock, out=self.clock)

    def run(self):
        self.semaphore.acquire()
        world = self.world
        _active.task = self
        np.seterr(all="ignore")
        try:
            if world.error is None:
                self.result = self.fn(*self.args)
                self.finish_checks()
        except _Abort:
            pass
        except BaseException as error:
            world.fail(error, self)
        self.done = True
        try:
            world.finished(self)
        except BaseException as error:
            world.fail(error, self)
            world.abort()

    def finish_checks(self):
        if not options.end_checks:
            return
        if self.mmas:
            raise EmuError(
                f"{self.label} ended with {len(self.mmas)} wgmma not waited for, the first issued at\n"
                f"{show(self.mmas[0].place)}"
            )
        if self.stores:
            raise EmuError(
                f"{self.label} ended while a TMA store may still read shared memory: tma.store_wait(0) is "
                f"missing. Issued at\n{show(self.stores[0].place)}"
            )

    # race checks
    def check_read(self, smem, agent, clock, epoch, kind, asynchronous=False):
        alloc, at = smem.alloc, smem.grains
        if options.uninitialised and (alloc.write_id[at] < 0).any():
            raise Race(f"{self.label} ({kind}) reads {smem}, which nobody has written\n{show(where())}")
        if options.races:
            bad = alloc.write_epoch[at] > clock[alloc.write_agent[at]]
            if bad.any():
                self.race(smem, alloc.write_id[at][bad][0], f"{kind} (read)", "write")
            seen = alloc.reads.get(agent)
            if seen is None:
                seen = alloc.reads[agent] = (np.zeros(alloc.n, np.int64), np.full(alloc.n, -1, np.int64))
            seen[0][at] = epoch
            seen[1][at] = self.record(kind)
        if asynchronous and options.fences:
            dirty = alloc.unfenced[at]
            if dirty.any():
                raise Race(
                    f"{self.label} ({kind}) reads {smem}: partition {int(dirty.max()) - 1} stored it and called no "
                    f"fence_async_shared() after that\n{show(where())}"
                )

    def check_write(self, smem, agent, clock, epoch, kind):
        alloc, at = smem.alloc, smem.grains
        if options.races:
            bad = alloc.write_epoch[at] > clock[alloc.write_agent[at]]
            if bad.any():
                self.race(smem, alloc.write_id[at][bad][0], f"{kind} (write)", "write")
            for reader, (epochs, ids) in alloc.reads.items():
                bad = epochs[at] > clock[reader]
                if bad.any():
                    self.race(smem, ids[at][bad][0], f"{kind} (write)", "read")
        alloc.write_agent[at] = agent
        alloc.write_epoch[at] = epoch
        alloc.write_id[at] = self.record(kind)

    def record(self, kind):
        self.cta.accesses.append((self.label, kind, where(3)))
        return len(self.cta.accesses) - 1

    def race(self, smem, other, mine, theirs):
        label, kind, place = self.cta.accesses[other]
        raise Race(
            f"race on {smem}:\n  {self.label}, {mine}, at\n{show(where(3), '      ')}\n  is not ordered after the "
            f"{theirs} by {label}, {kind}, at\n{show(place, '      ')}\n  (no barrier or wait between them says "
            f"that it has ended)"
        )


class World:
    """One launch."""

    def __init__(self, kernel, grid, seed):
        self.kernel, self.grid, self.seed = kernel, grid, seed
        self.random = random.Random(seed)
        self.switch = options.switch if options.switch is not None else self.random.choice([0.1, 0.3, 0.6, 1.0])
        self.tasks: list[Task] = []
        self.flying: list = []  # TMA loads, and stores whose data is on its way to memory
        self.error, self.steps, self.over = None, 0, threading.Event()
        self.queue = list(range(math.prod(grid)))
        self.lazy = {kind: math.exp(self.random.gauss(0, 1.5)) for kind in ("load", "store", "write", "mma")}
        if self.random.random() < 0.2:  # so late that only who waits for them finds them in memory
            self.lazy["write"] = 1e-9
        self.threads = []
        self.idle = 0

    def ids(self, number):
        x, y = self.grid[0], self.grid[1]
        return number % x, number // x % y, number // (x * y)

    def launch(self, fn):
        self.fn = fn
        resident = options.resident or self.random.choice([1, 1, 2, 3])
        for _ in range(_py.min(resident, len(self.queue))):
            self.start_cta()
        if not self.tasks:
            return
        first = self.random.choice(self.tasks)
        first.semaphore.release()
        self.over.wait()
        for thread in self.threads:
            thread.join(10)
        stats["steps"] += self.steps
        if self.error is not None:
            raise self.error

    def start_cta(self):
        cta = Cta(self, self.queue.pop(0))
        self.add(Task(cta, "kernel", 0, self.fn, ()))

    def add(self, task):
        self.tasks.append(task)
        task.thread = threading.Thread(target=task.run, daemon=True)
        self.threads.append(task.thread)
        task.thread.start()

    def fail(self, error, task):
        if self.error is None:
            if not isinstance(error, Deadlock):
                note = f"[in {self.kernel}, {task.label}, seed {self.seed}]\n{show(self.trace_of(error))}"
                error.add_note(note)
            self.error = error

    @staticmethod
    def trace_of(error):
        found, tb = [], error.__traceback__
        while tb is not None:
            code = tb.tb_frame.f_code
            if code.co_filename in _KERNEL_FILES:
                found.append((code.co_filename, tb.tb_lineno, code.co_name))
            tb = tb.tb_next
        return found[::-1]

    def end(self):
        self.over.set()

    def abort(self):
        """Wake everybody, to end them."""
        for task in self.tasks:
            if not task.done:
                task.semaphore.release()
        self.over.set()

    def finished(self, task):
        if self.error is not None:
            self.abort()
            return
        self.tasks.remove(task)
        cta = task.cta
        if task.main:
            if options.end_checks:
                loads = [op for op in self.flying if op.kind == "load" and op.task.cta is cta]
                if loads:
                    raise EmuError(
                        f"CTA {cta.number} ended with {len(loads)} TMA loads that nobody waited for, one of\n"
                        f"{show(loads[0].place)}"
                    )
                for bar in cta.barriers:
                    if bar.tx:
                        raise BarrierError(f"CTA {cta.number} ended: {bar} is {bar.state()}")
            stats["smem"] = _py.max(stats["smem"], cta.smem)
            if self.queue:
                self.start_cta()
        if not self.tasks:
            for op in self.random.sample(self.flying, len(self.flying)):
                op.perform()
            self.end()
            return
        self.reschedule(task)

    # choosing
    def reschedule(self, task):
        """Do things at random until a task's turn comes; return when it is this one's."""
        while True:
            self.steps += 1
            if self.steps > options.max_steps:
                raise EmuError(
                    f"{options.max_steps} scheduler steps: a livelock (or raise options.max_steps)\n" + self.blocked()
                )
            things, weights = [], []
            for t in self.tasks:
                if t.test is None or t.test():
                    things.append(t)
                    weights.append(t.weight)
            for op in self.flying:
                things.append(op)
                weights.append(self.lazy[op.kind])
            for t in self.tasks:
                for pending in (t.mmas, t.stores):
                    for op in pending:
                        if not op.performed:
                            things.append(op)
                            weights.append(self.lazy[op.kind])
                            if op.kind == "mma":
                                break  # in order
            if not things:
                raise Deadlock(f"deadlock in {self.kernel} (seed {self.seed}): nobody can go on\n" + self.blocked())
            thing = self.random.choices(things, weights)[0]
            if isinstance(thing, Task):
                if thing is task:
                    return
                thing.semaphore.release()
                if task.done:
                    return
                task.semaphore.acquire()
                _active.task = task
                if self.error is not None:
                    raise _Abort
                return
            if options.trace:
                print(f"  {thing}")
            thing.perform()

    def blocked(self):
        lines = []
        for t in self.tasks:
            if t.waiting:
                lines.append(f"  {t.label} waits for {t.waiting[0]()} at\n{show(t.waiting[1], '      ')}")
            else:
                lines.append(f"  {t.label} runs")
        return "\n".join(lines)
