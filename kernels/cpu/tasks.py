"""How a call is cut into tasks for the CPU programs.

The cut depends on the shape of the call alone, never on the number of threads, so results have the
same bits on any number of threads. A head of stride c is c sequences, one per residue (see
tvm_pack.py), and a task is a run of queries (forward) or keys (backward) of one sequence. Tasks are
long enough for their packing to be cheap and short enough to keep many cores busy; small ones go to
a kernel several at a time. Heads come before parts of the sequence: rows of all heads at one
position lie side by side, and are found while the processor still knows where their pages are.
"""

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

FORWARD_QUERIES = 480  # most queries of a forward task
BACKWARD_KEYS = 512  # most keys of a backward task
_ENOUGH = 32  # so many tasks keep the cores of a small machine busy to the end
_GRAIN = 3e7, 5e6  # most and least multiplications and additions that are worth a kernel's call

_Row = tuple[int, int, int, int, int, int]


@dataclass(frozen=True)
class Run:
    """Tasks that one call of a kernel does. In the backward pass they are of one head."""

    begin: int
    end: int
    head: int
    turn: int  # how many runs of this head stand before this one


@dataclass(frozen=True)
class Tasks:
    """The table [task, 6] of batch, head, residue, stride, first and end element; and its runs."""

    table: Tensor
    runs: tuple[Run, ...]
    longest: int  # elements of the longest task

    @property
    def count(self) -> int:
        """The number of tasks."""
        return self.table.numel() // 6


@functools.lru_cache(maxsize=256)
def forward_tasks(
    batch: int, queries: int, keys: int, strides: tuple[int, ...], window: int, dim: int, block: int
) -> Tasks:
    """Cut the queries; tasks begin at whole blocks, and are in the order of positions."""
    longest = _length(batch * len(strides) * queries, FORWARD_QUERIES, 2 * block, block)
    rows: list[_Row] = []
    for b in range(batch):
        for head, stride in enumerate(strides):
            for residue in range(min(stride, keys)):
                end = -(-(keys - residue) // stride)
                begin = max(0, -(-(keys - queries - residue) // stride))
                rows += [
                    (b, head, residue, stride, *part) for part in _cut(begin, end, longest, block)
                ]
    rows.sort(key=lambda row: (row[0], row[3] * row[4], row[1], row[2]))
    return _tasks(rows, window, dim, one_head=False)


@functools.lru_cache(maxsize=256)
def backward_tasks(
    batch: int, keys: int, strides: tuple[int, ...], window: int, dim: int, lanes: int
) -> Tasks:
    """Cut the keys; tasks begin at whole strips of `lanes` keys, and are in the order of heads."""
    longest = _length(batch * len(strides) * keys, BACKWARD_KEYS, 128, lanes)
    rows: list[_Row] = []
    for head, stride in enumerate(strides):
        for b in range(batch):
            for residue in range(min(stride, keys)):
                end = -(-(keys - residue) // stride)
                rows += [(b, head, residue, stride, *part) for part in _cut(0, end, longest, lanes)]
    return _tasks(rows, window, dim, one_head=True)


def _length(elements: int, most: int, least: int, unit: int) -> int:
    wanted = min(most, max(least, elements // _ENOUGH))
    return -(-wanted // unit) * unit if wanted < most else most


def _cut(begin: int, end: int, longest: int, unit: int) -> list[tuple[int, int]]:
    """Cut into parts of about equal length, multiples of `unit` and at most `longest`."""
    count = end - begin
    if count <= 0:
        return []
    parts, units = -(-count // longest), -(-count // unit)
    bounds = [begin + units * i // parts * unit for i in range(parts)]
    return list(itertools.pairwise([*bounds, end]))


def _tasks(rows: list[_Row], window: int, dim: int, one_head: bool) -> Tasks:
    runs: list[Run] = []
    turns: dict[int, int] = {}
    works = [float(row[5] - row[4]) * (window + 32) * 3 * dim for row in rows]
    grain = min(_GRAIN[0], max(_GRAIN[1], sum(works) / _ENOUGH))
    begin = 0
    while begin < len(rows):
        head = rows[begin][1]
        end, work = begin, 0.0
        while end < len(rows) and (end == begin or _joins(rows, begin, end, one_head)):
            work += works[end]
            end += 1
            if work >= grain:
                break
        runs.append(Run(begin, end, head, turns.get(head, 0)))
        turns[head] = runs[-1].turn + 1
        begin = end
    if one_head:
        runs.sort(key=lambda run: (run.turn, run.head))  # neighbours need not wait for each other
    table = torch.tensor(rows, dtype=torch.int32).flatten()
    return Tasks(table, tuple(runs), max(row[5] - row[4] for row in rows))


def _joins(rows: list[_Row], first: int, task: int, one_head: bool) -> bool:
    """Whether a task may follow others in a call: backward, only whole sequences of one head."""
    if not one_head:
        return True

    def alone(i: int) -> bool:
        return not any(0 <= j < len(rows) and rows[j][:3] == rows[i][:3] for j in (i - 1, i + 1))

    return rows[task][1] == rows[first][1] and alone(first) and alone(task)
