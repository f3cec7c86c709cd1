# mypy: ignore-errors
"""An mbarrier: arrivals, transaction bytes, phases, and the order that its end gives."""

from __future__ import annotations

import numpy as np

from tests.gluon.errors import BarrierError, show


class Barrier:
    def __init__(self, cta, smem, count):
        self.cta, self.count, self.smem = cta, count, smem
        self.pending, self.tx, self.phase = count, 0, 0
        self.agent = cta.new_agent()
        self.gathered = np.zeros(cta.agents, np.int64)
        self.done = np.zeros(cta.agents, np.int64)
        self.history = []  # arrivals of this phase
        self.expected = 0

    def __repr__(self):
        return f"{self.smem}"

    def state(self):
        tx = f", {self.tx} bytes still expected" if self.tx else ""
        return (
            f"in phase {self.phase} (parity {self.phase & 1}), {self.count - self.pending} of {self.count} arrivals "
            f"of it{tx}"
        )

    def passed(self, parity):
        return (self.phase & 1) != parity

    def arrive(self, count, clock, who):
        self.history.append(who)
        if count > self.pending:
            raise BarrierError(
                f"{who[0]} arrives {count} times at {self}: phase {self.phase} lacks only {self.pending} of "
                f"{self.count} arrivals (it waits for {self.tx} more bytes). Arrivals of this phase:\n"
                + "\n".join(f"  {w[0]}\n{show(w[1], '      ')}" for w in self.history)
            )
        self.pending -= count
        np.maximum(self.gathered, clock, out=self.gathered)
        self.check()

    def expect(self, nbytes, clock, who):
        self.tx += nbytes
        self.expected += nbytes
        self.arrive(1, clock, who)

    def landed(self, nbytes, clock):
        self.tx -= nbytes
        np.maximum(self.gathered, clock, out=self.gathered)
        self.check()

    def check(self):
        if self.pending:
            return
        if self.tx < 0:
            raise BarrierError(
                f"{self}: {-self.tx} bytes more came by TMA than expect() said ({self.expected}), in "
                f"phase {self.phase}. Arrivals:\n"
                + "\n".join(f"  {w[0]}\n{show(w[1], '      ')}" for w in self.history)
            )
        if self.tx == 0:
            self.phase += 1
            self.pending, self.expected, self.history = self.count, 0, []
            self.gathered[self.agent] = self.phase
            self.done = self.gathered.copy()
