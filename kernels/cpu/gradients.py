"""The products of the backward program.

What lies where is said in tvm_backward.py. Every product is a register tile: d_values from columns
of `weights`, d_keys from columns of `d_scores`, the gradient of q from its rows (and, for r, from
rows that begin one column later in each row), and that of r from its diagonals. Diagonals run over
the edges of the keys, so a vector in each margin is zero.
"""

from collections.abc import Callable
from types import SimpleNamespace

from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer

from kernels import dropout_tir as tvm_random
from kernels.cpu.scores import Group, Shape, deltas, dropout_row, product_tiles, visible
from kernels.cpu.tasks import BACKWARD_KEYS
from kernels.cpu.tiles import accumulate, exp2, fill, load, opaque, registers, spill, splat, store


class Gradients:
    """The arguments and the scratch of the program, and its products."""

    scratch: SimpleNamespace
    seed: Expr

    def __init__(self, shape: Shape, arguments: SimpleNamespace) -> None:
        """Take what the program is compiled for, and the kernel's arguments."""
        self.shape, self.tile, self.dim = shape, shape.tile, shape.dim
        self.lanes = shape.tile.lanes
        self.a = arguments
        self.a.dim = shape.dim
        self.row_length = BACKWARD_KEYS + 2 * shape.margin

    def write_weights(self, group: Group) -> None:
        """Write the weights of the strips that the group sees."""
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

    def write_gradients(self, group: Group) -> None:
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

    def clear_margins(self, group: Group) -> None:
        """Zero the columns next to the keys, over which diagonals run."""
        s, lanes = self.scratch, self.lanes
        count = group.end_key - group.first_key
        right = opaque(T.truncdiv(count + lanes - 1, lanes) * lanes)
        for i in range(self.tile.rows):
            at = opaque(group.scores + group.first_key + i * self.row_length)
            for near in range(0, 8, lanes):
                store(s.d_scores, at - near - lanes, splat(0.0, lanes), lanes)
                store(s.d_scores, at + right + near, splat(0.0, lanes), lanes)

    def add_keys(self, query: Expr, end_query: Expr, first_key: Expr, end_key: Expr) -> None:
        """Add the block's share to the gradients of the keys and values that it sees."""
        a, s, keys = self.a, self.scratch, self.tile.keys
        oldest = T.max(query - a.window - first_key, 0)
        newest = T.min(end_query, end_key) - first_key
        with T.serial(T.truncdiv(oldest, keys), T.truncdiv(newest + keys - 1, keys)) as number:
            key = opaque(first_key + number * keys)
            begin = opaque(T.max(key - query, 0))
            end = opaque(T.min(key + keys + a.window, end_query) - query)
            column = opaque(number * keys + self.shape.margin)
            target, span = opaque(number * keys * self.dim), (begin, end)

            def column_of(weights: Buffer, column: Expr) -> Callable[[int, Expr], Expr]:
                return lambda i, row: weights[column + row * self.row_length + i]

            self._add_outer(s.d_values, target, span, column_of(s.weights, column), s.d_out)
            self._add_outer(s.d_keys, target, span, column_of(s.d_scores, column), s.content)

    def _add_outer(
        self,
        target: Buffer,
        at: Expr,
        span: tuple[Expr, Expr],
        left: Callable[[int, Expr], Expr],
        rows: Buffer,
    ) -> None:
        """Add to tile.keys rows of `target` the sum over rows of left(i, row) * rows[row]."""
        for part in self.tile.split(self.dim):
            self._add_outer_part(target, at, span, left, rows, part)

    def _add_outer_part(
        self,
        target: Buffer,
        at: Expr,
        span: tuple[Expr, Expr],
        left: Callable[[int, Expr], Expr],
        rows: Buffer,
        part: range,
    ) -> None:
        dim, lanes = self.dim, self.lanes
        sums = registers(self.tile.keys, len(part), lanes)

        def place(i: int, v: int) -> Expr:
            return at + i * dim + part[v] * lanes

        fill(sums, lambda i, v: load(target, place(i, v), lanes), lanes)
        accumulate(
            sums,
            *span,
            left,
            lambda row, v: load(rows, row * dim + part[v] * lanes, lanes),
            lanes,
        )
        spill(sums, lambda i, v, value: store(target, place(i, v), value, lanes), lanes)

    def add_queries(self, group: Group, part_row: Expr) -> None:
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
        for part in self.tile.split(self.dim):
            self._add_rows_part(target, span, left, right, bias, part)

    def _add_rows_part(
        self,
        target: Expr,
        span: tuple[Expr, Expr],
        left: Callable[[int, Expr], Expr],
        right: Callable[[Expr, int], Expr],
        bias: Expr,
        part: range,
    ) -> None:
        a, dim, lanes = self.a, self.dim, self.lanes
        sums = registers(self.tile.rows, len(part), lanes)
        fill(sums, lambda i, v: splat(0.0, lanes), lanes)
        accumulate(sums, *span, left, lambda k, v: right(k, part[v] * lanes), lanes)

        def add(i: int, v: int, value: Expr) -> None:
            at = opaque(target + i * dim + part[v] * lanes)
            store(a.part_query, at, load(a.part_query, at, lanes) + value, lanes)

        spill(sums, add, lanes)
        if not self.shape.relative:
            return
        for v, vector in enumerate(part):
            at = opaque(bias + vector * lanes)
            total = load(sums[0][v], 0, lanes)
            for row in sums[1:]:
                total = total + load(row[v], 0, lanes)
            store(a.part_relative, at, load(a.part_relative, at, lanes) + total, lanes)

    def add_relative(self, query: Expr, end_query: Expr, first_key: Expr, end_key: Expr) -> None:
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
