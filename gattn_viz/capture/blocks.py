"""Attention a block of query rows at a time: the output, and every statistic, from one pass over the scores.

The rows of one KV head's query heads have two buffers, scores s and their exponentials e. Everything is a product
or a sum over these while they are in the processor's cache:

    l = sum_k e                          p = e / l
    output = e V / l                     received = (1/l)^T e
    entropy = log l - (sum_k e s) / l, since log p = s - log l; and sum_k e s = q . (e K) where scores are q . k

Where exponentials would leave the range of float32, a row's largest score is taken out first, of the s of entropy
too: it is a difference of two numbers as large as these.
All of it but the products may be left to a kernel of machine code (`compiled`), which always takes it out.
What there is one of for each row is put in its place and finished at the end, for all rows at once: many small
steps would cost more than the work itself.

Axis letters as in `attention`; R rows of a block, C columns (keys) that they see.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gattn_viz.capture.attention import Attention
from gattn_viz.capture.compiled import RowKernel
from gattn_viz.capture.weighing import Weighing
from gattn_viz.metrics.layer import Need
from gattn_viz.metrics.pooling import MapBuilder
from gattn_viz.metrics.sums import AttentionSums

# Scores of one KV head's rows that are worked on together: 4 MB. With less, calls and narrow matrix products cost
# more than a processor's cache saves.
BLOCK_SCORES = 1024 * 1024
LEAST_ROWS, MOST_ROWS = 16, 128

# Up to this width of keys, a product of e with them costs less than one more pass over scores and exponentials.
# Entropy has then a rounding error of some 1e-7 times the scores, which must not be larger than this.
NARROW, MODERATE = 32, 64.0

# Sums of exponentials that float32 holds well enough without the largest score taken out, times values too.
LEAST_SUM, LARGEST_SUM = 1e-20, 1e28

# The score of a key that a row does not see: finite, so that 0 times it is 0.
HIDDEN = torch.finfo(torch.float32).min / 2


@dataclass
class WantedMap:
    """A map to fill: of which heads, from 0; None is the mean of all. `weighing` comes before."""

    builder: MapBuilder
    heads: list[int] | None
    weighing: Weighing | None = None


def attend_in_blocks(
    attention: Attention,
    *,
    output: Tensor | None,
    sums: AttentionSums | None = None,
    needs: Collection[Need] = (),
    wanted: WantedMap | None = None,
    kernel: RowKernel | None = None,
) -> None:
    """Go through the queries once.

    Args:
        output: (Q, K, G, Dv), is written; None when it is known already, and only the map's rows are gone through.
        sums: take up what is in `needs`, and which keys are seen where that is not all; needs an output.
        wanted: takes up its rows.
        kernel: reduces the scores, see `compiled`; None is torch.
    """
    buffers = _Buffers()
    kv_heads = [
        _KVHead(attention, index, buffers, needs, None if output is None else output[:, index], kernel)
        for index in range(attention.q.shape[1])
    ]
    seen = []
    for rows in _blocks(attention, None if output is not None else wanted):
        columns, visible = attention.visible(rows)
        seen.append(_keys_seen(attention, rows, visible))
        if sums is not None and visible is not None:
            sums.add_visible(attention.first_query + rows.start, attention.first_key + columns.start, visible)
        hidden = _Hidden.of(rows, visible, attention.q)
        part = None if wanted is None else _PartOfMap.of(wanted, attention, rows, columns)
        for kv_head in kv_heads:
            if output is not None or (part is not None and part.has(kv_head.heads)):
                kv_head.take(rows, columns, hidden)
                if part is not None and part.has(kv_head.heads):
                    kv_head.add_to(part, rows, columns)
        if wanted is not None and part is not None:
            wanted.builder.add(part.kept.float(), part.first_query, part.first_key)
    if output is not None:
        for kv_head in kv_heads:
            kv_head.finish(sums, torch.cat(seen))


def _blocks(attention: Attention, wanted: WantedMap | None) -> Iterator[range]:
    """The rows of one block after the other, all or those of a map."""
    start, end = 0, attention.q.shape[0]
    if wanted is not None:
        start = max(wanted.builder.rows.start - attention.first_query, 0)
        end = min(wanted.builder.rows.stop - attention.first_query, end)
    while start < end:
        stop = min(start + _good_rows(attention, start), end)
        yield range(start, stop)
        start = stop


def _good_rows(attention: Attention, start: int) -> int:
    """How many rows make a block that starts at `start`, for `BLOCK_SCORES`."""
    if attention.q.device.type != "cpu":
        return MOST_ROWS
    columns = attention.first_query - attention.first_key + start + LEAST_ROWS
    if attention.mask.local_size is not None:
        columns = min(columns, attention.mask.local_size + LEAST_ROWS)
    scores = BLOCK_SCORES * torch.get_num_threads()
    return max(min(scores // (attention.q.shape[2] * columns), MOST_ROWS), LEAST_ROWS)


def _keys_seen(attention: Attention, rows: range, visible: Tensor | None) -> Tensor:
    """(R,): how many keys each row sees."""
    if visible is not None:
        return visible.sum(-1)
    first = attention.first_query + rows.start + 1
    return torch.arange(first, first + len(rows), device=attention.q.device)


class _Buffers:
    """Memory that one block after the other uses."""

    def __init__(self) -> None:
        self.flat: dict[str, Tensor] = {}

    def get(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Of that shape and of `like`'s dtype and device, with anything in it."""
        size = math.prod(shape)
        if name not in self.flat or len(self.flat[name]) < size:
            self.flat[name] = like.new_empty(size + size // 8)  # blocks grow a little: not anew for each
        return self.flat[name][:size].view(shape)


@dataclass
class _Hidden:
    """Where queries of a block do not see keys."""

    seen: Tensor  # (R, 1, C), or (R, 1, last columns): 1 where a key is seen, else 0
    last_columns: int
    plain: bool  # the causal rule: row i sees the columns up to its own, which is i of the last ones

    @classmethod
    def of(cls, rows: range, visible: Tensor | None, like: Tensor) -> _Hidden:
        if visible is not None:
            return cls(visible[:, None].to(like.dtype), visible.shape[1], False)
        count = len(rows)
        return cls(like.new_ones(count, count).tril_()[:, None], count, True)

    def fill(self, x: Tensor, value: float) -> None:
        """Write a value there, into (R, G, C)."""
        x[..., x.shape[-1] - self.last_columns :].masked_fill_(self.seen == 0, value)

    def blank(self, x: Tensor) -> None:
        """Write 0 there, faster than `fill`; what is infinite becomes NaN."""
        x[..., x.shape[-1] - self.last_columns :].mul_(self.seen)


class _KVHead:
    """One KV head with its G query heads: what is known of each of their rows, (Q, G)."""

    def __init__(
        self,
        attention: Attention,
        index: int,
        buffers: _Buffers,
        needs: Collection[Need],
        output: Tensor | None,
        kernel: RowKernel | None,
    ) -> None:
        self.attention = attention
        self.group = attention.q.shape[2]
        self.heads = slice(index * self.group, (index + 1) * self.group)
        self.q = (attention.q[:, index] * attention.scale).contiguous()  # (Q, G, D): a block's rows lie together
        self.kT = attention.k[index].T.contiguous()  # (D, T)
        self.values = attention.v[index]
        self.keys_as_values = (
            "entropy" in needs
            and kernel is None
            and self.q.shape[-1] <= NARROW
            and attention.softcap is None
            and attention.bias is None
            and output is not None
            and float(self.q.norm(dim=-1).max() * attention.k[index].norm(dim=-1).max()) < MODERATE
        )
        if self.keys_as_values:
            self.values = torch.cat([self.values, attention.k[index]], -1)
        self.bias = None if attention.bias is None else attention.bias[:, index]
        self.sink_logit = None if attention.sink_logit is None else attention.sink_logit[index]
        self.buffers = buffers
        self.needs = needs
        self.output = output
        self.kernel = kernel
        # On a GPU, looking at the sums would make it wait for each block; a learned sink may be far above scores.
        self.take_largest_out = self.q.device.type != "cpu" or self.sink_logit is not None

        each_row = self.q.shape[:2]
        self.total = self.q.new_empty(each_row)  # l, without a learned sink
        self.over_total = self.q.new_empty(each_row)  # 1 / l, the sink's exponential in it
        self.shift = self.q.new_zeros(each_row)  # what was taken out of the scores
        self.first_token = self.q.new_zeros(each_row)  # e of the first token
        self.largest = self.q.new_empty(each_row)
        # sum_k e s, where s is without what was taken out unless keys are values
        self.scores_mean = self.q.new_empty(each_row)
        self.received = self.q.new_zeros(self.group, attention.k.shape[1])
        if output is not None:
            self.product = self.q.new_empty(*each_row, self.values.shape[-1])  # e V, or e [V K]

    def take(self, rows: range, columns: range, hidden: _Hidden) -> None:
        """Compute a block's scores and exponentials, and what follows from them."""
        self.rows, self.columns = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        if self.kernel is not None:
            self._reduce_by(self.kernel, hidden)
        else:
            self._reduce(hidden)
        if "first_token" in self.needs and self.attention.first_key + columns.start == 0:
            self.first_token[self.rows].copy_(self.e[..., 0])
        if self.output is not None:
            product = self.product[self.rows].view(-1, self.product.shape[-1])
            torch.mm(self.e.view(len(product), -1), self.values[self.columns], out=product)

    def add_to(self, part: _PartOfMap, rows: range, columns: range) -> None:
        """Add the block's probabilities to the rows of a map, weighed if they are to be."""
        over_total = self.over_total[self.rows]
        if part.chosen is None and part.weighing is None:
            part.add_sum(over_total, self.e)
            return
        p = (self.e * over_total[..., None]).transpose(0, 1)  # (G, R, C), a tensor of its own
        if part.weighing is not None:
            part.weighing.weigh(p, self.heads, rows, columns)
        part.add(self.heads, p)

    def finish(self, sums: AttentionSums | None, seen: Tensor) -> None:
        """Divide by the sums of exponentials, and add up; `seen` (Q,) is how many keys each query sees."""
        over_total = self.over_total
        assert self.output is not None
        width = self.output.shape[-1]
        torch.mul(self.product[..., :width], over_total[..., None], out=self.output)
        if sums is None:
            return
        if "first_token" in self.needs:
            sums.add_first_token(self.heads, self.attention.first_query, (self.first_token * over_total).T)
        if "learned_sink" in self.needs and self.sink_logit is not None:
            of_sink = (self.sink_logit - self.shift).exp() * over_total  # 1 - the rest would lose a small one
            sums.add_learned_sink(self.heads, self.attention.first_query, of_sink.T)
        if "received" in self.needs:
            sums.add_received(self.heads, self.attention.first_key, self.received)
        if "row_max" in self.needs:
            sums.add_row_max(self.heads, (self.largest * over_total).T)
        if "entropy" in self.needs:
            log_total = -over_total.log()
            if self.keys_as_values:
                torch.sum(self.product[..., width:].mul_(self.q), -1, out=self.scores_mean)
                log_total += self.shift
            entropy = (self.total * log_total - self.scores_mean) * over_total
            entropy.clamp_min_(0)
            if self.sink_logit is None:  # rows sum to 1
                entropy = torch.minimum(entropy, seen.clamp_min(1).log()[:, None])
            sums.add_entropy(self.heads, entropy.T, seen)

    def _reduce_by(self, kernel: RowKernel, hidden: _Hidden) -> None:
        """`_reduce`, a row at a time."""
        self._score()
        if not hidden.plain:
            hidden.fill(self.s, HIDDEN)
        received = self.buffers.get("received", self.s, *self.received[:, self.columns].shape).zero_()
        kernel(
            self.s,
            diagonal=self.s.shape[-1] - self.s.shape[0] if hidden.plain else None,
            sink_logit=self.sink_logit,
            total=self.total[self.rows],
            over_total=self.over_total[self.rows],
            shift=self.shift[self.rows],
            scores_mean=self.scores_mean[self.rows],
            largest=self.largest[self.rows],
            received=received,
        )
        self.received[:, self.columns].add_(received)

    def _reduce(self, hidden: _Hidden) -> None:
        """Turn scores into exponentials, and write what each row and each key have of them."""
        self._exponentiate(hidden)
        if "row_max" in self.needs:
            torch.amax(self.e, -1, out=self.largest[self.rows])
        if "received" in self.needs:
            over_total = self.over_total[self.rows]
            received = torch.bmm(over_total.T[:, None], self.e.transpose(0, 1))[:, 0]  # (G, 1, R) x (G, R, C)
            self.received[:, self.columns].add_(received)
        if self.e is not self.s:
            torch.sum(self.s.mul_(self.e), -1, out=self.scores_mean[self.rows])  # the last use of the scores

    def _exponentiate(self, hidden: _Hidden) -> None:
        """e (R, G, C), its sums and their inverses; s too, unless e takes its place."""
        total, over_total = self.total[self.rows], self.over_total[self.rows]
        if not self.take_largest_out:
            self._score()
            torch.exp(self.s, out=self.e)
            hidden.blank(self.e)
            torch.sum(self.e, -1, out=total)
            torch.reciprocal(total, out=over_total)
            # A row that sees nothing has the sum 0, and is put right by the other way too, as is NaN.
            if float(total.sum()) < LARGEST_SUM and float(over_total.sum()) < 1 / LEAST_SUM:
                return
            self.take_largest_out = True
        self._score()
        hidden.fill(self.s, HIDDEN)
        shift = self.s.amax(-1)
        if self.sink_logit is not None:
            shift = torch.maximum(shift, self.sink_logit)
        self.shift[self.rows] = shift
        torch.exp(self.s.sub_(shift[..., None]), out=self.e)
        hidden.blank(self.e)
        torch.sum(self.e, -1, out=total)
        with_sink = total if self.sink_logit is None else total + (self.sink_logit - shift).exp()
        # a row that sees nothing has no e to multiply
        torch.reciprocal(with_sink.clamp_min(torch.finfo(total.dtype).tiny), out=over_total)

    def _score(self) -> None:
        """s, and where e will be."""
        q = self.q[self.rows]
        shape = (*q.shape[:2], self.columns.stop - self.columns.start)
        self.s = self.e = self.buffers.get("scores", q, *shape)
        if "entropy" in self.needs and not self.keys_as_values and self.kernel is None:
            self.e = self.buffers.get("exponentials", q, *shape)
        torch.mm(q.view(-1, q.shape[-1]), self.kT[:, self.columns], out=self.s.view(-1, shape[-1]))
        if self.attention.softcap is not None:
            self.s.div_(self.attention.softcap).tanh_().mul_(self.attention.softcap)
        if self.bias is not None:
            self.s += self.bias[self.rows, :, self.columns]


@dataclass
class _PartOfMap:
    """The rows of a map that a block has, while the heads come in."""

    chosen: list[int] | None  # None: the mean
    weighing: Weighing | None
    heads: int
    first_query: int
    first_key: int
    kept: Tensor  # (heads kept, R, C)

    @classmethod
    def of(cls, wanted: WantedMap, attention: Attention, rows: range, columns: range) -> _PartOfMap | None:
        first = attention.first_query + rows.start
        if first >= wanted.builder.rows.stop or first + len(rows) <= wanted.builder.rows.start:
            return None
        kept = 1 if wanted.heads is None else len(wanted.heads)
        return cls(
            wanted.heads,
            wanted.weighing,
            attention.heads,
            first,
            attention.first_key + columns.start,
            attention.q.new_zeros(kept, len(rows), len(columns)),
        )

    def has(self, heads: slice) -> bool:
        return self.chosen is None or any(heads.start <= head < heads.stop for head in self.chosen)

    def add_sum(self, factors: Tensor, e: Tensor) -> None:
        """Take up (R, G) factors times (R, G, C) exponentials for the mean, without a tensor of their products."""
        self.kept[0, :, None].baddbmm_(factors[:, None], e, alpha=1 / self.heads)

    def add(self, heads: slice, p: Tensor) -> None:
        """Take up (G, R, C) probabilities of some heads."""
        if self.chosen is None:
            self.kept[0] += p.sum(0) / self.heads
            return
        for place, head in enumerate(self.chosen):
            if heads.start <= head < heads.stop:
                self.kept[place] = p[head - heads.start]
