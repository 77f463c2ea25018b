"""The backward program for CPUs.

What lies where. A task is a run of at most BACKWARD_KEYS keys of one sequence (see tvm_pack.py) and
goes once through the queries that see them, block by block. Its scratch stays in the core's
second-level cache:

    keys, values                   strips        K and V transposed, V times 1 / (1 - dropout)
    key_rows                       [key][dim]    K
    d_keys, d_values               [key][dim]    sums of the gradients so far
    content, place, d_out          [row][dim]    one block of queries and of output gradients
    lse, products                  [row]         log-sum-exp, and d_out . out
    weights, d_scores              [row][margin | keys of the task | margin]

and lives on after the kernel, since neighbouring tasks add to the same rows:

    part_query      [query][dim]   the task's share of the gradient of q, before scaling
    part_relative   [row of r, reversed as in the strips][dim], then du [dim], then dp [dim]

Scores are computed again from q and k; weights follow from the saved log-sum-exp without a maximum;
`d_scores` = weights * (d_out . v - d_out . out) overwrites the position scores. Every product is a
register tile: d_values from columns of `weights`, d_keys from columns of `d_scores`, the gradient
of q from its rows (and, for r, from rows that begin one column later in each row), and that of r
from its diagonals. Diagonals run over the edges of the keys, so a vector in each margin is zero.
"""

from collections.abc import Callable
from types import SimpleNamespace

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, PrimFunc

from kernels import tvm_random
from kernels.tasks import BACKWARD_KEYS
from kernels.tvm_pack import TASK_FIELDS, Sequence, pack_rows, pack_strips, read_task
from kernels.tvm_program import build_kernel
from kernels.tvm_scores import (
    Group,
    Shape,
    ask_for_query,
    deltas,
    dropout_row,
    load_query,
    position_scores,
    product_tiles,
    visible,
)
from kernels.tvm_tiles import (
    accumulate,
    exp2,
    fill,
    first,
    load,
    opaque,
    prefetch,
    reduce,
    registers,
    spill,
    splat,
    store,
)

LN2 = 0.6931471805599453
FAR = 1e30  # the log-sum-exp of rows past the end: their weights vanish

SIZES = ("batch", "query_count", "key_count", "heads", "window", "strip_count", "task_count")


def backward(shape: Shape) -> PrimFunc:
    """Return the kernel that runs the tasks begin .. end - 1, of one head.

    It writes d_k and d_v, and d_q where a task has the whole sequence. The shares of the others
    stay in `part_query`; more than one task may follow another only if all have whole sequences.
    """
    dim = shape.dim
    tensors = dict.fromkeys(
        ("q", "out", "d_out", "d_q"), lambda a: a.batch * a.query_count * a.heads * dim
    )
    tensors |= dict.fromkeys(
        ("k", "v", "d_k", "d_v"), lambda a: a.batch * a.key_count * a.heads * dim
    )
    tensors |= {
        "lse": lambda a: a.batch * a.query_count * a.heads,
        "tasks": lambda a: a.task_count * TASK_FIELDS,
        "part_query": lambda a: a.part_rows * dim,
    }
    relative = {
        "packed": lambda a: a.heads * a.strip_count * (dim * shape.tile.lanes),
        "content_bias": lambda a: a.heads * dim,
        "position_bias": lambda a: a.heads * dim,
        "r": lambda a: a.heads * (a.window + 1) * dim,
        "part_relative": lambda a: (a.strip_count * shape.tile.lanes + 2) * dim,
    }
    return build_kernel(
        "backward",
        tensors | (relative if shape.relative else {}),
        dict.fromkeys(
            ("begin", "end", *SIZES, "part_rows", "seed_low", "seed_high", "threshold"), "int32"
        )
        | dict.fromkeys(("factor", "scale", "kept"), "float32"),
        lambda a: _Backward(shape, a).run(),
    )


class _Backward:
    """The program while it is being built."""

    def __init__(self, shape: Shape, arguments: SimpleNamespace) -> None:
        self.shape, self.tile, self.dim = shape, shape.tile, shape.dim
        self.lanes = shape.tile.lanes
        self.a = arguments
        self.a.dim = shape.dim
        self.row_length = BACKWARD_KEYS + 2 * shape.margin

    def run(self) -> None:
        a, dim, block, lanes = self.a, self.dim, self.tile.block, self.lanes
        sizes = dict.fromkeys(("keys", "values"), (BACKWARD_KEYS + lanes) * dim)
        sizes |= dict.fromkeys(("key_rows", "d_keys", "d_values"), BACKWARD_KEYS * dim)
        sizes |= dict.fromkeys(("content", "place", "d_out"), block * dim)
        sizes |= dict.fromkeys(("lse", "products"), block)
        sizes |= dict.fromkeys(("weights", "d_scores"), block * self.row_length)
        self.scratch = SimpleNamespace(
            **{
                name: T.alloc_buffer((size,), "float32", scope="global")
                for name, size in sizes.items()
            }
        )
        if self.shape.dropout:
            self.seed = tvm_random.seed_key(a.seed_low, a.seed_high)
        if self.shape.relative:
            self._clear(a.part_relative, opaque((a.strip_count * lanes + 2) * dim))
        with T.serial(a.begin, a.end) as task:
            self._run_task(*read_task(a.tasks, task))

    def _clear(self, buffer: Buffer, count: Expr | int) -> None:
        with T.serial(0, T.truncdiv(count, self.lanes)) as vector:
            store(buffer, vector * self.lanes, splat(0.0, self.lanes), self.lanes)

    def _run_task(self, sequence: Sequence, first_key: Expr, end_key: Expr) -> None:
        a, s, block = self.a, self.scratch, self.tile.block
        begin, end = query_range(a, sequence, first_key, end_key)
        blocks = opaque(T.truncdiv(T.max(end - begin, 0) + block - 1, block))
        count = opaque(end_key - first_key)
        self._clear(s.d_keys, T.int32(BACKWARD_KEYS * self.dim))
        self._clear(s.d_values, T.int32(BACKWARD_KEYS * self.dim))
        self._clear(a.part_query, blocks * (block * self.dim))
        with T.If(blocks > 0), T.Then():
            self._load_keys(sequence, first_key, count)
        with T.serial(0, blocks) as number:
            query = opaque(begin + number * block)
            end_query = opaque(T.min(query + block, end))
            keys = (first_key, end_key)
            self._load_block(sequence, query, end_query, end)
            with T.serial(
                0, T.truncdiv(end_query - query + self.tile.rows - 1, self.tile.rows)
            ) as i:
                self._differentiate_scores(self._group(sequence, query, i, *keys))
            self._add_keys(query, end_query, *keys)
            with T.serial(
                0, T.truncdiv(end_query - query + self.tile.rows - 1, self.tile.rows)
            ) as i:
                part = opaque(number * block + i * self.tile.rows)
                self._add_queries(self._group(sequence, query, i, *keys), part)
            if self.shape.relative:
                self._add_relative(query, end_query, *keys)
        self._write_keys(sequence, first_key, count)
        with T.If(whole(a, sequence, first_key, end_key)), T.Then():
            write_queries(self.shape, a, sequence, begin, end, begin)

    def _group(
        self, sequence: Sequence, query: Expr, number: Expr, first_key: Expr, end_key: Expr
    ) -> Group:
        row = opaque(number * self.tile.rows)
        group_query = opaque(query + row)
        left, right = Group.strips(self.a, self.tile, group_query, first_key, end_key)
        scores = opaque(row * self.row_length + self.shape.margin - first_key)
        keys = (first_key, end_key, left, right)
        return Group(sequence, group_query, row, *keys, scores, self.row_length)

    def _load_keys(self, sequence: Sequence, first_key: Expr, count: Expr) -> None:
        a, s, dim, tile = self.a, self.scratch, self.dim, self.tile

        def row_of(buffer: Buffer, row: Expr) -> tuple[Buffer, Expr]:
            return buffer, sequence.key_row(a, opaque(first_key + row))

        # One strip more, since tiles are wider than a strip.
        strips = (T.int32(0), opaque(T.truncdiv(count + tile.lanes - 1, tile.lanes) + 1))
        ahead = tile.lanes
        key = lambda row: row_of(a.k, row)  # noqa: E731
        pack_strips(tile, dim, s.keys, strips, count, key, ahead=ahead)
        pack_rows(tile, dim, s.key_rows, (T.int32(0), count), count, key)
        pack_strips(
            tile,
            dim,
            s.values,
            strips,
            count,
            lambda row: row_of(a.v, row),
            factor=a.kept,
            ahead=ahead,
        )

    def _load_block(self, sequence: Sequence, query: Expr, end_query: Expr, end: Expr) -> None:
        a, s, dim, lanes, block = self.a, self.scratch, self.dim, self.lanes, self.tile.block
        with T.serial(0, block) as row:
            element = opaque(T.min(query + row, end_query - 1))
            valid = T.bind(query + row < end_query)
            load_query(self.shape, a, sequence, element, valid, row, (s.content, s.place))
            later = opaque(T.min(query + row + block, end - 1))
            ask_for_query(a, sequence, later, dim, [a.q, a.out, a.d_out], [])
            at = sequence.query_row(a, element)
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
            lse = T.Select(valid, a.lse[sequence.lse_place(a, element)], T.float32(FAR))
            T.buffer_store(s.lse, lse, [row])

    def _differentiate_scores(self, group: Group) -> None:
        """Fill the strips that the group sees with weights and gradients of scores."""
        if self.shape.relative:
            position_scores(self.shape, self.a, group, self.scratch.place, self.scratch.d_scores)
        self._write_weights(group)
        self._write_gradients(group)
        if self.shape.relative:
            self._clear_margins(group)

    def _write_weights(self, group: Group) -> None:
        a, s, lanes = self.a, self.scratch, self.lanes
        corner = opaque(group.scores + group.first_key)
        delta = opaque(group.query - group.first_key)

        def write(strip: Expr, i: int, v: int, score: Expr) -> None:
            place = corner + (strip + v) * lanes + i * self.row_length
            if self.shape.relative:
                score = score + load(s.d_scores, place, lanes)
            weight = exp2(score - T.broadcast(s.lse[group.row + i], lanes), lanes)
            seen = visible(deltas(delta + i - (strip + v) * lanes, lanes), a.window, lanes)
            store(s.weights, place, T.Select(seen, weight, splat(0.0, lanes)), lanes)

        rows = (s.content, opaque(group.row * self.dim))
        product_tiles(self.shape, rows, (s.keys, T.int32(0)), (group.left, group.right), write)

    def _write_gradients(self, group: Group) -> None:
        """Write the gradients of scores and let dropout thin the weights."""
        a, s, lanes = self.a, self.scratch, self.lanes
        corner = opaque(group.scores + group.first_key)
        delta = opaque(group.query - group.first_key)
        if self.shape.dropout:
            keys = [
                T.broadcast(
                    dropout_row(a, group.sequence, self.seed, opaque(group.query + i)), lanes
                )
                for i in range(self.tile.rows)
            ]

        def write(strip: Expr, i: int, v: int, gradient: Expr) -> None:
            place = corner + (strip + v) * lanes + i * self.row_length
            weight = T.bind(load(s.weights, place, lanes))
            if self.shape.dropout:
                distance = deltas(delta + i - (strip + v) * lanes, lanes)
                threshold = T.broadcast(a.threshold, lanes)
                kept = tvm_random.keep(keys[i], distance, threshold, lanes)
                store(s.weights, place, T.Select(kept, weight, splat(0.0, lanes)), lanes)
                gradient = T.Select(kept, gradient, splat(0.0, lanes))
            product = T.broadcast(s.products[group.row + i], lanes)
            store(s.d_scores, place, weight * (gradient - product), lanes)

        rows = (s.d_out, opaque(group.row * self.dim))
        product_tiles(self.shape, rows, (s.values, T.int32(0)), (group.left, group.right), write)

    def _clear_margins(self, group: Group) -> None:
        """Zero the columns next to the keys, over which diagonals run."""
        s, lanes = self.scratch, self.lanes
        count = group.end_key - group.first_key
        right = opaque(T.truncdiv(count + lanes - 1, lanes) * lanes)
        for i in range(self.tile.rows):
            at = opaque(group.scores + group.first_key + i * self.row_length)
            for near in range(0, 8, lanes):
                store(s.d_scores, at - near - lanes, splat(0.0, lanes), lanes)
                store(s.d_scores, at + right + near, splat(0.0, lanes), lanes)

    def _add_keys(self, query: Expr, end_query: Expr, first_key: Expr, end_key: Expr) -> None:
        """Add the block's share to the gradients of the keys and values that it sees."""
        a, s, keys = self.a, self.scratch, self.tile.keys
        oldest = T.max(query - a.window - first_key, 0)
        newest = T.min(end_query, end_key) - first_key
        with T.serial(T.truncdiv(oldest, keys), T.truncdiv(newest + keys - 1, keys)) as number:
            key = opaque(first_key + number * keys)
            begin = opaque(T.max(key - query, 0))
            end = opaque(T.min(key + keys + a.window, end_query) - query)
            column = opaque(number * keys + self.shape.margin)
            for weights, rows, sums in (
                (s.weights, s.d_out, s.d_values),
                (s.d_scores, s.content, s.d_keys),
            ):
                self._add_outer(
                    sums,
                    opaque(number * keys * self.dim),
                    (begin, end),
                    lambda i, row, w=weights: w[column + row * self.row_length + i],
                    rows,
                )

    def _add_outer(
        self,
        target: Buffer,
        at: Expr,
        span: tuple[Expr, Expr],
        left: Callable[[int, Expr], Expr],
        rows: Buffer,
    ) -> None:
        """Add to tile.keys rows of `target` the sum over rows of left(i, row) * rows[row]."""
        dim, lanes = self.dim, self.lanes
        for part in self.tile.split(dim):
            sums = registers(self.tile.keys, len(part), lanes)

            def place(i: int, v: int, part: range = part) -> Expr:
                return at + i * dim + part[v] * lanes

            def old(i: int, v: int, place: Callable[[int, int], Expr] = place) -> Expr:
                return load(target, place(i, v), lanes)

            def vector(row: Expr, v: int, part: range = part) -> Expr:
                return load(rows, row * dim + part[v] * lanes, lanes)

            fill(sums, old, lanes)
            accumulate(sums, *span, left, vector, lanes)
            spill(sums, lambda i, v, x, place=place: store(target, place(i, v), x, lanes), lanes)

    def _add_queries(self, group: Group, part_row: Expr) -> None:
        """Add the products of a group's rows with the keys, and with r, to the gradient of q."""
        a, s, tile, dim, lanes = self.a, self.scratch, self.tile, self.dim, self.lanes
        target = opaque(part_row * dim)
        biases = opaque(a.strip_count * (lanes * dim))
        self._add_rows(
            target,
            (
                opaque(T.max(group.query - a.window, group.first_key)),
                opaque(T.min(group.query + tile.rows, group.end_key)),
            ),
            lambda i, key: s.d_scores[group.scores + key + i * self.row_length],
            lambda key, d: load(s.key_rows, (key - group.first_key) * dim + d, lanes),
            biases,
        )
        if not self.shape.relative:
            return
        # Relative row m of query t belongs to key t - window + m.
        shift = opaque(group.query - a.window)
        skewed = opaque(group.scores + shift)
        newest = opaque((group.sequence.head * (a.window + 1) + a.window) * dim)
        self._add_rows(
            target,
            (
                opaque(T.max(group.first_key - shift - (tile.rows - 1), 0)),
                opaque(T.min(group.end_key - shift, a.window + 1)),
            ),
            lambda i, m: s.d_scores[skewed + m + i * (self.row_length + 1)],
            lambda m, d: load(a.r, newest - m * dim + d, lanes),
            opaque(biases + dim),
        )

    def _add_rows(
        self,
        target: Expr,
        span: tuple[Expr, Expr],
        left: Callable[[int, Expr], Expr],
        right: Callable[[Expr, int], Expr],
        bias: Expr,
    ) -> None:
        """Add products to rows of part_query, and their sum over the rows to a bias's gradient."""
        a, tile, dim, lanes = self.a, self.tile, self.dim, self.lanes
        for part in tile.split(dim):
            sums = registers(tile.rows, len(part), lanes)
            fill(sums, lambda i, v: splat(0.0, lanes), lanes)
            accumulate(sums, *span, left, lambda k, v, part=part: right(k, part[v] * lanes), lanes)

            def add(i: int, v: int, value: Expr, part: range = part) -> None:
                at = opaque(target + i * dim + part[v] * lanes)
                store(a.part_query, at, load(a.part_query, at, lanes) + value, lanes)

            spill(sums, add, lanes)
            if self.shape.relative:
                for v, vector in enumerate(part):
                    at = opaque(bias + vector * lanes)
                    total = load(sums[0][v], 0, lanes)
                    for row in sums[1:]:
                        total = total + load(row[v], 0, lanes)
                    store(a.part_relative, at, load(a.part_relative, at, lanes) + total, lanes)

    def _add_relative(self, query: Expr, end_query: Expr, first_key: Expr, end_key: Expr) -> None:
        """Add the products of the diagonals of d_scores with (q + p) to the gradient of r."""
        a, s, keys, dim = self.a, self.scratch, self.tile.keys, self.dim
        # Relative row m of query t belongs to key t - window + m.
        oldest = T.max(first_key + a.window - (end_query - 1), 0)
        newest = T.min(end_key + a.window - query, a.window + 1)
        with T.serial(T.truncdiv(oldest, keys), T.truncdiv(newest + keys - 1, keys)) as number:
            m = opaque(number * keys)
            shift = opaque(query - a.window + m)  # the key of row 0
            begin = opaque(T.max(first_key - shift - (keys - 1), 0))
            end = opaque(T.min(end_key - shift, end_query - query))
            diagonal = opaque(self.shape.margin + shift - first_key)
            self._add_outer(
                a.part_relative,
                opaque(m * dim),
                (begin, end),
                lambda i, row: s.d_scores[diagonal + row * (self.row_length + 1) + i],
                s.place,
            )

    def _write_keys(self, sequence: Sequence, first_key: Expr, count: Expr) -> None:
        a, s, dim, lanes = self.a, self.scratch, self.dim, self.lanes
        with T.serial(0, count) as row:
            at = sequence.key_row(a, opaque(first_key + row))
            later = sequence.key_row(a, opaque(first_key + T.min(row + 8, count - 1)))
            prefetch(a.d_k, later, dim, write=True)
            prefetch(a.d_v, later, dim, write=True)
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
    shape: Shape, a: SimpleNamespace, sequence: Sequence, begin: Expr, end: Expr, fresh: Expr
) -> None:
    """Bring a task's share to the gradient of q: add it before the query `fresh`, write it after.

    Row 0 of the share is that of the query `begin`.
    """
    dim, lanes = shape.dim, shape.tile.lanes
    with T.serial(begin, end) as query:
        at = sequence.query_row(a, query)
        ask_for_query(a, sequence, opaque(T.min(query + 8, end - 1)), dim, [], [a.d_q])
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


def finish(shape: Shape) -> PrimFunc:
    """Return the kernel that brings the shares of a run of tasks of one head to the gradients.

    Runs of one head must come in the order of the table of tasks, whatever threads they were
    computed on: sums then have the same bits every time. Rows of d_q that no earlier task has seen
    are written, others added to; d_r, d_content and d_position are added to and must begin as zero.
    """
    dim = shape.dim
    relative = {
        "part_relative": lambda a: (a.strip_count * shape.tile.lanes + 2) * dim,
        "d_r": lambda a: a.heads * (a.window + 1) * dim,
        "d_content": lambda a: a.heads * dim,
        "d_position": lambda a: a.heads * dim,
    }

    def body(a: SimpleNamespace) -> None:
        a.dim = dim
        sequence, first_key, end_key = read_task(a.tasks, a.begin)
        begin, end = query_range(a, sequence, first_key, end_key)
        with T.If(T.Not(whole(a, sequence, first_key, end_key))), T.Then():
            fresh = T.Select(first_key > 0, first_key + a.window, T.int32(0))
            write_queries(shape, a, sequence, begin, end, opaque(fresh))
        if shape.relative:
            _add_relative_gradients(shape, a, sequence.head)

    return build_kernel(
        "finish",
        {
            "tasks": lambda a: a.task_count * TASK_FIELDS,
            "part_query": lambda a: a.part_rows * dim,
            "d_q": lambda a: a.batch * a.query_count * a.heads * dim,
        }
        | (relative if shape.relative else {}),
        dict.fromkeys(("begin", *SIZES, "part_rows"), "int32") | {"scale": "float32"},
        body,
    )


def _add_relative_gradients(shape: Shape, a: SimpleNamespace, head: Expr) -> None:
    dim, lanes = shape.dim, shape.tile.lanes

    def add(target: Buffer, at: Expr, source: Expr, factor: Expr) -> None:
        for d in range(0, dim, lanes):
            share = load(a.part_relative, source + d, lanes) * T.broadcast(factor, lanes)
            store(target, at + d, load(target, at + d, lanes) + share, lanes)

    newest = opaque((head * (a.window + 1) + a.window) * dim)
    with T.serial(0, a.window + 1) as m:
        # (q + p) carries scale * log2(e); the scale belongs here, log2(e) does not.
        add(a.d_r, opaque(newest - m * dim), opaque(m * dim), T.float32(LN2))
    biases = opaque(a.strip_count * (shape.tile.lanes * dim))
    add(a.d_content, opaque(head * dim), biases, a.scale)
    add(a.d_position, opaque(head * dim), opaque(biases + dim), a.scale)
