"""The forward program for CPUs.

What lies where. A task is a run of at most FORWARD_QUERIES queries of one sequence (see
tvm_pack.py). Its scratch stays in the core's caches:

    content, place      [row][dim]     (q + u) and (q + p), times scale * log2(e), of one block
    keys                strips         K transposed, a run of at most KEYS keys
    values              [key][dim]     V of the same run
    scores              [row][margin | keys seen | margin]   of one group of `tile.rows` queries
    gathered            [query][dim]   sums of weights times values so far
    top, total          [query]        running maximum and sum of the weights, in base 2

Mostly all the keys of a task are one run; a long window takes several. Within a run the keys are
packed as the queries come to see them, and what the next block will need is prefetched. For each
group of queries: position scores go into `scores`, content scores are added tile by tile, a softmax
with running maximum turns the rows into weights, and a tile of weights times values is added to
`gathered`. Nothing of size queries x window exists.

Columns outside a row's window may hold anything, also NaN, until the softmax selects zero there.
"""

from types import SimpleNamespace

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, PrimFunc

from kernels import dropout_tir as tvm_random
from kernels.cpu.pack import TASK_FIELDS, Sequence, ask_for_rows, pack_rows, pack_strips, read_task
from kernels.cpu.program import SIZES, build_kernel
from kernels.cpu.scores import (
    Group,
    Shape,
    deltas,
    dropout_row,
    load_query,
    position_scores,
    product_tiles,
    visible,
)
from kernels.cpu.tasks import FORWARD_QUERIES
from kernels.cpu.tiles import (
    accumulate,
    exp2,
    fill,
    first,
    load,
    opaque,
    reduce,
    registers,
    spill,
    splat,
    store,
    variable,
)

KEYS = 1024  # most keys of a run
LOWEST = -1e30  # a running maximum before any key


def forward(shape: Shape) -> PrimFunc:
    """Return the kernel that runs the tasks begin .. end - 1."""
    dim = shape.dim
    queries = {"q": lambda a: a.batch * a.query_count * a.heads * dim}
    keys = dict.fromkeys(("k", "v"), lambda a: a.batch * a.key_count * a.heads * dim)
    relative = {
        "packed": lambda a: a.heads * a.strip_count * (dim * shape.tile.lanes),
        "content_bias": lambda a: a.heads * dim,
        "position_bias": lambda a: a.heads * dim,
    }
    results = {"out": queries["q"], "lse": lambda a: a.batch * a.query_count * a.heads}
    tasks = {"tasks": lambda a: a.task_count * TASK_FIELDS}
    return build_kernel(
        "forward",
        queries | keys | (relative if shape.relative else {}) | results | tasks,
        dict.fromkeys(("begin", "end", *SIZES, "seed_low", "seed_high", "threshold"), "int32")
        | dict.fromkeys(("factor", "kept"), "float32"),
        lambda a: _Forward(shape, a).run(),
    )


class _Forward:
    """The program while it is being built."""

    def __init__(self, shape: Shape, arguments: SimpleNamespace) -> None:
        self.shape, self.tile, self.dim = shape, shape.tile, shape.dim
        self.a, self.lanes = arguments, shape.tile.lanes
        self.a.dim = shape.dim
        self.row_length = KEYS + 2 * shape.margin

    def run(self) -> None:
        tile, dim = self.tile, self.dim
        sizes = {
            "content": tile.block * dim,
            "place": tile.block * dim,
            "keys": (KEYS + tile.lanes) * dim,
            "values": KEYS * dim,
            "scores": tile.rows * self.row_length,
            "gathered": FORWARD_QUERIES * dim,
            "top": FORWARD_QUERIES,
            "total": FORWARD_QUERIES,
        }
        self.scratch = SimpleNamespace(
            **{
                name: T.alloc_buffer((size,), "float32", scope="global")
                for name, size in sizes.items()
            }
        )
        self.rescale = T.alloc_buffer((tile.rows * tile.lanes,), "float32", scope="global")
        if self.shape.dropout:
            self.seed = tvm_random.seed_key(self.a.seed_low, self.a.seed_high)
        with T.serial(self.a.begin, self.a.end) as task:
            self._run_task(*read_task(self.a.tasks, task))

    def _run_task(self, sequence: Sequence, origin: Expr, end: Expr) -> None:
        a, block = self.a, self.tile.block
        oldest = opaque(T.max(origin - a.window, 0))
        with T.serial(0, T.truncdiv(end - oldest + KEYS - 1, KEYS)) as number:
            first_key = opaque(oldest + number * KEYS)
            end_key = opaque(T.min(first_key + KEYS, end))
            packed = variable(T.int32(0), "int32")
            # The blocks that see a key of the run.
            begin = T.truncdiv(T.max(first_key - origin, 0), block)
            last = T.min(end, end_key + a.window) - origin
            with T.serial(begin, T.truncdiv(last + block - 1, block)) as query_block:
                query = opaque(origin + query_block * block)
                self._load_keys(sequence, first_key, end_key, packed, query)
                self._load_queries(sequence, query, end)
                with T.serial(0, block // self.tile.rows) as number_in_block:
                    row = opaque(number_in_block * self.tile.rows)
                    group_query = opaque(query + row)
                    seen = T.And(
                        T.And(group_query < end, group_query - a.window < end_key),
                        group_query + self.tile.rows > first_key,
                    )
                    with T.If(seen), T.Then():
                        group = self._group(sequence, group_query, row, first_key, end_key)
                        self._run_group(group, origin, end, oldest)

    def _load_keys(
        self, sequence: Sequence, first_key: Expr, end_key: Expr, packed: Buffer, query: Expr
    ) -> None:
        """Pack the keys up to those that the block at `query` sees; `packed` counts strips."""
        a, s, dim, tile, lanes = self.a, self.scratch, self.dim, self.tile, self.lanes
        count = opaque(end_key - first_key)
        seen = T.min(query + tile.block - first_key, count)
        begin = opaque(packed[0])
        # One strip more at the end of the run, since tiles are wider than a strip.
        last = T.Select(seen < count, T.int32(0), T.int32(1))
        stop = opaque(T.truncdiv(seen + lanes - 1, lanes) + last)

        def row_of(buffer: Buffer, row: Expr) -> tuple[Buffer, Expr]:
            return buffer, sequence.key_row(a, opaque(first_key + row))

        pack_strips(tile, dim, s.keys, (begin, stop), count, lambda row: row_of(a.k, row))
        rows = (opaque(begin * lanes), opaque(T.min(stop * lanes, count)))
        pack_rows(tile, dim, s.values, rows, lambda row: row_of(a.v, row))
        T.buffer_store(packed, stop, [0])

    def _load_queries(self, sequence: Sequence, query: Expr, end: Expr) -> None:
        """Load a block; rows past the end are zero."""
        s, shape, block = self.scratch, self.shape, self.tile.block
        with T.serial(0, block) as row:
            element = opaque(T.min(query + row, end - 1))
            load_query(
                shape, self.a, sequence, element, query + row < end, row, (s.content, s.place)
            )

    def _group(
        self, sequence: Sequence, query: Expr, row: Expr, first_key: Expr, end_key: Expr
    ) -> Group:
        left, right = Group.strips(self.a, self.tile, query, first_key, end_key)
        scores = opaque(self.shape.margin - (first_key + left * self.lanes))
        keys = (first_key, end_key, left, right)
        return Group(sequence, query, row, *keys, scores, self.row_length)

    def _run_group(self, group: Group, origin: Expr, end: Expr, oldest: Expr) -> None:
        a, s, rows, dim = self.a, self.scratch, self.tile.rows, self.dim
        key_row, query_row = group.sequence.key_row, group.sequence.query_row

        def later(i: int) -> Expr:
            return opaque(T.min(group.query + self.tile.block + i, end - 1))

        # What the next block will load is asked for in small lots between the products: a core has
        # too few miss buffers for more, and would wait.
        ask_for_rows(rows, dim, [a.k], lambda i: key_row(a, later(i)))
        if self.shape.relative:
            position_scores(self.shape, a, group, s.place, s.scores)
        ask_for_rows(rows, dim, [a.v], lambda i: key_row(a, later(i)))
        self._content_scores(group)
        ask_for_rows(rows, dim, [a.q], lambda i: query_row(a, later(i)))
        state = opaque(group.query - origin)
        alone = group.first_key <= T.max(group.query - a.window, oldest)
        fresh = opaque(T.Select(alone, T.int32(1), T.int32(0)))
        with T.serial(0, rows) as i:
            self._softmax_row(group, i, opaque(state + i), fresh)
        current = lambda i: query_row(a, opaque(T.min(group.query + i, end - 1)))  # noqa: E731
        ask_for_rows(rows, dim, [a.out], current, write=True)
        self._gather(group, state, fresh)
        done = T.min(group.query + rows, end) <= group.end_key
        with T.If(done), T.Then():
            self._finish(group, state, end)

    def _content_scores(self, group: Group) -> None:
        """Add (q + u) . k, or write it where there are no position scores."""
        s, lanes = self.scratch, self.lanes
        corner = opaque(group.scores + group.first_key)

        # Added last: a running sum that began with it would round more coarsely.
        def write(strip: Expr, i: int, v: int, value: Expr) -> None:
            place = corner + (strip + v) * lanes + i * self.row_length
            old = load(s.scores, place, lanes)
            store(s.scores, place, value + old if self.shape.relative else value, lanes)

        rows = (s.content, opaque(group.row * self.dim))
        product_tiles(self.shape, rows, (s.keys, T.int32(0)), (group.left, group.right), write)

    def _softmax_row(self, group: Group, i: Expr, state: Expr, fresh: Expr) -> None:
        """Turn a row of scores into weights relative to its new running maximum."""
        a, s, lanes = self.a, self.scratch, self.lanes
        key = opaque(group.first_key + group.left * lanes)
        at = opaque(group.scores + key + i * self.row_length)
        first_delta = opaque(group.query + i - key)
        vectors = opaque(group.right - group.left)
        if self.shape.dropout:
            row = dropout_row(a, group.sequence, self.seed, opaque(group.query + i))
            place = T.broadcast(row, lanes)
        top, total = (T.alloc_buffer((lanes,), "float32", scope="global") for _ in range(2))

        old = variable(T.float32(LOWEST))
        with T.If(T.EQ(fresh, 0)), T.Then():
            T.buffer_store(old, s.top[state], [0])
        store(top, 0, T.broadcast(old[0], lanes), lanes)
        with T.serial(0, vectors) as vector:
            score = load(s.scores, at + vector * lanes, lanes)
            delta = deltas(first_delta - vector * lanes, lanes)
            score = T.Select(visible(delta, a.window, lanes), score, splat(LOWEST, lanes))
            store(top, 0, T.max(load(top, 0, lanes), score), lanes)
        new = reduce(load(top, 0, lanes), T.max, lanes)
        store(total, 0, splat(0.0, lanes), lanes)
        with T.serial(0, vectors) as vector:
            column = opaque(at + vector * lanes)
            delta = deltas(first_delta - vector * lanes, lanes)
            weight = exp2(load(s.scores, column, lanes) - new, lanes)
            weight = T.bind(T.Select(visible(delta, a.window, lanes), weight, splat(0.0, lanes)))
            store(total, 0, load(total, 0, lanes) + weight, lanes)
            if self.shape.dropout:
                kept = tvm_random.keep(place, delta, T.broadcast(a.threshold, lanes), lanes)
                weight = T.Select(kept, weight, splat(0.0, lanes))
            store(s.scores, column, weight, lanes)
        added = first(reduce(load(total, 0, lanes), lambda x, y: x + y, lanes))
        T.buffer_store(s.top, first(new), [state])
        with T.If(T.EQ(fresh, 0)):
            with T.Then():
                rescale = exp2(T.broadcast(old[0], lanes) - new, lanes)
                store(self.rescale, i * lanes, rescale, lanes)
                T.buffer_store(s.total, s.total[state] * first(rescale) + added, [state])
            with T.Else():
                T.buffer_store(s.total, added, [state])

    def _gather(self, group: Group, state: Expr, fresh: Expr) -> None:
        """Add weights times values to what was gathered, which is rescaled first."""
        begin = opaque(T.max(group.query - self.a.window, group.first_key))
        end = opaque(T.min(group.query + self.tile.rows, group.end_key))
        for part in self.tile.split(self.dim):
            self._gather_part(group, opaque(state * self.dim), (begin, end), fresh, part)

    def _gather_part(
        self, group: Group, target: Expr, span: tuple[Expr, Expr], fresh: Expr, part: range
    ) -> None:
        s, dim, lanes = self.scratch, self.dim, self.lanes
        sums = registers(self.tile.rows, len(part), lanes)

        def at(i: int, v: int) -> Expr:
            return target + i * dim + part[v] * lanes

        def rescaled(i: int, v: int) -> Expr:
            return load(s.gathered, at(i, v), lanes) * load(self.rescale, i * lanes, lanes)

        def value(key: Expr, v: int) -> Expr:
            return load(s.values, (key - group.first_key) * dim + part[v] * lanes, lanes)

        with T.If(T.EQ(fresh, 0)):
            with T.Then():
                fill(sums, rescaled, lanes)
            with T.Else():
                fill(sums, lambda i, v: splat(0.0, lanes), lanes)
        accumulate(
            sums,
            *span,
            lambda i, key: s.scores[group.scores + key + i * self.row_length],
            value,
            lanes,
        )
        spill(sums, lambda i, v, x: store(s.gathered, at(i, v), x, lanes), lanes)

    def _finish(self, group: Group, state: Expr, end: Expr) -> None:
        """Divide by the sums of the weights; write the output and the log-sum-exp, in base 2."""
        a, s, dim, lanes = self.a, self.scratch, self.dim, self.lanes
        with T.serial(0, T.min(T.int32(self.tile.rows), end - group.query)) as i:
            query, row = opaque(group.query + i), opaque(state + i)
            at = group.sequence.query_row(a, query)
            total = variable(s.total[row])
            factor = T.bind(T.broadcast(a.kept / total[0], lanes))
            for d in range(0, dim, lanes):
                store(a.out, at + d, load(s.gathered, row * dim + d, lanes) * factor, lanes)
            lse = s.top[row] + T.log2(total[0])
            T.buffer_store(a.lse, lse, [group.sequence.lse_place(a, query)])
