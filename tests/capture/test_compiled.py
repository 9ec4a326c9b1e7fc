"""The compiled kernel against double precision, and when it is used; `test_blocks` has the block path with it."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from gattn_viz.capture import compiled
from gattn_viz.capture.attention import Attention
from gattn_viz.capture.collector import OF_ATTENTION, Request
from gattn_viz.capture.compiled import LEAST_SCORES, MOST_THREADS, kernel_for, trusted_kernel
from gattn_viz.capture.mask import lazy_mask
from gattn_viz.capture.run import capture
from tests.conftest import tiny_model

pytest.importorskip("numba")

from gattn_viz.capture import row_kernel
from gattn_viz.capture.blocks import HIDDEN

INF, NAN = math.inf, math.nan
OF_EACH_ROW = ("total", "over_total", "shift", "scores_mean", "largest")


def reduced(scores: Any, diagonal: int | None = None, sink: list[float] | None = None) -> dict[str, torch.Tensor]:
    """What the kernel makes of (R, G, C) scores."""
    e = torch.tensor(scores, dtype=torch.float32)
    rows, heads, columns = e.shape
    found = {name: torch.full((rows, heads), NAN) for name in OF_EACH_ROW}
    found["received"] = torch.zeros(heads, columns)
    sink_logit = None if sink is None else torch.tensor(sink)
    row_kernel.reduce_rows(e, diagonal=diagonal, sink_logit=sink_logit, **found)
    return {"e": e} | found


class TestTheKernel:
    def test_three_keys_by_hand(self) -> None:
        """exp(0), exp(-log 2), exp(-log 4): 4, 2, 1 sevenths; or elevenths beside a sink as large as the first."""
        log_2 = math.log(2)
        for sink, parts in ((None, 7), ([5.0], 11)):
            found = reduced([[[5.0, 5 - log_2, 5 - 2 * log_2]]], sink=sink)
            assert found["e"].flatten().tolist() == pytest.approx([1, 1 / 2, 1 / 4], rel=2e-7)
            assert float(found["total"]) == pytest.approx(7 / 4, rel=2e-7)
            assert float(found["over_total"]) == pytest.approx(4 / parts, rel=2e-7)
            assert float(found["shift"]) == 5
            assert float(found["scores_mean"]) == pytest.approx(-log_2, rel=4e-7)  # -(1/2) log 2 - (1/4) log 4
            assert float(found["largest"]) == 1
            assert found["received"][0].tolist() == pytest.approx([4 / parts, 2 / parts, 1 / parts])

    def test_each_row_sees_the_keys_up_to_its_own(self) -> None:
        """What it does not see may be anything; it becomes 0."""
        scores = [[[0.0, NAN, INF]], [[0.0, 0.0, NAN]], [[0.0, 0.0, 0.0]]]
        found = reduced(scores, diagonal=0)
        assert found["e"][:, 0].tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
        assert found["total"].flatten().tolist() == [1, 2, 3]
        assert found["received"][0].tolist() == pytest.approx([1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3])

    def test_hidden_keys_have_exactly_nothing(self) -> None:
        found = reduced([[[HIDDEN, 3.0, HIDDEN]], [[HIDDEN, HIDDEN, HIDDEN]]])
        assert found["e"][:, 0].tolist() == [[0, 1, 0], [0, 0, 0]]
        assert found["total"].flatten().tolist() == [1, 0]
        assert found["largest"].flatten().tolist() == [1, 0]
        assert found["received"][0].tolist() == [0, 1, 0]
        with_sink = reduced([[[HIDDEN, HIDDEN]]], sink=[2.0])
        assert [float(with_sink[name]) for name in ("total", "over_total", "shift", "largest")] == [0, 1, 2, 0]

    def test_exponentials_are_as_good_as_torchs(self) -> None:
        """To 1.5 units in the last place, from 1 down to the least normal number; 0 below."""
        scores = np.linspace(-90, 0, 400_001, dtype=np.float32)
        found = reduced(scores[None, None])["e"][0, 0].double()
        exact = torch.from_numpy(scores).double().exp()
        normal = torch.from_numpy(scores) >= -87
        assert float((found / exact - 1)[normal].abs().max()) < 1.5 * 2**-24 * 2
        assert not found[~normal].any()

    @pytest.mark.parametrize("columns", [1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 1000, 4096])
    def test_rows_of_any_length(self, columns: int) -> None:
        """Machine code goes through many columns at a time: none is left out, whatever remains."""
        scores = torch.randn(5, 3, columns, generator=torch.Generator().manual_seed(columns)) * 4
        found = reduced(scores.tolist())
        p = scores.double().softmax(-1)
        over = found["over_total"].double()
        torch.testing.assert_close(found["e"].double() * over[..., None], p, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(found["shift"], scores.amax(-1), atol=0, rtol=0)
        torch.testing.assert_close(found["total"].double() * over, torch.ones_like(over), atol=1e-6, rtol=0)
        torch.testing.assert_close(found["received"].double(), p.sum(0), atol=1e-5, rtol=0)
        entropy = -(over.log() + found["scores_mean"].double() * over)
        torch.testing.assert_close(entropy, torch.special.entr(p).sum(-1), atol=3e-6, rtol=0)

    def test_sums_over_thousands_of_keys_keep_their_digits(self) -> None:
        scores = torch.zeros(1, 1, 2**20)
        assert float(reduced(scores.tolist())["total"]) == 2**20
        scores = torch.randn(1, 1, 2**18, generator=torch.Generator().manual_seed(0))
        found = reduced(scores.tolist())
        exact = (scores - scores.max()).double().exp().sum()
        assert float(found["total"]) == pytest.approx(float(exact), rel=1e-6)

    @pytest.mark.parametrize("row", [[-3.0, -1.0, -2.0], [-0.0, -5.0, 0.0], [2.0, -2.0, 1.0], [-1e9, 2.0**99]])
    def test_the_largest_of_either_sign(self, row: list[float]) -> None:
        assert float(reduced([[row]])["shift"]) == max(row)

    @pytest.mark.parametrize("bad", [NAN, -NAN, INF])
    @pytest.mark.parametrize("place", range(20))
    def test_what_is_not_finite_shows(self, bad: float, place: int) -> None:
        """In its row alone, wherever it stands: NaN with the sign bit set, too."""
        scores = torch.zeros(2, 1, 20)
        scores[1, 0, place] = math.copysign(bad, -1) if bad is not INF and place % 2 else bad
        found = reduced(scores.tolist())
        for name in ("total", "over_total", "scores_mean"):
            assert found[name][0].isfinite().all()
            assert not found[name][1].isfinite().any()

    def test_minus_infinity_is_no_attention(self) -> None:
        """As a model's own bias may have it; 0 times it must not be NaN."""
        found = reduced([[[-INF, 0.0, 0.0]]])
        assert found["e"].flatten().tolist() == [0, 1, 1]
        assert float(found["scores_mean"]) == 0


def attention_of(queries: int, heads: int = 8, **more: Any) -> Attention:
    q = torch.zeros(queries, 1, heads, 1, **more)
    k = torch.zeros(1, queries, 1, **more)
    return Attention(q, 1.0, k, k, 0, 0, lazy_mask(q_length=queries, kv_length=queries), 0, 0)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


ENOUGH = math.isqrt(LEAST_SCORES // 8) + 1


@pytest.mark.usefixtures("threads")
class TestWhen:
    def test_from_so_many_scores_on(self) -> None:
        torch.set_num_threads(1)
        assert kernel_for(attention_of(ENOUGH)) is row_kernel.reduce_rows
        assert kernel_for(attention_of(ENOUGH - 1)) is None

    def test_not_where_torch_has_many_threads(self) -> None:
        torch.set_num_threads(MOST_THREADS)
        assert kernel_for(attention_of(ENOUGH)) is not None
        torch.set_num_threads(MOST_THREADS + 1)
        assert kernel_for(attention_of(ENOUGH)) is None

    def test_not_in_double_precision_nor_elsewhere_than_on_a_cpu(self) -> None:
        torch.set_num_threads(1)
        assert kernel_for(attention_of(ENOUGH, dtype=torch.float64)) is None
        assert kernel_for(attention_of(ENOUGH, device="meta")) is None

    def test_a_capture_says_so_and_finds_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.set_num_threads(1)
        model = tiny_model("gate_headwise")
        prompt = list(range(2, 42))
        request = Request(maps=frozenset({1}), needs=OF_ATTENTION)
        [by_torch] = capture(model, [prompt], request)
        monkeypatch.setattr(compiled, "LEAST_SCORES", 1)
        [by_kernel] = capture(model, [prompt], request)
        assert by_torch[1].paths == {"blocks"}
        assert by_kernel[1].paths == {"compiled"}
        torch.testing.assert_close(by_kernel[1].probabilities, by_torch[1].probabilities, atol=1e-6, rtol=0)
        assert by_kernel[1].sums is not None
        assert by_torch[1].sums is not None
        np.testing.assert_allclose(by_kernel[1].sums.entropy, by_torch[1].sums.entropy, rtol=1e-5)
        for less, path in (
            (Request(needs=frozenset({"first_token"})), "fused"),
            (Request(maps=frozenset({1})), "blocks"),
            (Request(needs=frozenset({"received"})), "blocks"),
        ):
            [found] = capture(model, [prompt], less)
            assert found[1].paths == {path}  # which costs less still


class TestTrust:
    @pytest.fixture(autouse=True)
    def anew(self) -> Iterator[None]:
        trusted_kernel.cache_clear()
        yield
        trusted_kernel.cache_clear()

    def test_numba_need_not_be_there(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setitem(sys.modules, "numba", None)
        assert trusted_kernel() is None
        assert not caplog.text

    def test_a_numba_that_does_not_go_with_numpy(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Refusing:
            def find_spec(self, name: str, *rest: Any) -> None:
                if name == "numba":
                    raise ImportError("Numba needs NumPy 2.5 or less. Got NumPy 3.0.")

        monkeypatch.delitem(sys.modules, "numba")
        monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
        self.refused(caplog, "Numba needs NumPy 2.5 or less")

    def test_nor_is_it_used_where_it_would_interpret(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """NUMBA_DISABLE_JIT=1: a hundred times slower than torch."""
        import numba

        monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
        assert trusted_kernel() is None

    @pytest.mark.parametrize("factor", [1 + 1e-4, NAN])
    def test_a_kernel_that_computes_something_else(
        self, factor: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        right = row_kernel.reduce_rows

        def wrong(scores: torch.Tensor, **more: Any) -> None:
            right(scores, **more)
            more["scores_mean"] *= factor

        monkeypatch.setattr(row_kernel, "reduce_rows", wrong)
        self.refused(caplog, "is off by")

    def test_a_kernel_that_cannot_be_compiled(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def failing(*args: Any, **more: Any) -> None:
            raise OSError("No space left on device\nand more")

        monkeypatch.setattr(row_kernel, "reduce_rows", failing)
        self.refused(caplog, "No space left on device\n")

    def refused(self, caplog: pytest.LogCaptureFixture, why: str) -> None:
        """With one warning for however many layers."""
        logging.getLogger("gattn_viz").propagate = True  # the command line turns it off
        assert trusted_kernel() is None
        assert trusted_kernel() is None
        assert why in caplog.text
        assert caplog.text.count("attention takes longer") == 1

    def test_nowhere_to_keep_what_was_compiled(self) -> None:
        """A function whose source is no file: numba has no place for it, as on a disk that cannot be written."""
        scope: dict[str, Any] = {}
        exec("def twice(x):\n    return 2 * x", scope)
        assert row_kernel._kept_on_disk(scope["twice"])(21) == 42
