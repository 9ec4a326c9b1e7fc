"""Where a capture could go wrong without a word: other runs of the model, NaN, autocast, chunks of padding."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Thread
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertLMHeadModel,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from gattn_viz.capture import collector, fused, run
from gattn_viz.capture.anatomy import anatomy
from gattn_viz.capture.attention import active_taker
from gattn_viz.capture.collector import LayerCapture, Request
from gattn_viz.capture.run import capture, capture_batch, check_cache, stream
from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.layer import NEEDS
from tests.capture.families import SIZES, family_model, family_model_in
from tests.capture.test_blocks import attention
from tests.capture.test_run import ALL, assert_same, ids
from tests.conftest import tiny_model

FIRST_TOKEN = Request(needs=frozenset({"first_token"}))


def logits(model: PreTrainedModel, prompt: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([prompt]), use_cache=False).logits


def in_a_thread(work: Callable[[], Any]) -> BaseException | None:
    """What it raised."""
    raised: list[BaseException | None] = [None]

    def catch() -> None:
        try:
            work()
        except BaseException as error:
            raised[0] = error

    thread = Thread(target=catch)
    thread.start()
    thread.join()
    return raised[0]


class TestOtherRunsOfTheModel:
    def during(self, model: PreTrainedModel, work: Callable[[], Any]) -> None:
        """A capture within which `work` is called, after layer 2, is as without it."""
        expected = capture(model, ids(7), ALL)
        found: dict[int, LayerCapture] = {}

        def on_layer(prompt: int, layer: LayerCapture) -> None:
            found[layer.layer] = layer
            if layer.layer == 2:
                work()

        stream(model, ids(7), ALL, on_layer)
        assert_same(found, expected[0])
        assert model.config._attn_implementation == "sdpa"
        torch.testing.assert_close(logits(model, ids(7)[0]), logits(tiny_model("gate_headwise"), ids(7)[0]))

    @pytest.mark.parametrize("elsewhere", [False, True], ids=["in on_layer", "in another thread"])
    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (lambda model: logits(model, [5, 6]), "is run while its model is being captured"),
            (
                lambda model: model.model.layers[2].self_attn(*layer_input()),
                "is run while its model is being captured",
            ),
            (lambda model: capture(model, [[5, 6]], FIRST_TOKEN), "is being captured already"),
            (lambda model: check_batch(model), "is being captured already"),
            (lambda model: logits(other_of(model), [5, 6]), "is run while its model is being captured"),
            (lambda model: capture(other_of(model), [[5, 6]], FIRST_TOKEN), "is being captured already"),
        ],
        ids=["a run", "a run of a layer", "a capture", "a batch", "a run of a twin", "a capture of a twin"],
    )
    def test_are_refused_and_change_nothing(self, other: Any, message: str, elsewhere: bool) -> None:
        model = tiny_model("gate_headwise")

        def work() -> None:
            error = in_a_thread(lambda: other(model)) if elsewhere else None
            if not elsewhere:
                with pytest.raises(GattnVizError) as info:
                    other(model)
                error = info.value
            assert isinstance(error, GattnVizError), error
            assert message in str(error)

        self.during(model, work)

    @pytest.mark.parametrize("elsewhere", [False, True])
    def test_other_models_are_let_alone(self, elsewhere: bool) -> None:
        model, other = tiny_model("gate_headwise"), tiny_model("gate_elementwise")
        expected = capture(other, ids(5), ALL)[0], logits(other, [5, 6])

        def work() -> None:
            def both() -> None:
                assert_same(capture(other, ids(5), ALL)[0], expected[0])
                torch.testing.assert_close(logits(other, [5, 6]), expected[1])

            error = in_a_thread(both) if elsewhere else both()
            assert error is None, error

        self.during(model, work)

    def test_between_prompts_the_model_may_be_run(self) -> None:
        model, seen = tiny_model("baseline"), []
        expected = logits(model, [5, 6])
        stream(
            model, ids(3, 4), FIRST_TOKEN, lambda *_: None, lambda prompt, _: seen.append(logits(model, [5, 6]))
        )
        for found in seen:
            torch.testing.assert_close(found, expected)

    def test_models_in_threads_at_the_same_time(self) -> None:
        models = [tiny_model("gate_headwise", seed=seed) for seed in range(3)]
        expected = [capture(model, ids(9, 4), ALL) for model in models]
        together = Barrier(3)

        def work(model: PreTrainedModel) -> list[dict[int, LayerCapture]]:
            def on_layer(prompt: int, layer: LayerCapture) -> None:
                together.wait(60)  # all of them are in the middle of theirs
                found[prompt][layer.layer] = layer

            found: list[dict[int, LayerCapture]] = [{}, {}]
            stream(model, ids(9, 4), ALL, on_layer)
            return found

        with ThreadPoolExecutor(3) as pool:
            for found, right in zip(pool.map(work, models), expected, strict=True):
                for ours, other in zip(found, right, strict=True):
                    assert_same(ours, other)


def layer_input() -> tuple[Tensor, tuple[Tensor, Tensor]]:
    return torch.ones(1, 2, 32), (torch.ones(1, 2, 8), torch.zeros(1, 2, 8))


def other_of(model: PreTrainedModel) -> PreTrainedModel:
    """Another model with the same configuration, not a copy of it."""
    return type(model)(model.config).eval()


def check_batch(model: PreTrainedModel) -> None:
    batch = torch.tensor([[5, 6]])
    capture_batch(model, batch, torch.ones_like(batch), FIRST_TOKEN, lambda *_: None)


class TestAfterAnError:
    @pytest.mark.parametrize("chunk", [None, 3])
    @pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, RuntimeError, KeyboardInterrupt])
    @pytest.mark.parametrize("where", ["attend", "add_gate", "end_layer", "_finish"])
    def test_the_model_is_as_before(
        self, where: str, error: type[BaseException], chunk: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = tiny_model("gate_headwise").train()
        expected = capture(model, ids(7), ALL)[0]
        hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
        calls = []

        def fail(*args: Any) -> None:
            calls.append(args)
            if len(calls) == 2:
                raise error("DefaultCPUAllocator: can't allocate memory")
            return right(*args)

        right = getattr(collector.Collector, where)
        with monkeypatch.context() as patch:
            patch.setattr(collector.Collector, where, fail)
            with pytest.raises(error):
                capture(model, ids(7), ALL, chunk=chunk)
        assert model.training
        assert model.config._attn_implementation == "sdpa"
        assert active_taker.get() is None
        assert hooks == sum(
            len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
        )
        assert_same(capture(model, ids(7), ALL)[0], expected)

    def test_of_the_loss(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_model("baseline")
        expected = logits(model, [5, 6, 7])
        with monkeypatch.context() as patch:
            patch.setattr(model.lm_head, "forward", lambda x: (_ for _ in ()).throw(MemoryError()))
            with pytest.raises(MemoryError):
                capture(model, [[5, 6, 7]], Request(loss=True))
        torch.testing.assert_close(logits(model, [5, 6, 7]), expected)


class TestNaN:
    """Of a query whose scores are all NaN, torch's CPU kernel gives 0 for short prompts."""

    @pytest.mark.parametrize("tokens", [1, 70])
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
    @pytest.mark.parametrize("where", ["q", "k", "one of q", "one of k"])
    def test_scores_that_are_not_finite_are_not_for_the_kernel(self, where: str, bad: float, tokens: int) -> None:
        a = attention(tokens)
        tensor = a.q if where.endswith("q") else a.k
        tensor[(0,) * tensor.dim() if where.startswith("one") else ...] = bad
        if bad == 1e30:
            (a.k if tensor is a.q else a.q).fill_(1e30)  # finite both, but their product is not
        assert not fused.can_fuse(a)
        assert fused.can_fuse(attention(tokens))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("weight", ["q_proj", "k_proj", "v_proj"])
    @pytest.mark.parametrize(
        "request_",
        [
            Request(maps=frozenset({3})),
            Request(needs=frozenset({"values"})),
            Request(needs=frozenset({"first_token"})),
            Request(outputs=frozenset({3})),
        ],
        ids=["maps", "values", "first_token", "outputs"],
    )
    def test_is_seen_in_the_layers_after_it(self, request_: Request, weight: str, dtype: torch.dtype) -> None:
        model = tiny_model("baseline").to(dtype)
        with torch.no_grad():
            getattr(model.model.layers[1].self_attn, weight).weight.fill_(torch.nan)
        [layers] = capture(model, ids(5), request_)
        last = layers[3]
        if last.sums is None:
            numbers = (last.probabilities if last.output_before is None else last.output_before).numpy()
        else:
            numbers = last.sums.value_norm if last.sums.first_token is None else last.sums.first_token
        assert np.isnan(numbers[-1]).any()


class TestAutocast:
    @pytest.mark.parametrize("tokens", [9, 40])
    @pytest.mark.parametrize(
        "request_", [FIRST_TOKEN, Request(maps=frozenset({1}), needs=NEEDS)], ids=["fused", "blocks"]
    )
    def test_attention_is_that_of_the_queries_and_keys_in_float64(
        self, request_: Request, tokens: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = []
        right = collector.Collector.attend

        def attend(self: collector.Collector, a: Any) -> Tensor:
            output = right(self, a)
            seen.append((a, output))
            return output

        monkeypatch.setattr(collector.Collector, "attend", attend)
        model = tiny_model("gate_elementwise")
        with torch.autocast("cpu", torch.bfloat16):
            [layers] = capture(model, ids(tokens), request_)
        a, output = seen[0]
        scores = a.scale * torch.einsum("qkgd,ktd->kgqt", a.q.double(), a.k.double()).flatten(0, 1)
        p = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf).softmax(-1)
        np.testing.assert_allclose(layers[1].sums.first_token, p[:, 1:, 0].sum(-1).numpy(), rtol=2e-6)
        expected = torch.einsum("hqt,htd->qhd", p, a.v.double().repeat_interleave(2, 0))
        torch.testing.assert_close(output.flatten(1, 2).double(), expected, atol=1e-5, rtol=0)
        if layers[1].probabilities is not None:
            torch.testing.assert_close(layers[1].probabilities.double(), p, atol=2e-6, rtol=0)
            entropy = torch.special.entr(p).sum((-1, -2))
            np.testing.assert_allclose(layers[1].sums.entropy, entropy.numpy(), rtol=2e-5)

    def test_checks_hold(self) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            assert anatomy(tiny_model("gate_elementwise")).gate_kind == "elementwise"
            check_cache(tiny_model("baseline"))


class TestChunks:
    @pytest.mark.parametrize("name", ["gate_headwise", "mistral", "qwen3_next"])
    @pytest.mark.parametrize("request_", [FIRST_TOKEN, Request(needs=NEEDS)], ids=["first_token", "all"])
    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize("chunk", [1, 4])
    def test_of_padding_only(self, chunk: int, side: str, request_: Request, name: str) -> None:
        """Nine tokens and two; on the right, both are padded by three more."""
        model, prompts = family_model(name), ids(9, 2)
        rows = [torch.tensor(prompt) for prompt in prompts]
        batch, mask = (
            torch.nn.utils.rnn.pad_sequence(x, batch_first=True, padding_side=side)
            for x in (rows, [torch.ones_like(row) for row in rows])
        )
        if side == "right":
            batch, mask = (torch.nn.functional.pad(x, (0, 3)) for x in (batch, mask))
        found: list[dict[int, LayerCapture]] = [{}, {}]
        capture_batch(
            model, batch, mask, request_, lambda row, layer: found[row].update({layer.layer: layer}), chunk=chunk
        )
        for ours, alone in zip(found, capture(model, prompts, request_), strict=True):
            assert ours.keys() == alone.keys()
            for layer in alone:
                np.testing.assert_allclose(ours[layer].sums.first_token, alone[layer].sums.first_token, atol=2e-5)
                if request_ is not FIRST_TOKEN:
                    np.testing.assert_allclose(ours[layer].sums.received, alone[layer].sums.received, atol=2e-5)
                    np.testing.assert_allclose(
                        ours[layer].sums.value_norm, alone[layer].sums.value_norm, rtol=1e-4
                    )

    def test_paths_are_those_that_computed(self) -> None:
        prompts = ids(9, 2)
        for layers in capture(tiny_model("baseline"), prompts, FIRST_TOKEN, batch_size=2, chunk=3):
            assert {layer.paths for layer in layers.values()} == {frozenset({"fused"})}
        # a window of 10: the first chunk sees all keys, the second does not
        [layers] = capture(family_model("mistral"), ids(16), FIRST_TOKEN, chunk=8)
        assert {layer.paths for layer in layers.values()} == {frozenset({"fused", "blocks"})}

    def test_the_cache_is_checked_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        checked: list[PreTrainedModel] = []
        monkeypatch.setattr(run, "check_cache", checked.append)
        model = tiny_model("baseline")
        capture(model, ids(5, 6, 7), FIRST_TOKEN, chunk=4)
        assert checked == [model]
        capture(model, ids(3, 4), FIRST_TOKEN, chunk=4)  # no prompt has a second chunk
        assert checked == [model]


class TestModelsOfAnotherShape:
    def multimodal(self) -> PreTrainedModel:
        torch.manual_seed(0)
        vision = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
        }
        text = {**SIZES, "layer_types": ["full_attention"] * 2}
        config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
        return Gemma3ForConditionalGeneration(config).eval()

    def test_a_vision_tower_of_as_many_layers(self) -> None:
        model = self.multimodal()
        [layers] = capture(model, ids(6), Request(maps=frozenset({1, 2})))
        model.set_attn_implementation("eager")
        with torch.no_grad():
            weights = model(torch.tensor(ids(6)), output_attentions=True, use_cache=False).attentions
        for layer in (1, 2):
            torch.testing.assert_close(layers[layer].probabilities, weights[layer - 1][0], atol=2e-6, rtol=0)

    def test_parts_with_an_attention_of_their_own_keep_it(self) -> None:
        model = self.multimodal()
        model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})

        def of_each() -> list[str]:
            configs = (model.config, model.config.text_config, model.config.vision_config)
            return [config._attn_implementation for config in configs]

        before = of_each()
        assert before[1:] == ["eager", "sdpa"]
        capture(model, ids(6), FIRST_TOKEN)
        assert of_each() == before

    def test_an_encoder(self) -> None:
        config = BertConfig(
            vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
        )
        with pytest.raises(
            GattnVizError, match=r"BertEncoder, .* takes no token ids; expected a decoder that does"
        ):
            capture(BertLMHeadModel(config).eval(), ids(4), FIRST_TOKEN)

    def test_queries_that_see_what_comes_after_them(self) -> None:
        config = Gemma3TextConfig(**SIZES, use_bidirectional_attention=True)
        with pytest.raises(
            GattnVizError, match=r"queries of Gemma3Attention see keys after them; expected causal"
        ):
            capture(Gemma3ForCausalLM(config).eval(), ids(6), FIRST_TOKEN)

    def test_weights_that_are_offloaded(self) -> None:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
        request = Request(maps=frozenset({1}), needs=NEEDS)
        expected = capture(model, ids(5), request)[0]
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert model.get_input_embeddings().weight.device.type == "meta"
        found = capture(model, ids(5), request)[0]
        for layer in (1, 2):
            np.testing.assert_allclose(found[layer].sums.entropy, expected[layer].sums.entropy)

    def test_layers_that_are_numbered_otherwise(self) -> None:
        model = tiny_model("baseline")
        model.model.layers[2].self_attn.layer_idx = 7
        assert_same(capture(model, ids(5), ALL)[0], capture(tiny_model("baseline"), ids(5), ALL)[0])

    def test_two_attentions_of_one_layer(self) -> None:
        model = tiny_model("baseline")
        attention = model.model.layers[0].self_attn
        once = attention.forward
        attention.forward = lambda **kwargs: (once(**kwargs), once(**kwargs))[1]
        with pytest.raises(GattnVizError, match=r"layer 1 attends more than once, in GatedQwen3Attention"):
            capture(model, ids(5), FIRST_TOKEN)

    def test_attention_outside_of_the_layers(self) -> None:
        model = tiny_model("baseline")
        model.model.layers[0].register_forward_pre_hook(
            lambda layer, args, kwargs: layer.self_attn(args[0], **kwargs) and None, with_kwargs=True
        )
        with pytest.raises(GattnVizError, match=r"GatedQwen3Attention attends outside of the model's layers"):
            capture(model, ids(5), FIRST_TOKEN)

    @pytest.mark.gpu
    @pytest.mark.parametrize("name", ["mistral", "gemma2", "gate_elementwise"])
    def test_layers_on_two_devices(self, name: str) -> None:
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        model = family_model_in(name, torch.float32)  # a copy
        request = Request(maps=frozenset({1, 2}), needs=NEEDS, loss=True)
        expected = capture(model, ids(30), request)[0]
        parts = [f"model.{part}" for part, _ in model.model.named_children() if part != "layers"]
        devices = dict.fromkeys([*parts, "lm_head"], "cpu")
        for index in range(len(model.model.layers)):
            devices[f"model.layers.{index}"] = "cuda:0" if index % 2 else "cpu"
        model = accelerate.dispatch_model(model, devices, main_device="cpu")
        found = capture(model, ids(30), request)[0]
        for layer in expected:
            torch.testing.assert_close(
                found[layer].probabilities, expected[layer].probabilities, atol=1e-4, rtol=0
            )
