"""Capture against the eager weights of the model itself, and: nothing of the model is changed by it."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gattn_viz.capture import attention, blocks
from gattn_viz.capture.collector import Collector, LayerCapture, Request
from gattn_viz.capture.run import capture, capture_batch, stream
from gattn_viz.errors import GattnVizError
from gattn_viz.metrics.layer import NEEDS
from tests.conftest import GATES, tiny_model

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def stock_models() -> dict[str, PreTrainedModel]:
    torch.manual_seed(0)
    window = {**SIZES, "sliding_window": 3}
    gpt2 = GPT2Config(
        vocab_size=300, n_embd=32, n_layer=3, n_head=4, n_positions=64, initializer_range=0.3, pad_token_id=0
    )
    moe = {**SIZES, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SIZES)),
        "mistral, window": MistralForCausalLM(MistralConfig(**window)),
        "gemma2, softcap": Gemma2ForCausalLM(
            Gemma2Config(**window, attn_logit_softcapping=1.0, query_pre_attn_scalar=8)
        ),
        "gpt2": GPT2LMHeadModel(gpt2),
        "gpt_oss, learned sinks": GptOssForCausalLM(GptOssConfig(**moe)),
    }


STOCK = stock_models()


def ids(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 300, (length,), generator=generator).tolist() for length in lengths]


def eager(model: PreTrainedModel, prompt: list[int]) -> tuple[torch.Tensor, ...]:
    """The weights that the model's own eager attention returns, a (H, T, T) for each layer."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            out = model.eval()(torch.tensor([prompt]), output_attentions=True, use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return tuple(weights[0] for weights in out.attentions)


ALL = Request(maps=frozenset({1, 2, 3}), needs=NEEDS, gates=frozenset({1, 2, 3}), outputs=frozenset({1, 2, 3}))


class TestMaps:
    @pytest.mark.parametrize("variant", GATES)
    @pytest.mark.parametrize("tokens", [1, 2, 7, 33])
    def test_are_those_of_the_eager_path(self, variant: str, tokens: int) -> None:
        model = tiny_model(variant)
        [prompt] = ids(tokens)
        [layers] = capture(model, [prompt], Request(maps=frozenset({1, 3})))
        assert sorted(layers) == [1, 2, 3]
        assert layers[2].probabilities is None
        weights = eager(model, prompt)
        for layer in (1, 3):
            torch.testing.assert_close(layers[layer].probabilities, weights[layer - 1], atol=2e-6, rtol=0)

    @pytest.mark.parametrize("name", STOCK)
    def test_are_those_of_transformers(self, name: str) -> None:
        model = STOCK[name].eval()
        [prompt] = ids(11)
        [layers] = capture(model, [prompt], Request(maps=frozenset({1, 2, 3})))
        for layer, weights in enumerate(eager(model, prompt), start=1):
            torch.testing.assert_close(layers[layer].probabilities, weights, atol=5e-6, rtol=0)

    def test_blocks_cover_long_prompts(self) -> None:
        model = tiny_model("gate_headwise", max_position_embeddings=512)
        [prompt] = ids(2 * blocks.MOST_ROWS + 37)
        [layers] = capture(model, [prompt], Request(maps=frozenset({1}), needs=NEEDS))
        weights = eager(model, prompt)[0]
        torch.testing.assert_close(layers[1].probabilities, weights, atol=2e-6, rtol=0)
        np.testing.assert_allclose(layers[1].sums.received, weights.sum(1).numpy(), atol=1e-4)

    def test_of_some_heads_and_of_their_mean(self) -> None:
        model = tiny_model("baseline")
        [prompt] = ids(9)
        weights = eager(model, prompt)[1]
        for heads, expected in (
            ((4, 2), weights[[3, 1]]),
            ("mean", weights.mean(0, keepdim=True)),
            (None, weights),
        ):
            [layers] = capture(model, [prompt], Request(maps=frozenset({2}), heads=heads))
            torch.testing.assert_close(layers[2].probabilities, expected, atol=2e-6, rtol=0)

    def test_of_a_bf16_model_are_nearer_the_truth_than_its_own_eager_weights(self) -> None:
        model = tiny_model("gate_elementwise")
        [prompt] = ids(40)
        low = tiny_model("gate_elementwise").to(torch.bfloat16)
        # the truth about the first layer of the bf16 model: its own queries and keys, in float64
        exact = tiny_model("gate_elementwise").to(torch.bfloat16).to(torch.float64)
        truth = eager(exact, prompt)[0].double()
        [layers] = capture(low, [prompt], Request(maps=frozenset({1})))
        ours = layers[1].probabilities
        assert ours.dtype == torch.float32
        theirs = eager(low, prompt)[0].double()
        assert (ours - truth).abs().mean() < (theirs - truth).abs().mean()
        torch.testing.assert_close(
            ours, capture(model, [prompt], Request(maps=frozenset({1})))[0][1].probabilities, atol=0.1, rtol=0
        )


class TestGatesAndOutputs:
    @pytest.mark.parametrize("variant", ["gate_headwise", "gate_elementwise"])
    def test_are_what_the_formula_says(self, variant: str) -> None:
        model = tiny_model(variant)
        [prompt] = ids(8)
        [layers] = capture(model, [prompt], ALL)
        channels = 1 if variant == "gate_headwise" else 8
        for layer in layers.values():
            assert layer.gate_logits.shape == layer.gate_scores.shape == (8, 4, channels)
            torch.testing.assert_close(layer.gate_scores, 1 / (1 + torch.exp(-layer.gate_logits)))
            torch.testing.assert_close(layer.output_after, layer.output_before * layer.gate_scores)
            expected = layer.gate_scores.double().mean((0, 2)).numpy()
            np.testing.assert_allclose(layer.sums.gate_mean, expected, atol=1e-6)

    def test_first_layer_by_hand(self) -> None:
        """Gate logits, values and output of layer 1 from the weights alone, KV group by KV group."""
        model = tiny_model("gate_headwise")
        [prompt] = ids(5)
        [layers] = capture(model, [prompt], ALL)
        first = model.model.layers[0]
        with torch.no_grad():
            x = first.input_layernorm(model.model.embed_tokens(torch.tensor(prompt)))
            # rows of q_proj, for each of 2 KV heads: 2 x 8 of queries, then 2 of gates
            rows = first.self_attn.q_proj.weight
            gates = torch.cat([rows[16:18], rows[34:36]])
            torch.testing.assert_close(layers[1].gate_logits[..., 0], x @ gates.T)
            values = (x @ first.self_attn.v_proj.weight.T).view(5, 2, 8)
        norms = values.norm(dim=-1).T.repeat_interleave(2, 0)
        np.testing.assert_allclose(layers[1].sums.value_norm, norms.numpy(), rtol=1e-5)
        expected = torch.einsum("hqk,khd->qhd", layers[1].probabilities, values.repeat_interleave(2, 1))
        torch.testing.assert_close(layers[1].output_before, expected, atol=1e-5, rtol=1e-5)

    def test_baseline_has_no_gate(self) -> None:
        [layers] = capture(tiny_model("baseline"), ids(4), ALL)
        for layer in layers.values():
            assert layer.gate_logits is None
            assert layer.gate_scores is None
            assert layer.sums.gate_mean is None


class TestResidualStream:
    @pytest.mark.parametrize("name", ["ours", *STOCK])
    def test_extremes_are_those_of_the_hidden_states(self, name: str) -> None:
        model = tiny_model("gate_headwise") if name == "ours" else STOCK[name].eval()
        [prompt] = ids(6)
        [layers] = capture(model, [prompt], Request(needs=NEEDS))
        model.set_attn_implementation("eager")  # older transformers drop the softcap under SDPA
        with torch.no_grad():
            states = model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False).hidden_states
        # the last hidden state of transformers is after the final norm: compare the others
        for layer in (1, 2):
            size = states[layer][0].abs().tolist()
            flat = sorted(value for row in size for value in row)
            sums = layers[layer].sums
            assert sums.max_activation == pytest.approx(flat[-1], rel=1e-5)
            found = size[sums.max_activation_position][sums.max_activation_channel]
            assert found == pytest.approx(flat[-1], rel=1e-5)
            assert sums.median_activation == pytest.approx(statistics.median(flat), rel=1e-4)

    def test_tokens_that_differ_by_rounding_alone(self) -> None:
        """Of several as large the first is named, however the prompt is cut."""
        model = tiny_model("baseline")
        for chunk in (None, 1, 2, 5):
            [layers] = capture(model, [[7] * 9], Request(needs=frozenset({"residual"})), chunk=chunk)
            assert [layer.sums.max_activation_position for layer in layers.values()] == [0, 0, 0]

    @pytest.mark.parametrize("chunk", [None, 1, 2])
    def test_where_the_largest_is(self, chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
        """By hand: the second token's largest is as large as the third's, within 1 %; the median is of all."""
        size = torch.tensor([[[1.0, -2, 3], [0, -299, 5], [300, 0, 6]]])
        end_layer = Collector.end_layer

        def with_these(self: Collector, residual: torch.Tensor) -> None:
            end_layer(self, size[:, self.chunk.start : self.chunk.stop])

        monkeypatch.setattr(Collector, "end_layer", with_these)
        [layers] = capture(tiny_model("baseline"), ids(3), Request(needs=frozenset({"residual"})), chunk=chunk)
        for layer in layers.values():
            sums = layer.sums
            assert (sums.max_activation, sums.median_activation) == (300, 3)
            assert (sums.max_activation_position, sums.max_activation_channel) == (1, 1)


class TestPadding:
    @settings(deadline=None, max_examples=15)
    @given(
        lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
        batch_size=st.integers(1, 4),
        seed=st.integers(0, 99),
    )
    def test_batches_change_nothing(self, lengths: list[int], batch_size: int, seed: int) -> None:
        model = tiny_model("gate_elementwise")
        prompts = ids(*lengths, seed=seed)
        together = capture(model, prompts, ALL, batch_size=batch_size)
        for prompt, layers in zip(prompts, together, strict=True):
            [alone] = capture(model, [prompt], ALL)
            assert_same(layers, alone)

    def test_left_padding_changes_nothing(self) -> None:
        for model in (tiny_model("gate_headwise"), STOCK["gpt2"].eval(), STOCK["mistral, window"].eval()):
            [prompt] = ids(6)
            [alone] = capture(model, [prompt], ALL)
            layers: dict[int, LayerCapture] = {}

            def keep(sequence: int, layer: LayerCapture, layers: dict[int, LayerCapture] = layers) -> None:
                if sequence == 0:
                    layers[layer.layer] = layer

            padded = torch.tensor([[7, 7, 7, *prompt], ids(9, seed=5)[0]])
            mask = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
            capture_batch(model, padded, mask, ALL, keep)
            assert_same(layers, alone)

    def test_gaps_and_empty_sequences_are_refused(self) -> None:
        model = tiny_model("baseline")
        for row, message in (([1, 0, 1], "gap"), ([0, 0, 0], "no tokens")):
            with pytest.raises(GattnVizError, match=message):
                capture_batch(model, torch.tensor([[5, 6, 7]]), torch.tensor([row]), ALL, lambda *_: None)


def assert_same(ours: dict[int, LayerCapture], other: dict[int, LayerCapture]) -> None:
    assert ours.keys() == other.keys()
    for layer in ours:
        for name in ("probabilities", "gate_logits", "gate_scores", "output_before", "output_after"):
            a, b = getattr(ours[layer], name), getattr(other[layer], name)
            if b is None:
                assert a is None
            else:
                torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
        a, b = ours[layer].sums, other[layer].sums
        for name in (
            "first_token",
            "first_row",
            "received",
            "entropy",
            "entropy_ratio",
            "row_max",
            "value_norm",
            "max_activation",
        ):
            np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=1e-4, rtol=1e-4)
        assert (a.tokens, a.ratio_queries) == (b.tokens, b.ratio_queries)


class TestNothingIsChanged:
    def state(self, model: PreTrainedModel) -> tuple[object, ...]:
        hooks = [
            (name, len(module._forward_hooks), len(module._forward_pre_hooks))
            for name, module in model.named_modules()
        ]
        modes = [(name, module.training) for name, module in model.named_modules()]
        return hooks, modes, model.config._attn_implementation, model.config.to_dict()

    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_after_a_run(self, implementation: str) -> None:
        model = tiny_model("gate_headwise")
        model.set_attn_implementation(implementation)
        model.train()
        model.model.layers[1].eval()  # a mixture that must come back as it was
        before = self.state(model)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        capture(model, ids(5, 3), ALL, batch_size=2)
        assert self.state(model) == before
        assert attention.active_taker.get() is None
        for name, value in model.state_dict().items():
            assert torch.equal(value, weights[name])
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_when_it_raises(self) -> None:
        model = tiny_model("gate_headwise")
        before = self.state(model)

        def fail(sequence: int, layer: LayerCapture) -> None:
            if layer.layer == 2:
                raise KeyError("from the caller")

        with pytest.raises(KeyError, match="from the caller"):
            stream(model, ids(5), ALL, fail)
        assert self.state(model) == before
        assert attention.active_taker.get() is None
        capture(model, ids(5), ALL)  # and it can be run again

    def test_dropout_is_off_during_the_run(self) -> None:
        model = tiny_model("baseline", attention_dropout=0.9).train()
        first, second = (capture(model, ids(8), ALL)[0] for _ in range(2))
        assert_same(first, second)

    def test_output_of_the_model_is_exact(self) -> None:
        """What a later layer sees is what it would see without a capture."""
        model = tiny_model("gate_elementwise")
        [prompt] = ids(30)
        states = []
        handle = model.model.norm.register_forward_hook(lambda module, args, output: states.append(output))
        capture(model, [prompt], Request(needs=NEEDS))
        with torch.no_grad():
            model(torch.tensor([prompt]))
        handle.remove()
        # the first run was on a few tokens, to see what the layers are made of
        torch.testing.assert_close(states[-2], states[-1], atol=2e-5, rtol=1e-5)


class TestErrors:
    def test_layers_and_heads_that_are_not_there(self) -> None:
        model = tiny_model("baseline")
        for layer in (0, 4, -1):
            for request in (Request(maps=frozenset({layer})), Request(gates=frozenset({layer}))):
                with pytest.raises(
                    GattnVizError, match=rf"^no layer {layer}: this model has 3 layers; expected 1 to 3$"
                ):
                    capture(model, ids(3), request)
        with pytest.raises(GattnVizError, match=r"^no head 5: this model has 4 heads a layer; expected 1 to 4$"):
            capture(model, ids(3), Request(maps=frozenset({1}), heads=(1, 5)))

    def test_the_attention_function_outside_a_capture(self) -> None:
        model = tiny_model("baseline")
        model.set_attn_implementation(attention.IMPLEMENTATION)
        with pytest.raises(GattnVizError, match=r"runs inside gattn_viz\.capture only"):
            model(torch.tensor(ids(3)))


def test_layers_are_handed_on_one_at_a_time() -> None:
    """No layer's map is alive when the next layer is through, unless the caller keeps it."""
    import gc
    import weakref

    model = tiny_model("baseline")
    alive: list[weakref.ref[torch.Tensor]] = []

    def look(sequence: int, layer: LayerCapture) -> None:
        gc.collect()
        assert [map_() for map_ in alive] == [None] * len(alive)
        alive.append(weakref.ref(layer.probabilities))

    stream(model, ids(5), Request(maps=frozenset({1, 2, 3})), look)
    assert len(alive) == 3


def test_learned_sinks_take_part_in_the_softmax() -> None:
    [layers] = capture(STOCK["gpt_oss, learned sinks"].eval(), ids(5), Request(maps=frozenset({1})))
    rows = layers[1].probabilities.sum(-1)
    assert (rows <= 1 + 1e-6).all()
    assert (rows < 0.9).any()


@pytest.mark.gpu
def test_cuda_equals_cpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = tiny_model("gate_elementwise")
    prompts = ids(9, 4)
    here = capture(model, prompts, ALL, batch_size=2)
    there = capture(model.to("cuda"), prompts, ALL, batch_size=2)
    for ours, other in zip(there, here, strict=True):
        assert_same(ours, other)
