"""The forward program for CPUs.

What lies where. A task is a run of at most FORWARD_QUERIES queries of one sequence (see tvm_pack.py). Its
scratch stays in the core's second-level cache:

    content, place      [query][dim]   (q + u) and (q + p), times scale * log2(e)
    gathered            [query][dim]   sums of weights times values so far
    top, total          [query]        running maximum and sum of the weights, in base 2
    panels              panels         K transposed, one block of at most KEYS keys
    values              [key][dim]     V of the same block
    scores              [query of a block][left margin | keys seen by the block | right margin]

For each block of keys and each block of `tile.block` queries: position scores go into `scores`
first, content scores are added tile by tile, a softmax with running maximum turns the rows into
weights, and tiles of weights times values are added to `gathered`. Nothing of size
queries x window exists.

Columns outside a row's window may hold anything, also NaN, until the softmax selects zero there.
"""

from types import SimpleNamespace

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, PrimFunc

from kernels import tvm_random
from kernels.tasks import FORWARD_QUERIES
from kernels.tvm_pack import TASK_FIELDS, Sequence, pack_panels, pack_rows, read_task
from kernels.tvm_program import build_kernel
from kernels.tvm_scores import (
    Block,
    Variant,
    deltas,
    dropout_row,
    load_queries,
    position_scores,
    product_tile,
    sees,
    visible,
)
from kernels.tvm_tiles import (
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

KEYS = 640  # keys of a block
LOWEST = -1e30  # a running maximum before any key


def forward(variant: Variant) -> PrimFunc:
    """Return the kernel that runs the tasks begin .. end - 1."""
    dim = variant.dim
    queries = {"q": lambda a: a.batch * a.query_count * a.heads * dim}
    keys = dict.fromkeys(("k", "v"), lambda a: a.batch * a.key_count * a.heads * dim)
    relative = {
        "packed": lambda a: a.heads * a.panel_count * (dim * variant.tile.panel),
        "content_bias": lambda a: a.heads * dim,
        "position_bias": lambda a: a.heads * dim,
    }
    results = {"out": queries["q"], "lse": lambda a: a.batch * a.query_count * a.heads}
    tasks = {"tasks": lambda a: a.task_count * TASK_FIELDS}
    sizes = ("batch", "query_count", "key_count", "heads", "window", "panel_count", "task_count")
    return build_kernel(
        "forward",
        queries | keys | (relative if variant.relative else {}) | results | tasks,
        dict.fromkeys(("begin", "end", *sizes, "seed_low", "seed_high", "threshold"), "int32")
        | dict.fromkeys(("factor", "kept"), "float32"),
        lambda a: _Forward(variant, a).run(),
    )


class _Forward:
    """The program while it is being built."""

    def __init__(self, variant: Variant, arguments: SimpleNamespace) -> None:
        self.variant, self.tile, self.dim = variant, variant.tile, variant.dim
        self.a = arguments
        self.row_length = KEYS + 2 * variant.margin

    def run(self) -> None:
        rows = -(-FORWARD_QUERIES // self.tile.block) * self.tile.block
        sizes = {
            "content": rows * self.dim,
            "place": rows * self.dim if self.variant.relative else 1,
            "gathered": rows * self.dim,
            "top": rows,
            "total": rows,
            "panels": KEYS * self.dim,
            "values": KEYS * self.dim,
            "scores": self.tile.block * self.row_length,
        }
        self.scratch = SimpleNamespace(
            **{
                name: T.alloc_buffer((size,), "float32", scope="global")
                for name, size in sizes.items()
            }
        )
        self.rescale = T.alloc_buffer((self.tile.rows * self.tile.lanes,), "float32")
        if self.variant.dropout:
            self.seed = tvm_random.seed_key(self.a.seed_low, self.a.seed_high)
        with T.serial(self.a.begin, self.a.end) as task:
            self._run_task(*read_task(self.a.tasks, task))

    def _run_task(self, sequence: Sequence, origin: Expr, end: Expr) -> None:
        a, block = self.a, self.tile.block
        blocks = opaque(T.truncdiv(end - origin + block - 1, block))
        self._begin(sequence, origin, end, blocks)
        oldest = opaque(T.max(origin - a.window, 0))
        with T.serial(0, T.truncdiv(end - oldest + KEYS - 1, KEYS)) as key_block:
            first_key = opaque(oldest + key_block * KEYS)
            end_key = opaque(T.min(first_key + KEYS, end))
            self._load_keys(sequence, first_key, end_key)
            with T.serial(0, blocks) as query_block:
                query = opaque(origin + query_block * block)
                seen = T.And(query - a.window < end_key, query + block > first_key)
                with T.If(seen), T.Then():
                    skipped = T.truncdiv(T.max(query - a.window - first_key, 0), self.tile.panel)
                    base = opaque(first_key + skipped * self.tile.panel - self.variant.margin)
                    row = opaque(query_block * block)
                    self._run_block(
                        Block(sequence, query, end, row, first_key, end_key, base, self.row_length)
                    )
        self._finish(sequence, origin, end)

    def _begin(self, sequence: Sequence, origin: Expr, end: Expr, blocks: Expr) -> None:
        """Load the queries and set the running state; rows past the end are zero."""
        s, lanes = self.scratch, self.tile.lanes
        with T.serial(0, blocks * self.tile.block) as row:
            T.buffer_store(s.top, T.float32(LOWEST), [row])
            T.buffer_store(s.total, T.float32(0), [row])
            for d in range(0, self.dim, lanes):
                store(s.gathered, row * self.dim + d, splat(0.0, lanes), lanes)
            element = opaque(T.min(origin + row, end - 1))
            load_queries(
                self.variant,
                self.a,
                sequence,
                element,
                origin + row < end,
                row,
                (s.content, s.place),
            )

    def _load_keys(self, sequence: Sequence, first_key: Expr, end_key: Expr) -> None:
        a, dim, tile = self.a, self.dim, self.tile

        def row_of(buffer: Buffer, row: Expr) -> tuple[Buffer, Expr]:
            position = sequence.position(first_key + row)
            return buffer, sequence.address(position, a.key_count, a.heads, dim)

        count = opaque(end_key - first_key)
        pack_panels(tile, dim, self.scratch.panels, count, lambda row: row_of(a.k, row))
        pack_rows(tile, dim, self.scratch.values, count, lambda row: row_of(a.v, row))

    def _run_block(self, block: Block) -> None:
        s, tile = self.scratch, self.tile
        if self.variant.relative:
            position_scores(self.variant, self.a, block, s.place, s.scores)
        self._content_scores(block)
        with T.serial(0, tile.block // tile.rows) as group:
            query = opaque(block.query + group * tile.rows)
            with T.If(sees(block, self.a, tile, query)), T.Then():
                self._softmax(block, group, query)
                self._gather(block, group, query)

    def _content_scores(self, block: Block) -> None:
        """Add (q + u) . k, or write it where there are no position scores."""
        a, s, tile, lanes = self.a, self.scratch, self.tile, self.tile.lanes
        begin = opaque(T.truncdiv(block.base + self.variant.margin - block.first_key, tile.panel))
        last = T.min(block.end_key, block.query + tile.block) - block.first_key
        with (
            T.serial(begin, T.truncdiv(last + tile.panel - 1, tile.panel)) as panel,
            T.serial(0, tile.block // tile.rows) as group,
        ):
            key = opaque(block.first_key + panel * tile.panel)
            query = opaque(block.query + group * tile.rows)
            inside = T.And(key < query + tile.rows, key + tile.panel > query - a.window)
            with T.If(T.And(inside, query < block.end_query)), T.Then():
                row_at = opaque((block.first_row + group * tile.rows) * self.dim)
                panel_at = opaque(panel * (self.dim * tile.panel))
                sums = product_tile(self.variant, s.content, row_at, s.panels, panel_at)
                at = opaque(block.column(group * tile.rows, key))

                # Added last: a running sum that began with it would round more coarsely.
                def write(i: int, v: int, value: Expr, at: Expr = at) -> None:
                    place = at + i * block.row_length + v * lanes
                    old = load(s.scores, place, lanes)
                    store(s.scores, place, value + old if self.variant.relative else value, lanes)

                spill(sums, write, lanes)

    def _softmax(self, block: Block, group: Expr, query: Expr) -> None:
        """Turn a tile's rows of scores into weights relative to their new running maximum."""
        tile, first_key = self.tile, block.first_key
        oldest = T.max(query - self.a.window, first_key) - first_key
        newest = T.min(query + tile.rows, block.end_key) - first_key
        left = opaque(T.truncdiv(oldest, tile.panel) * tile.panel)
        right = T.truncdiv(newest + tile.panel - 1, tile.panel) * tile.panel
        vectors = opaque(T.truncdiv(right - left, tile.lanes))
        with T.serial(0, tile.rows) as i:
            row = opaque(group * tile.rows + i)
            self._softmax_row(block, row, i, opaque(first_key + left), vectors)

    def _softmax_row(self, block: Block, row: Expr, i: Expr, key: Expr, vectors: Expr) -> None:
        """Do so for one row, whose first visited column is that of `key`."""
        a, s, lanes = self.a, self.scratch, self.tile.lanes
        state = opaque(block.first_row + row)
        at = opaque(block.column(row, key))
        query = opaque(block.query + row)
        first_delta = opaque(query - key)
        if self.variant.dropout:
            place = T.broadcast(dropout_row(a, block.sequence, self.seed, query), lanes)
        top, total = (T.alloc_buffer((lanes,), "float32", scope="global") for _ in range(2))

        old = T.bind(variable(s.top[state])[0])
        store(top, 0, T.broadcast(old, lanes), lanes)
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
            if self.variant.dropout:
                kept = tvm_random.keep(place, delta, T.broadcast(a.threshold, lanes), lanes)
                weight = T.Select(kept, weight, splat(0.0, lanes))
            store(s.scores, column, weight, lanes)
        rescale = exp2(T.broadcast(old, lanes) - new, lanes)
        store(self.rescale, i * lanes, rescale, lanes)
        added = first(reduce(load(total, 0, lanes), lambda x, y: x + y, lanes))
        T.buffer_store(s.total, s.total[state] * first(rescale) + added, [state])
        T.buffer_store(s.top, first(new), [state])

    def _gather(self, block: Block, group: Expr, query: Expr) -> None:
        """Rescale what was gathered by the rows of a tile and add weights times values."""
        s, tile, dim, lanes = self.scratch, self.tile, self.dim, self.tile.lanes
        begin = opaque(T.max(query - self.a.window, block.first_key))
        end = opaque(T.min(query + tile.rows, block.end_key))
        weights = opaque(block.column(group * tile.rows, 0))
        state = opaque((block.first_row + group * tile.rows) * dim)
        for part in tile.split(dim):
            sums = registers(tile.rows, len(part), lanes)

            def at(i: int, v: int, part: range = part) -> Expr:
                return state + i * dim + part[v] * lanes

            def scaled(i: int, v: int, at=at) -> Expr:
                return load(s.gathered, at(i, v), lanes) * load(self.rescale, i * lanes, lanes)

            def value(key: Expr, v: int, part: range = part) -> Expr:
                return load(s.values, (key - block.first_key) * dim + part[v] * lanes, lanes)

            fill(sums, scaled, lanes)
            accumulate(
                sums,
                begin,
                end,
                lambda i, key: s.scores[weights + key + i * self.row_length],
                value,
                lanes,
            )
            spill(sums, lambda i, v, x, at=at: store(s.gathered, at(i, v), x, lanes), lanes)

    def _finish(self, sequence: Sequence, origin: Expr, end: Expr) -> None:
        """Divide by the sums of the weights and write the output and its log-sum-exp, in base 2."""
        a, s, dim, lanes = self.a, self.scratch, self.dim, self.tile.lanes
        with T.serial(0, end - origin) as row:
            position = opaque(sequence.position(origin + row) - (a.key_count - a.query_count))
            at = sequence.address(position, a.query_count, a.heads, dim)
            factor = T.bind(T.broadcast(a.kept / s.total[row], lanes))
            for d in range(0, dim, lanes):
                store(a.out, at + d, load(s.gathered, row * dim + d, lanes) * factor, lanes)
            line = opaque((sequence.batch * a.heads + sequence.head) * a.query_count + position)
            T.buffer_store(a.lse, s.top[row] + T.log2(s.total[row]), [line])
