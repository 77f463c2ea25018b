"""The backward program for CPUs.

What lies where. A task is a run of at most BACKWARD_KEYS keys of one sequence (see tvm_pack.py) and goes
once through the queries that see them, from `first_query` on. Its scratch stays in the core's
second-level cache:

    key_panels, value_panels   panels              K and V transposed, V times 1 / (1 - dropout)
    key_rows                   [key][dim]          K
    d_keys, d_values           [key][dim]          sums of the gradients so far
    content, place, d_out      [row][dim]          one block of queries and of output gradients
    lse, products              [row]               log-sum-exp, and d_out . out
    weights, d_scores          [row][margin | keys of the task | margin]

and lives on after the kernel, since neighbouring tasks add to the same rows:

    part_query      [query][dim]   the task's share of the gradient of q, before scaling
    part_relative   [row of r, reversed as in the panels][dim], then du [dim], then dp [dim]

Scores are computed again from q and k; weights follow from the saved log-sum-exp without a maximum;
`d_scores` = weights * (d_out . v - d_out . out) overwrites the position scores. Every product is a
register tile: d_values from columns of `weights`, d_keys from columns of `d_scores`, the gradient
of q from its rows (and, for r, from rows that begin one column later in each row), and that of r
from its diagonals. Diagonals run over the edges of the keys, so one vector in each margin is zero.
"""

from types import SimpleNamespace

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, PrimFunc

from kernels import tvm_random
from kernels.tasks import BACKWARD_KEYS
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
)

LN2 = 0.6931471805599453
FAR = 1e30  # the log-sum-exp of rows past the end: their weights vanish

SIZES = ("batch", "query_count", "key_count", "heads", "window", "panel_count", "task_count")


def backward(variant: Variant) -> PrimFunc:
    """Return the kernel that runs the tasks begin .. end - 1, of one head.

    It writes d_k and d_v, and d_q where a task has the whole sequence. The shares of the others
    stay in `part_query`; more than one task may follow another only if all have whole sequences.
    """
    dim = variant.dim
    queries = lambda a: a.batch * a.query_count * a.heads * dim  # noqa: E731
    keys = lambda a: a.batch * a.key_count * a.heads * dim  # noqa: E731
    relative = {
        "packed": lambda a: a.heads * a.panel_count * (dim * variant.tile.panel),
        "content_bias": lambda a: a.heads * dim,
        "position_bias": lambda a: a.heads * dim,
        "r": lambda a: a.heads * (a.window + 1) * dim,
        "part_relative": lambda a: (a.panel_count * variant.tile.panel + 2) * dim,
    }
    tensors = dict.fromkeys(("q", "out", "d_out", "d_q"), queries)
    tensors |= dict.fromkeys(("k", "v", "d_k", "d_v"), keys)
    tensors |= {
        "lse": lambda a: a.batch * a.query_count * a.heads,
        "tasks": lambda a: a.task_count * TASK_FIELDS,
        "part_query": lambda a: a.part_rows * dim,
    }
    return build_kernel(
        "backward",
        tensors | (relative if variant.relative else {}),
        dict.fromkeys(
            ("begin", "end", *SIZES, "part_rows", "seed_low", "seed_high", "threshold"), "int32"
        )
        | dict.fromkeys(("factor", "scale", "kept"), "float32"),
        lambda a: _Backward(variant, a).run(),
    )


class _Backward:
    """The program while it is being built."""

    def __init__(self, variant: Variant, arguments: SimpleNamespace) -> None:
        self.variant, self.tile, self.dim = variant, variant.tile, variant.dim
        self.lanes = variant.tile.lanes
        self.a = arguments
        self.row_length = BACKWARD_KEYS + 2 * variant.margin

    def run(self) -> None:
        a, dim, block = self.a, self.dim, self.tile.block
        sizes = dict.fromkeys(("key_panels", "value_panels", "key_rows"), BACKWARD_KEYS * dim)
        sizes |= dict.fromkeys(("d_keys", "d_values"), BACKWARD_KEYS * dim)
        sizes |= dict.fromkeys(("content", "place", "d_out"), block * dim)
        sizes |= dict.fromkeys(("lse", "products"), block)
        sizes |= dict.fromkeys(("weights", "d_scores"), block * self.row_length)
        self.scratch = SimpleNamespace(
            **{
                name: T.alloc_buffer((size,), "float32", scope="global")
                for name, size in sizes.items()
            }
        )
        if self.variant.dropout:
            self.seed = tvm_random.seed_key(a.seed_low, a.seed_high)
        if self.variant.relative:
            rows = opaque(a.panel_count * self.tile.panel + 2)
            self._clear(a.part_relative, rows * dim)
        with T.serial(a.begin, a.end) as task:
            self._run_task(*read_task(a.tasks, task))

    def _clear(self, buffer: Buffer, count: Expr) -> None:
        with T.serial(0, T.truncdiv(count, self.lanes)) as vector:
            store(buffer, vector * self.lanes, splat(0.0, self.lanes), self.lanes)

    def _run_task(self, sequence: Sequence, first_key: Expr, end_key: Expr) -> None:
        a, s, block = self.a, self.scratch, self.tile.block
        begin, end = query_range(a, sequence, first_key, end_key)
        blocks = opaque(T.truncdiv(T.max(end - begin, 0) + block - 1, block))
        count = opaque(end_key - first_key)
        self._clear(s.d_keys, BACKWARD_KEYS * self.dim)
        self._clear(s.d_values, BACKWARD_KEYS * self.dim)
        self._clear(a.part_query, blocks * (block * self.dim))
        with T.If(blocks > 0), T.Then():
            self._load_keys(sequence, first_key, count)
        with T.serial(0, blocks) as number:
            query = opaque(begin + number * block)
            base = opaque(first_key - self.variant.margin)
            self._run_block(
                Block(
                    sequence,
                    query,
                    opaque(T.min(query + block, end)),
                    T.int32(0),
                    first_key,
                    end_key,
                    base,
                    self.row_length,
                ),
                opaque(number * block),
            )
        self._write_keys(sequence, first_key, count)
        with T.If(whole(a, sequence, first_key, end_key)), T.Then():
            write_queries(self.variant, a, sequence, begin, end, begin)

    def _load_keys(self, sequence: Sequence, first_key: Expr, count: Expr) -> None:
        a, s, dim, tile = self.a, self.scratch, self.dim, self.tile

        def row_of(buffer: Buffer, row: Expr) -> tuple[Buffer, Expr]:
            position = sequence.position(first_key + row)
            return buffer, sequence.address(position, a.key_count, a.heads, dim)

        pack_panels(tile, dim, s.key_panels, count, lambda row: row_of(a.k, row))
        pack_panels(tile, dim, s.value_panels, count, lambda row: row_of(a.v, row), a.kept)
        pack_rows(tile, dim, s.key_rows, count, lambda row: row_of(a.k, row))

    def _run_block(self, block: Block, part_row: Expr) -> None:
        tile = self.tile
        self._load_block(block)
        if self.variant.relative:
            position_scores(self.variant, self.a, block, self.scratch.place, self.scratch.d_scores)
            self._clear_margins(block)
        self._differentiate_scores(block)
        self._add_keys(block)
        with T.serial(0, tile.block // tile.rows) as group:
            query = opaque(block.query + group * tile.rows)
            with T.If(query < block.end_query), T.Then():
                self._add_queries(block, group, query, part_row)
        if self.variant.relative:
            self._add_relative(block)

    def _load_block(self, block: Block) -> None:
        a, s, dim, lanes = self.a, self.scratch, self.dim, self.lanes
        with T.serial(0, self.tile.block) as row:
            element = opaque(T.min(block.query + row, block.end_query - 1))
            valid = T.bind(block.query + row < block.end_query)
            load_queries(self.variant, a, block.sequence, element, valid, row, (s.content, s.place))
            position = opaque(block.sequence.position(element) - (a.key_count - a.query_count))
            at = block.sequence.address(position, a.query_count, a.heads, dim)
            exists = T.bind(T.broadcast(T.Select(valid, T.float32(1), T.float32(0)), lanes))
            product = T.alloc_buffer((lanes,), "float32", scope="global")
            store(product, 0, splat(0.0, lanes), lanes)
            for d in range(0, dim, lanes):
                gradient = T.bind(load(a.d_out, at + d, lanes) * exists)
                store(s.d_out, row * dim + d, gradient, lanes)
                term = gradient * load(a.out, at + d, lanes)
                store(product, 0, load(product, 0, lanes) + term, lanes)
            total = first(reduce(load(product, 0, lanes), lambda x, y: x + y, lanes))
            T.buffer_store(s.products, total, [row])
            line = (block.sequence.batch * a.heads + block.sequence.head) * a.query_count
            lse = T.Select(valid, a.lse[opaque(line + position)], T.float32(FAR))
            T.buffer_store(s.lse, lse, [row])

    def _clear_margins(self, block: Block) -> None:
        """Zero the columns next to the keys, over which diagonals run."""
        panel, s = self.tile.panel, self.scratch
        count = block.end_key - block.first_key
        right = opaque(T.truncdiv(count + panel - 1, panel) * panel)
        with T.serial(0, self.tile.block) as row:
            at = opaque(block.column(row, block.first_key))
            for near in range(0, 8, self.lanes):
                zero = splat(0.0, self.lanes)
                store(s.d_scores, at - near - self.lanes, zero, self.lanes)
                store(s.d_scores, at + right + near, zero, self.lanes)

    def _differentiate_scores(self, block: Block) -> None:
        """Fill the panels that rows of the block see with weights and gradients of scores."""
        a, tile, first_key = self.a, self.tile, block.first_key
        oldest = T.max(block.query - a.window - first_key, 0)
        newest = T.min(block.end_query, block.end_key) - first_key
        with (
            T.serial(
                T.truncdiv(oldest, tile.panel), T.truncdiv(newest + tile.panel - 1, tile.panel)
            ) as panel,
            T.serial(0, tile.block // tile.rows) as group,
        ):
            key = opaque(first_key + panel * tile.panel)
            query = opaque(block.query + group * tile.rows)
            inside = T.And(key < query + tile.rows, key + tile.panel > query - a.window)
            with T.If(T.And(inside, query < block.end_query)), T.Then():
                row_at = opaque(group * tile.rows * self.dim)
                panel_at = opaque(panel * (self.dim * tile.panel))
                at = opaque(block.column(group * tile.rows, key))
                self._weights_tile(row_at, panel_at, at, opaque(query - key), group)
                self._gradients_tile(block, row_at, panel_at, at, opaque(query - key), group)

    def _weights_tile(
        self, row_at: Expr, panel_at: Expr, at: Expr, delta: Expr, group: Expr
    ) -> None:
        """Write the weights of a tile; `delta` is that of its first row and column."""
        a, s, lanes = self.a, self.scratch, self.lanes
        sums = product_tile(self.variant, s.content, row_at, s.key_panels, panel_at)

        def write(i: int, v: int, score: Expr) -> None:
            place = at + i * self.row_length + v * lanes
            if self.variant.relative:
                score = score + load(s.d_scores, place, lanes)
            lse = T.broadcast(s.lse[group * self.tile.rows + i], lanes)
            weight = exp2(score - lse, lanes)
            seen = visible(deltas(delta + i - v * lanes, lanes), a.window, lanes)
            store(s.weights, place, T.Select(seen, weight, splat(0.0, lanes)), lanes)

        spill(sums, write, lanes)

    def _gradients_tile(
        self, block: Block, row_at: Expr, panel_at: Expr, at: Expr, delta: Expr, group: Expr
    ) -> None:
        """Write the gradients of a tile's scores and let dropout thin its weights."""
        a, s, lanes = self.a, self.scratch, self.lanes
        sums = product_tile(self.variant, s.d_out, row_at, s.value_panels, panel_at)
        if self.variant.dropout:
            first_row = block.query + group * self.tile.rows
            keys = [
                T.broadcast(dropout_row(a, block.sequence, self.seed, first_row + i), lanes)
                for i in range(self.tile.rows)
            ]

        def write(i: int, v: int, gradient: Expr) -> None:
            place = at + i * self.row_length + v * lanes
            weight = T.bind(load(s.weights, place, lanes))
            if self.variant.dropout:
                distance = deltas(delta + i - v * lanes, lanes)
                threshold = T.broadcast(a.threshold, lanes)
                kept = tvm_random.keep(keys[i], distance, threshold, lanes)
                store(s.weights, place, T.Select(kept, weight, splat(0.0, lanes)), lanes)
                gradient = T.Select(kept, gradient, splat(0.0, lanes))
            product = T.broadcast(s.products[group * self.tile.rows + i], lanes)
            store(s.d_scores, place, weight * (gradient - product), lanes)

        spill(sums, write, lanes)

    def _add_keys(self, block: Block) -> None:
        """Add the block's share to the gradients of the keys and values that it sees."""
        a, s, tile, first_key = self.a, self.scratch, self.tile, block.first_key
        oldest = T.max(block.query - a.window - first_key, 0)
        newest = T.min(block.end_query, block.end_key) - first_key
        with T.serial(
            T.truncdiv(oldest, tile.keys), T.truncdiv(newest + tile.keys - 1, tile.keys)
        ) as group:
            key = opaque(first_key + group * tile.keys)
            begin = opaque(T.max(key - block.query, 0))
            last = T.min(key + tile.keys + a.window, block.end_query)
            end = opaque(last - block.query)
            column = opaque(block.column(0, key))
            for weights, rows, sums in (
                (s.weights, s.d_out, s.d_values),
                (s.d_scores, s.content, s.d_keys),
            ):
                self._add_outer(
                    sums,
                    opaque(group * tile.keys * self.dim),
                    begin,
                    end,
                    lambda i, row, w=weights: w[column + row * self.row_length + i],
                    rows,
                )

    def _add_outer(self, target, at, begin, end, left, rows) -> None:
        """Add to tile.keys rows of `target` the sum over rows of left(i, row) * rows[row]."""
        dim, lanes = self.dim, self.lanes
        for part in self.tile.split(dim):
            sums = registers(self.tile.keys, len(part), lanes)

            def place(i: int, v: int, part: range = part) -> Expr:
                return at + i * dim + part[v] * lanes

            fill(sums, lambda i, v, place=place: load(target, place(i, v), lanes), lanes)
            accumulate(
                sums,
                begin,
                end,
                left,
                lambda row, v, part=part: load(rows, row * dim + part[v] * lanes, lanes),
                lanes,
            )
            spill(sums, lambda i, v, x, place=place: store(target, place(i, v), x, lanes), lanes)

    def _add_queries(self, block: Block, group: Expr, query: Expr, part_row: Expr) -> None:
        """Add the products of a tile's rows with the keys, and with r, to the gradient of q."""
        a, s, tile, dim, lanes = self.a, self.scratch, self.tile, self.dim, self.lanes
        begin = opaque(T.max(query - a.window, block.first_key))
        end = opaque(T.min(query + tile.rows, block.end_key))
        row = opaque(block.column(group * tile.rows, 0))
        target = opaque((part_row + group * tile.rows) * dim)
        biases = opaque(a.panel_count * (tile.panel * dim))
        self._add_rows(
            target,
            begin,
            end,
            lambda i, key: s.d_scores[row + key + i * self.row_length],
            lambda key, d: load(s.key_rows, (key - block.first_key) * dim + d, lanes),
            biases,
        )
        if not self.variant.relative:
            return
        # Relative row m of query t belongs to key t - window + m.
        shift = opaque(query - a.window)
        begin = opaque(T.max(block.first_key - shift - (tile.rows - 1), 0))
        end = opaque(T.min(block.end_key - shift, a.window + 1))
        skewed = opaque(row + shift)
        newest = opaque((block.sequence.head * (a.window + 1) + a.window) * dim)
        self._add_rows(
            target,
            begin,
            end,
            lambda i, m: s.d_scores[skewed + m + i * (self.row_length + 1)],
            lambda m, d: load(a.r, newest - m * dim + d, lanes),
            opaque(biases + dim),
        )

    def _add_rows(self, target, begin, end, left, right, bias) -> None:
        """Add products to rows of part_query, and their sum over the rows to a bias's gradient."""
        a, tile, dim, lanes = self.a, self.tile, self.dim, self.lanes
        for part in tile.split(dim):
            sums = registers(tile.rows, len(part), lanes)
            fill(sums, lambda i, v: splat(0.0, lanes), lanes)
            accumulate(
                sums, begin, end, left, lambda k, v, part=part: right(k, part[v] * lanes), lanes
            )

            def add(i: int, v: int, value: Expr, part: range = part) -> None:
                at = opaque(target + i * dim + part[v] * lanes)
                store(a.part_query, at, load(a.part_query, at, lanes) + value, lanes)

            spill(sums, add, lanes)
            if self.variant.relative:
                for v, vector in enumerate(part):
                    at = opaque(bias + vector * lanes)
                    total = load(sums[0][v], 0, lanes)
                    for row in sums[1:]:
                        total = total + load(row[v], 0, lanes)
                    store(a.part_relative, at, load(a.part_relative, at, lanes) + total, lanes)

    def _add_relative(self, block: Block) -> None:
        """Add the products of the diagonals of d_scores with (q + p) to the gradient of r."""
        a, s, tile, dim = self.a, self.scratch, self.tile, self.dim
        # Relative row m of query t belongs to key t - window + m.
        oldest = T.max(block.first_key + a.window - (block.end_query - 1), 0)
        newest = T.min(block.end_key + a.window - block.query, a.window + 1)
        with T.serial(
            T.truncdiv(oldest, tile.keys), T.truncdiv(newest + tile.keys - 1, tile.keys)
        ) as group:
            m = opaque(group * tile.keys)
            shift = opaque(block.query - a.window + m)  # the key of row 0
            begin = opaque(T.max(block.first_key - shift - (tile.keys - 1), 0))
            end = opaque(T.min(block.end_key - shift, block.end_query - block.query))
            diagonal = opaque(block.column(0, shift))
            self._add_outer(
                a.part_relative,
                opaque(m * dim),
                begin,
                end,
                lambda i, row: s.d_scores[diagonal + row * (self.row_length + 1) + i],
                s.place,
            )

    def _write_keys(self, sequence: Sequence, first_key: Expr, count: Expr) -> None:
        a, s, dim, lanes = self.a, self.scratch, self.dim, self.lanes
        with T.serial(0, count) as row:
            position = sequence.position(first_key + row)
            at = sequence.address(position, a.key_count, a.heads, dim)
            for d in range(0, dim, lanes):
                d_key = load(s.d_keys, row * dim + d, lanes)
                d_value = load(s.d_values, row * dim + d, lanes)
                # (q + u) carries scale * log2(e); the scale belongs here, log2(e) does not.
                store(a.d_k, at + d, d_key * splat(LN2, lanes), lanes)
                store(a.d_v, at + d, d_value * T.broadcast(a.kept, lanes), lanes)


def query_range(
    a: SimpleNamespace, sequence: Sequence, first_key: Expr, end_key: Expr
) -> tuple[Expr, Expr]:
    """Return the first query that sees a key of the task and the element after the last one."""
    offset = T.max(a.key_count - a.query_count - sequence.residue, 0)
    first_query = T.truncdiv(offset + sequence.stride - 1, sequence.stride)
    begin = opaque(T.max(first_query, first_key))
    return begin, opaque(T.min(elements(a, sequence), end_key + a.window))


def elements(a: SimpleNamespace, sequence: Sequence) -> Expr:
    """Return how many elements a sequence has."""
    span = a.key_count - sequence.residue + sequence.stride - 1
    return opaque(T.truncdiv(span, sequence.stride))


def whole(a: SimpleNamespace, sequence: Sequence, first_key: Expr, end_key: Expr) -> Expr:
    """Return whether a task has all keys of its sequence."""
    return T.And(T.EQ(first_key, 0), T.EQ(end_key, elements(a, sequence)))


def write_queries(
    variant: Variant, a: SimpleNamespace, sequence: Sequence, begin: Expr, end: Expr, fresh: Expr
) -> None:
    """Bring a task's share to the gradient of q: add it before the query `fresh`, write it after.

    Row 0 of the share is that of the query `begin`.
    """
    dim, lanes = variant.dim, variant.tile.lanes
    with T.serial(begin, end) as query:
        position = sequence.position(query) - (a.key_count - a.query_count)
        at = sequence.address(position, a.query_count, a.heads, dim)
        row = opaque((query - begin) * dim)

        def share(d: int, row: Expr = row) -> Expr:
            return load(a.part_query, row + d, lanes) * T.broadcast(a.scale, lanes)

        with T.If(query < fresh):
            with T.Then():
                for d in range(0, dim, lanes):
                    store(a.d_q, at + d, load(a.d_q, at + d, lanes) + share(d), lanes)
            with T.Else():
                for d in range(0, dim, lanes):
                    store(a.d_q, at + d, share(d), lanes)


def finish(variant: Variant) -> PrimFunc:
    """Return the kernel that brings the shares of a run of tasks of one head to the gradients.

    Runs of one head must come in the order of the table of tasks, whatever threads they were
    computed on: sums then have the same bits every time. Rows of d_q that no earlier task has seen
    are written, others added to; d_r, d_content and d_position are added to and must begin as zero.
    """
    dim = variant.dim
    relative = {
        "part_relative": lambda a: (a.panel_count * variant.tile.panel + 2) * dim,
        "d_r": lambda a: a.heads * (a.window + 1) * dim,
        "d_content": lambda a: a.heads * dim,
        "d_position": lambda a: a.heads * dim,
    }

    def body(a: SimpleNamespace) -> None:
        sequence, first_key, end_key = read_task(a.tasks, a.begin)
        begin, end = query_range(a, sequence, first_key, end_key)
        with T.If(T.Not(whole(a, sequence, first_key, end_key))), T.Then():
            fresh = T.Select(first_key > 0, first_key + a.window, T.int32(0))
            write_queries(variant, a, sequence, begin, end, opaque(fresh))
        if variant.relative:
            _add_relative_gradients(variant, a, sequence.head)

    return build_kernel(
        "finish",
        {
            "tasks": lambda a: a.task_count * TASK_FIELDS,
            "part_query": lambda a: a.part_rows * dim,
            "d_q": lambda a: a.batch * a.query_count * a.heads * dim,
        }
        | (relative if variant.relative else {}),
        dict.fromkeys(("begin", *SIZES, "part_rows"), "int32") | {"scale": "float32"},
        body,
    )


def _add_relative_gradients(variant: Variant, a: SimpleNamespace, head: Expr) -> None:
    dim, lanes = variant.dim, variant.tile.lanes

    def add(target: Buffer, at: Expr, source: Expr, factor: Expr) -> None:
        for d in range(0, dim, lanes):
            share = load(a.part_relative, source + d, lanes) * T.broadcast(factor, lanes)
            store(target, at + d, load(target, at + d, lanes) + share, lanes)

    newest = opaque((head * (a.window + 1) + a.window) * dim)
    with T.serial(0, a.window + 1) as m:
        # (q + p) carries scale * log2(e); the scale belongs here, log2(e) does not.
        add(a.d_r, opaque(newest - m * dim), opaque(m * dim), T.float32(LN2))
    biases = opaque(a.panel_count * (variant.tile.panel * dim))
    add(a.d_content, opaque(head * dim), biases, a.scale)
    add(a.d_position, opaque(head * dim), opaque(biases + dim), a.scale)
