"""Learner under a coordinator: pulls once per evaluation, computes dealt portions, pushes their sum."""

from __future__ import annotations

from mpisgd.comm.messages import FORGET, PUSH_NOW, STOP_FINISHED, Ending
from mpisgd.exchange.exchange import Report
from mpisgd.exchange.learner_channel import LearnerChannel
from mpisgd.gradient.straggler import Delays
from mpisgd.sandblaster.channels import PortionChannel, Receipts
from mpisgd.vectors.computing import Travels
from mpisgd.vectors.memory import host_vector, host_view


class Sum:
    """Sum of gradients, each times its samples; `vector`, (parameters,) float32, is pushed.

    Args:
        gradient: mean over a portion's samples; changed by `add`.
        alone: push each portion by itself, from the gradient's memory.
    """

    def __init__(self, gradient: Travels, *, alone: bool) -> None:
        self._gradient = gradient.memory.tensors[1]
        self._sum = self._gradient if alone else host_vector(len(self._gradient))
        self.vector = host_view(self._sum)
        self._alone = alone
        self.clear()

    def clear(self) -> None:
        self.samples = self.compute_ns = self.delay_ns = 0
        self._losses = 0.0

    def add(self, samples: int, loss: float, compute_ns: int, delay_ns: int) -> None:
        self._gradient.mul_(samples)
        if not self._alone and self.samples:
            self._sum.add_(self._gradient)
        elif not self._alone:
            self._sum.copy_(self._gradient)
        self.samples += samples
        self._losses += loss * samples
        self.compute_ns += compute_ns
        self.delay_ns += delay_ns

    def report(self, seq: int) -> Report:
        return Report(seq, self.samples, self._losses / self.samples, self.compute_ns, self.delay_ns)


def learn(
    coordinator: PortionChannel,
    channel: LearnerChannel,
    receipts: Receipts,
    gradient: Travels,
    summed: Sum,
    delays: Delays,
    *,
    first_seq: int = 0,
) -> None:
    """Obey the coordinator until it says stop, then say goodbye to the shards (law 8); `first_seq`: of its pushes."""
    here = begun = -1
    pushes = first_seq
    clock, portion, counts = coordinator.next(here)
    while portion >= PUSH_NOW:
        if portion == PUSH_NOW:
            whole = receipts.push(channel, summed.report(pushes))
            summed.clear()
            clock, portion, counts = coordinator.next(clock, pushed=pushes if whole else -1)
            pushes += 1
            continue
        if counts == FORGET:
            summed.clear()
        if clock != here:
            clocks = set(channel.pull(min_clock=clock).clocks)
            if clocks != {clock}:  # others have finished the evaluation meanwhile
                here, (clock, portion, counts) = -1, coordinator.next(clock)
                continue
            here = clock
        begun += 1
        start_ns = channel.now_ns()
        loss = gradient.compute(portion)
        compute_ns = channel.now_ns() - start_ns
        delay_s = delays.of(begun, compute_ns * 1e-9)
        if delay_s > 0:
            channel.sleep(delay_s)
        samples, delay_ns = gradient.samples, int(delay_s * 1e9)
        clock, portion, counts = coordinator.next(here, portion, samples, loss, compute_ns=compute_ns, delay_ns=delay_ns)
        if counts == 1:
            summed.add(samples, loss, compute_ns, delay_ns)
    channel.goodbye(ending=Ending.FINISHED if portion == STOP_FINISHED else Ending.INTERRUPTED)
