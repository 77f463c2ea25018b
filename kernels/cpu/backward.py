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
`d_scores` = weights * (d_out . v - d_out . out) overwrites the position scores. The products that
follow are in tvm_gradients.py; what neighbouring tasks share is added by tvm_finish.py.
"""

from types import SimpleNamespace

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, PrimFunc

from kernels import dropout_tir as tvm_random
from kernels.cpu.finish import LN2, first_fresh, query_range, write_queries
from kernels.cpu.gradients import Gradients
from kernels.cpu.pack import TASK_FIELDS, Sequence, ask_for_rows, pack_rows, pack_strips, read_task
from kernels.cpu.program import SIZES, build_kernel
from kernels.cpu.scores import (
    Group,
    Shape,
    load_query,
    position_scores,
)
from kernels.cpu.tasks import BACKWARD_KEYS
from kernels.cpu.tiles import (
    first,
    load,
    opaque,
    reduce,
    splat,
    store,
    variable,
)

FAR = 1e30  # the log-sum-exp of rows past the end: their weights vanish


def backward(shape: Shape) -> PrimFunc:
    """Return the kernel that runs the tasks begin .. end - 1, of one head.

    It writes d_k and d_v, and d_q of the queries that see keys of one task only. The shares of the
    other queries stay in `part_query`: more than one task may be asked for only if they all have
    whole sequences.
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


class _Backward(Gradients):
    """The program while it is being built."""

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
        a, s, tile, block = self.a, self.scratch, self.tile, self.tile.block
        begin, end = query_range(a, sequence, first_key, end_key)
        fresh = first_fresh(a, first_key)
        blocks = opaque(T.truncdiv(T.max(end - begin, 0) + block - 1, block))
        count = opaque(end_key - first_key)
        padded = opaque(T.truncdiv(count + tile.keys - 1, tile.keys) * (tile.keys * self.dim))
        self._clear(s.d_keys, padded)
        self._clear(s.d_values, padded)
        self._clear(a.part_query, blocks * (block * self.dim))
        packed = variable(T.int32(0), "int32")
        written = variable(T.int32(0), "int32")
        with T.serial(0, blocks) as number:
            query = opaque(begin + number * block)
            end_query = opaque(T.min(query + block, end))
            groups = opaque(T.truncdiv(end_query - query + tile.rows - 1, tile.rows))
            keys = (first_key, end_key)
            self._load_keys(sequence, first_key, count, packed, query)
            self._load_block(sequence, query, end_query)
            with T.serial(0, groups) as i:
                self._differentiate_scores(self._group(sequence, query, i, *keys), end)
            self.add_keys(query, end_query, *keys)
            with T.serial(0, groups) as i:
                part = opaque(number * block + i * tile.rows)
                self.add_queries(self._group(sequence, query, i, *keys), part)
            if self.shape.relative:
                self.add_relative(query, end_query, *keys)
            whole = (opaque(T.max(query, fresh)), opaque(T.min(end_query, end_key)))
            write_queries(self.shape, a, sequence, begin, whole)
            past = opaque(T.max(T.min(query + block - a.window - first_key, count), 0))
            self._write_keys(sequence, first_key, written, past)
        self._write_keys(sequence, first_key, written, count)

    def _group(
        self, sequence: Sequence, query: Expr, number: Expr, first_key: Expr, end_key: Expr
    ) -> Group:
        row = opaque(number * self.tile.rows)
        group_query = opaque(query + row)
        left, right = Group.strips(self.a, self.tile, group_query, first_key, end_key)
        scores = opaque(row * self.row_length + self.shape.margin - first_key)
        keys = (first_key, end_key, left, right)
        return Group(sequence, group_query, row, *keys, scores, self.row_length)

    def _load_keys(
        self, sequence: Sequence, first_key: Expr, count: Expr, packed: Buffer, query: Expr
    ) -> None:
        """Pack the keys up to those that the block at `query` sees; `packed` counts strips."""
        a, s, dim, tile, lanes = self.a, self.scratch, self.dim, self.tile, self.lanes
        seen = T.min(query + tile.block - first_key, count)
        begin = opaque(packed[0])
        # One strip more at the end, since tiles are wider than a strip.
        last = T.Select(seen < count, T.int32(0), T.int32(1))
        stop = opaque(T.truncdiv(seen + lanes - 1, lanes) + last)

        def row_of(buffer: Buffer, row: Expr) -> tuple[Buffer, Expr]:
            return buffer, sequence.key_row(a, opaque(first_key + row))

        key = lambda row: row_of(a.k, row)  # noqa: E731
        value = lambda row: row_of(a.v, row)  # noqa: E731
        pack_strips(tile, dim, s.keys, (begin, stop), count, key)
        rows = (opaque(begin * lanes), opaque(T.min(stop * lanes, count)))
        pack_rows(tile, dim, s.key_rows, rows, key)
        pack_strips(tile, dim, s.values, (begin, stop), count, value, factor=a.kept)
        T.buffer_store(packed, stop, [0])

    def _load_block(self, sequence: Sequence, query: Expr, end_query: Expr) -> None:
        a, s, dim, lanes, block = self.a, self.scratch, self.dim, self.lanes, self.tile.block
        with T.serial(0, block) as row:
            element = opaque(T.min(query + row, end_query - 1))
            valid = T.bind(query + row < end_query)
            load_query(self.shape, a, sequence, element, valid, row, (s.content, s.place))
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

    def _differentiate_scores(self, group: Group, end: Expr) -> None:
        """Fill the strips that the group sees with weights and gradients of scores.

        In between, what the next block will load and what this one will write is asked for.
        """
        a, s, rows, dim = self.a, self.scratch, self.tile.rows, self.dim
        key_row, query_row = group.sequence.key_row, group.sequence.query_row

        def later(i: int) -> Expr:
            return opaque(T.min(group.query + self.tile.block + i, end - 1))

        def later_key(i: int) -> Expr:
            return key_row(a, opaque(T.min(later(i), group.end_key - 1)))

        def past_key(i: int) -> Expr:
            return key_row(a, opaque(T.max(group.query + i - a.window, group.first_key)))

        ask_for_rows(rows, dim, [a.k, a.v], later_key)
        if self.shape.relative:
            position_scores(self.shape, a, group, s.place, s.d_scores)
        ask_for_rows(rows, dim, [a.q, a.d_out], lambda i: query_row(a, later(i)))
        self.write_weights(group)
        ask_for_rows(rows, dim, [a.out], lambda i: query_row(a, later(i)))
        ask_for_rows(rows, dim, [a.d_k, a.d_v], past_key, write=True)
        self.write_gradients(group)
        if self.shape.relative:
            self.clear_margins(group)

    def _write_keys(self, sequence: Sequence, first_key: Expr, written: Buffer, stop: Expr) -> None:
        """Write the gradients of the keys and values up to `stop`, which no later block sees."""
        a, s, dim, lanes = self.a, self.scratch, self.dim, self.lanes
        with T.serial(opaque(written[0]), stop) as row:
            at = sequence.key_row(a, opaque(first_key + row))
            for d in range(0, dim, lanes):
                d_key = load(s.d_keys, row * dim + d, lanes)
                d_value = load(s.d_values, row * dim + d, lanes)
                # (q + u) carries scale * log2(e); the scale belongs here, log2(e) does not.
                store(a.d_k, at + d, d_key * splat(LN2, lanes), lanes)
                store(a.d_v, at + d, d_value * T.broadcast(a.kept, lanes), lanes)
        T.buffer_store(written, stop, [0])
