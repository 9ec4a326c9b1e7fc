"""The gated Qwen3 as a transformers model: names, files, dtypes, caches, generation, implementations, devices."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    Qwen3Config,
    Qwen3ForCausalLM,
    StaticCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_flash_attn_2_available

from gattn_viz.models.attention import GatedQwen3Attention
from gattn_viz.models.configuration import GatedQwen3Config
from gattn_viz.models.modeling import GatedQwen3ForCausalLM, GatedQwen3Model
from tests.models.conftest import (
    CACHE,
    GATED,
    VARIANTS,
    GateRecorder,
    padding_mask,
    random_ids,
    tiny_config,
    tiny_model,
    with_implementation,
)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
needs_flash = pytest.mark.skipif(not is_flash_attn_2_available(), reason="flash-attn is not installed")

every_variant = pytest.mark.parametrize("variant", VARIANTS)
either_tied = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
sdpa_and_eager = pytest.mark.parametrize("implementation", ["sdpa", "eager"])

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


# --- names and sizes ---------------------------------------------------------------------------------------------


def test_parameter_names_are_the_official_ones() -> None:
    model = tiny_model(tiny_config("gate_headwise", qkv_bias=True, use_qk_norm=True))
    assert sorted(model.state_dict()) == [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.self_attn.k_norm.weight",
        "model.layers.0.self_attn.k_proj.bias",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.o_proj.bias",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.v_proj.bias",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.layers.1.self_attn.k_norm.weight",
        "model.layers.1.self_attn.k_proj.bias",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.self_attn.o_proj.bias",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.self_attn.v_proj.bias",
        "model.layers.1.self_attn.v_proj.weight",
        "model.norm.weight",
    ]


@every_variant
def test_names_without_bias_and_norm(variant: str) -> None:
    names = tiny_model(tiny_config(variant, use_qk_norm=False)).state_dict()
    assert sorted(name for name in names if "layers.1.self_attn" in name) == [
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.self_attn.v_proj.weight",
    ]


@pytest.mark.parametrize(
    ("variant", "rows"), [("baseline", 2048), ("gate_headwise", 2064), ("gate_elementwise", 4096)]
)
def test_rows_of_the_official_sizes(variant: str, rows: int) -> None:
    config = tiny_config(
        variant,
        hidden_size=2048,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    )
    with torch.device("meta"):
        attention = GatedQwen3Attention(config, 0)
    assert attention.q_proj.weight.shape == (rows, 2048)
    assert attention.k_proj.weight.shape == attention.v_proj.weight.shape == (1024, 2048)
    assert attention.o_proj.weight.shape == (2048, 2048)


def test_every_layer_is_ours() -> None:
    model = tiny_model(tiny_config())
    assert [type(layer.self_attn) for layer in model.model.layers] == [GatedQwen3Attention] * 2
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1]
    assert type(model.model) is GatedQwen3Model


def test_initial_weights_are_finite_and_small() -> None:
    """As `from_config` makes them for training: normal with initializer_range, biases 0, norms 1."""
    torch.manual_seed(0)
    model = GatedQwen3ForCausalLM(tiny_config(qkv_bias=True))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            assert 0.01 < parameter.std() < 0.03, name


# --- the Auto classes and files ----------------------------------------------------------------------------------


def test_auto_classes() -> None:
    config = tiny_config()
    assert type(AutoModel.from_config(config)) is GatedQwen3Model
    model = AutoModelForCausalLM.from_config(config)
    assert type(model) is GatedQwen3ForCausalLM
    assert type(model.config) is GatedQwen3Config
    assert GatedQwen3ForCausalLM.config_class is GatedQwen3Model.config_class is GatedQwen3Config
    assert type(AutoModelForCausalLM.from_config(Qwen3Config(**small_stock()))) is Qwen3ForCausalLM


def small_stock() -> dict[str, Any]:
    values = tiny_config("baseline").to_dict()
    return {key: values[key] for key in Qwen3Config().to_dict() if key in values and key != "model_type"}


@every_variant
@either_tied
def test_save_and_load(tmp_path: Path, variant: str, tied: bool) -> None:
    model = tiny_model(tiny_config(variant, qkv_bias=True, tie_word_embeddings=tied))
    ids = random_ids(2, 5)
    with torch.no_grad():
        expected = model(ids).logits
    model.save_pretrained(tmp_path)

    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["model.safetensors"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) is not tied  # noqa: SIM118
        names = set(file.keys())
    assert names | {"lm_head.weight"} == set(model.state_dict())
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "gated_qwen3"
    assert written["architectures"] == ["GatedQwen3ForCausalLM"]

    for loader in (GatedQwen3ForCausalLM, AutoModelForCausalLM):
        loaded, info = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is GatedQwen3ForCausalLM
        assert not any(info.values()), info
        assert loaded.config.variant == variant
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), name
        with torch.no_grad():
            torch.testing.assert_close(loaded.eval()(ids).logits, expected, rtol=0, atol=0)

    body = AutoModel.from_pretrained(tmp_path)
    assert type(body) is GatedQwen3Model
    assert torch.equal(body.layers[1].self_attn.q_proj.weight, model.model.layers[1].self_attn.q_proj.weight)


def test_a_checkpoint_of_another_variant_does_not_load_unseen(tmp_path: Path) -> None:
    """q_proj's rows differ, so transformers itself refuses to put one variant's weights into another's model."""
    tiny_model(tiny_config("gate_headwise")).save_pretrained(tmp_path)
    config = tiny_config("baseline")
    with pytest.raises(RuntimeError, match=r"q_proj\.weight|ignore_mismatched_sizes"):
        GatedQwen3ForCausalLM.from_pretrained(tmp_path, config=config)


def test_stock_qwen3_is_silently_wrong_on_a_baseline_with_biases() -> None:
    """Why the project has a baseline class of its own (design.md, section 4)."""
    model = tiny_model(tiny_config("baseline", qkv_bias=True, use_qk_norm=False))
    stock = Qwen3ForCausalLM(Qwen3Config(**small_stock())).eval()
    missing, unexpected = stock.load_state_dict(model.state_dict(), strict=False)
    assert any("q_norm" in name for name in missing)
    assert any("o_proj.bias" in name for name in unexpected)
    with torch.no_grad():
        ids = random_ids(1, 5)
        assert (stock(ids).logits - model(ids).logits).abs().max() > 0.1


# --- dtypes ------------------------------------------------------------------------------------------------------


@every_variant
@sdpa_and_eager
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 0.04), (torch.float16, 0.005)], ids=["bf16", "fp16"]
)
def test_half_precision(variant: str, implementation: str, dtype: torch.dtype, tolerance: float) -> None:
    """The same rounded weights in fp32: a few roundings apart (relative 2^-8 and 2^-11 each)."""
    half = tiny_model(tiny_config(variant, qkv_bias=True)).to(dtype)
    with_implementation(half, implementation)
    full = copy.deepcopy(half).float()
    ids = random_ids(2, 7)
    mask = padding_mask([7, 4], 7, "left")
    with torch.no_grad(), GateRecorder(half) as gates:
        actual = half(ids, attention_mask=mask, output_attentions=True)
        plain = half(ids, attention_mask=mask).logits
        expected = full(ids, attention_mask=mask, output_attentions=True)
    real = mask.bool()
    assert actual.logits.dtype is plain.dtype is dtype
    scale = expected.logits[real].std()
    for logits in (actual.logits, plain):
        assert torch.isfinite(logits).all()
        assert (logits.float() - expected.logits)[real].square().mean().sqrt() < tolerance * scale
    for weights, exact in zip(actual.attentions, expected.attentions, strict=True):
        assert weights.dtype is dtype
        assert torch.isfinite(weights).all()
        assert (weights.float() - exact).transpose(1, 2)[real].abs().max() < 2 * tolerance
    assert all(scores.dtype is dtype for scores in gates.scores)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype_in_files(tmp_path: Path, dtype: torch.dtype) -> None:
    tiny_model(tiny_config()).to(dtype).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["dtype"] == str(dtype).removeprefix("torch.")
    kept = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert {parameter.dtype for parameter in kept.parameters()} == {dtype}
    assert kept.dtype is dtype
    asked = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert {parameter.dtype for parameter in asked.parameters()} == {torch.float32}
    made = AutoModelForCausalLM.from_config(tiny_config(), dtype=dtype)
    assert {parameter.dtype for parameter in made.parameters()} == {dtype}


# --- gradients ---------------------------------------------------------------------------------------------------


def next_token_loss(model: GatedQwen3ForCausalLM, ids: Tensor) -> Tensor:
    return model(ids, labels=ids).loss


@every_variant
@sdpa_and_eager
def test_every_parameter_gets_a_gradient(variant: str, implementation: str) -> None:
    """And every number of it, the rows of the gates among them."""
    model = with_implementation(tiny_model(tiny_config(variant, qkv_bias=True)), implementation).train()
    next_token_loss(model, random_ids(4, 9)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        if "embed_tokens" not in name:  # tokens that do not occur have none
            assert (parameter.grad != 0).all(), name


@pytest.mark.parametrize("variant", GATED)
def test_the_gradient_through_the_gate_is_right(variant: str) -> None:
    """Central differences of a random sum of the logits, over the biases of all gates of the first layer."""
    model = tiny_model(tiny_config(variant, qkv_bias=True)).double()
    channels = model.config.gate_channels
    rows = [r for r in range(4 * (6 + channels)) if r % (2 * (6 + channels)) >= 12]  # 12 query rows a block
    assert len(rows) == 4 * channels
    bias = model.model.layers[0].self_attn.q_proj.bias
    ids = random_ids(4, 9)
    probe = torch.randn(4, 9, 29, generator=torch.Generator().manual_seed(1))
    (model(ids).logits * probe).sum().backward()
    step = 1e-2
    numeric = []
    with torch.no_grad():
        for row in rows:
            bias[row] += step
            above = (model(ids).logits * probe).sum()
            bias[row] -= 2 * step
            below = (model(ids).logits * probe).sum()
            bias[row] += step
            numeric.append((above - below) / (2 * step))
    exact = bias.grad[rows]
    torch.testing.assert_close(torch.stack(numeric), exact, rtol=0, atol=1e-2 * exact.abs().max().item())
    assert exact.abs().max() > 0.1


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_gradient_checkpointing_changes_no_gradient() -> None:
    grads = []
    for checkpointing in (False, True):
        model = tiny_model(tiny_config(qkv_bias=True)).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        next_token_loss(model, random_ids(2, 6)).backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], msg=name)


def test_attention_dropout_is_for_training_only() -> None:
    model = tiny_model(tiny_config(attention_dropout=0.5))
    plain = tiny_model(tiny_config())
    ids = random_ids(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, **CLOSE)
        torch.manual_seed(0)
        assert (model.train()(ids).logits - plain(ids).logits).abs().max() > 0.01


# --- weights on request ------------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_weights_on_request_under_sdpa_are_eager_ones(variant: str, side: str | None) -> None:
    model = tiny_model(tiny_config(variant, group=3))
    ids = random_ids(3, 7)
    mask = None if side is None else padding_mask([7, 4, 1], 7, side)
    real = torch.ones(3, 7, dtype=torch.bool) if mask is None else mask.bool()
    with torch.no_grad():
        sdpa = with_implementation(model, "sdpa")(ids, attention_mask=mask, output_attentions=True)
        eager = with_implementation(model, "eager")(ids, attention_mask=mask, output_attentions=True)
    torch.testing.assert_close(sdpa.logits[real], eager.logits[real], rtol=0, atol=1e-6)
    for actual, expected in zip(sdpa.attentions, eager.attentions, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)  # rows of padding too


def test_no_weights_unless_requested() -> None:
    model = tiny_model(tiny_config())
    with torch.no_grad():
        assert model(random_ids(1, 3)).attentions is None
        assert len(model(random_ids(1, 3), output_attentions=True).attentions) == 2
        assert model(random_ids(1, 3)).attentions is None
    assert model.config._attn_implementation == "sdpa"


def test_hidden_states() -> None:
    model = tiny_model(tiny_config())
    with torch.no_grad():
        hidden = model(random_ids(2, 5), output_hidden_states=True).hidden_states
    assert [tuple(state.shape) for state in hidden] == [(2, 5, 20)] * 3


@every_variant
def test_a_mask_of_ones_is_no_mask(variant: str) -> None:
    model = tiny_model(tiny_config(variant))
    ids = random_ids(2, 5)
    with torch.no_grad():
        bare = model(ids, output_attentions=True)
        ones = model(ids, attention_mask=torch.ones_like(ids), output_attentions=True)
    assert torch.equal(bare.logits, ones.logits)
    assert torch.equal(bare.attentions[1], ones.attentions[1])


@pytest.mark.parametrize("variant", GATED)
def test_sliding_windows(variant: str) -> None:
    """Qwen3's option, on the second layer here: sdpa, eager, and eager on request agree, and the window holds."""
    options = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    model = tiny_model(tiny_config(variant, **options))
    ids = random_ids(2, 8)
    mask = padding_mask([8, 6], 8, "left")
    real = mask.bool()
    with torch.no_grad():
        plain = model(ids, attention_mask=mask).logits
        sdpa = model(ids, attention_mask=mask, output_attentions=True)
        eager = with_implementation(model, "eager")(ids, attention_mask=mask, output_attentions=True)
    torch.testing.assert_close(plain[real], eager.logits[real], **CLOSE)
    for actual, expected in zip(sdpa.attentions, eager.attentions, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    assert (sdpa.attentions[0][0].tril(-3).amax((-2, -1)) > 0).all()
    assert (sdpa.attentions[1][0].tril(-3) == 0).all()


# --- caches and generation ---------------------------------------------------------------------------------------


def steps(model: GatedQwen3ForCausalLM, ids: Tensor, cache: Any, stops: list[int], **options: Any) -> list[Any]:
    outputs, start = [], 0
    for stop in stops:
        with torch.no_grad():
            outputs.append(model(ids[:, start:stop], use_cache=True, **{CACHE: cache}, **options))
        start = stop
    return outputs


@every_variant
@sdpa_and_eager
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_caches(variant: str, implementation: str, kind: str) -> None:
    model = with_implementation(tiny_model(tiny_config(variant)), implementation)
    ids = random_ids(2, 7)
    cache = (
        DynamicCache(config=model.config)
        if kind == "dynamic"
        else StaticCache(config=model.config, max_cache_len=12)
    )
    with torch.no_grad():
        expected = model(ids).logits
    logits = torch.cat([output.logits for output in steps(model, ids, cache, [3, 4, 6, 7])], dim=1)
    torch.testing.assert_close(logits, expected, **CLOSE)


@every_variant
@pytest.mark.parametrize(
    "implementation",
    [
        "eager",
        "sdpa",
    ],
)
def test_weights_on_request_with_a_static_cache(variant: str, implementation: str) -> None:
    """A cache with room for 12 tokens: the places not yet filled are not keys."""
    model = with_implementation(tiny_model(tiny_config(variant)), implementation)
    ids = random_ids(2, 7)
    with torch.no_grad():
        expected = model(ids, output_attentions=True)
    cache = StaticCache(config=model.config, max_cache_len=12)
    outputs = steps(model, ids, cache, [4, 5, 7], output_attentions=True)
    logits = torch.cat([output.logits for output in outputs], dim=1)
    torch.testing.assert_close(logits, expected.logits, **CLOSE)
    for layer, weights in enumerate(expected.attentions):
        cached = torch.cat([output.attentions[layer] for output in outputs], dim=2)
        torch.testing.assert_close(cached[..., :7], weights, **CLOSE)
        assert (cached[..., 7:] == 0).all()


GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}


@every_variant
@sdpa_and_eager
def test_generate_with_and_without_a_cache(variant: str, implementation: str) -> None:
    model = with_implementation(tiny_model(tiny_config(variant, qkv_bias=True)), implementation)
    ids = random_ids(1, 4, seed=3)
    cached = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=True, **GREEDY)
    uncached = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=False, **GREEDY)
    by_hand = ids
    with torch.no_grad():
        for _ in range(8):
            by_hand = torch.cat([by_hand, model(by_hand).logits[:, -1:].argmax(-1)], dim=1)
    assert cached.tolist() == uncached.tolist() == by_hand.tolist()
    assert len(set(by_hand[0, 4:].tolist())) > 1


@every_variant
@sdpa_and_eager
def test_generate_in_a_left_padded_batch(variant: str, implementation: str) -> None:
    model = with_implementation(tiny_model(tiny_config(variant, qkv_bias=True)), implementation)
    lengths = [6, 3, 1]
    ids = random_ids(3, 6, seed=1)
    mask = padding_mask(lengths, 6, "left")
    together = model.generate(ids.masked_fill(mask == 0, 0), attention_mask=mask, **GREEDY)
    for row, length in enumerate(lengths):
        prompt = ids[row : row + 1, 6 - length :]
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY)
        assert together[row, 6:].tolist() == alone[0, length:].tolist()


def test_generate_with_weights_requested() -> None:
    model = tiny_model(tiny_config("gate_elementwise"))
    ids = random_ids(1, 4)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        output_attentions=True,
        return_dict_in_generate=True,
        **GREEDY,
    )
    assert len(output.attentions) == 8
    assert [len(step) for step in output.attentions] == [2] * 8
    with torch.no_grad():
        whole = model(output.sequences[:, :-1], output_attentions=True).attentions[1]
    torch.testing.assert_close(output.attentions[0][1], whole[:, :, :4, :4], **CLOSE)
    for index, step in enumerate(output.attentions[1:]):
        torch.testing.assert_close(step[1][:, :, 0], whole[:, :, 4 + index, : 5 + index], **CLOSE)


def test_sampling_is_reproducible() -> None:
    model = tiny_model(tiny_config())
    ids = random_ids(1, 4)
    options = GREEDY | {"do_sample": True, "attention_mask": torch.ones_like(ids)}
    samples = []
    for _ in range(2):
        torch.manual_seed(5)
        samples.append(model.generate(ids, **options).tolist())
    assert samples[0] == samples[1]


# --- other implementations and devices ---------------------------------------------------------------------------


@every_variant
def test_what_an_attention_function_is_given(variant: str) -> None:
    """The contract of transformers' attention interface, which flash and the project's capture live on."""
    calls: list[dict[str, Any]] = []

    def record(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
        calls.append(options | {"module": module, "shapes": shapes, "mask": attention_mask})
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    AttentionInterface.register("gattn_test_record", record)
    AttentionMaskInterface.register("gattn_test_record", sdpa_mask)
    windows = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    model = tiny_model(tiny_config(variant, group=3, **windows))
    ids = random_ids(2, 5)
    mask = padding_mask([5, 4], 5, "left")
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        recorded = with_implementation(model, "gattn_test_record")(ids, attention_mask=mask).logits
    assert torch.equal(recorded, expected)
    assert [call["module"].layer_idx for call in calls] == [0, 1]
    assert [call["sliding_window"] for call in calls] == [None, 3]
    for call in calls:
        assert call["shapes"] == [(2, 6, 5, 6), (2, 2, 5, 6), (2, 2, 5, 6)]  # KV heads are not repeated
        assert call["scaling"] == pytest.approx(6**-0.5)
        assert call["dropout"] == 0.0
        assert call["mask"].shape == (2, 1, 5, 5)


def flex_pair(variant: str) -> tuple[GatedQwen3ForCausalLM, GatedQwen3ForCausalLM]:
    """One model under flex attention and one under eager attention (head_dim a power of two)."""
    pair = tuple(
        with_implementation(tiny_model(tiny_config(variant, head_dim=8)).requires_grad_(False), implementation)
        for implementation in ("flex_attention", "eager")
    )
    return pair[0], pair[1]


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """Flex attention without its compilation, which takes some eight seconds on a CPU."""
    with torch.compiler.set_stance("force_eager"):
        yield


def assert_flex_agrees(variant: str) -> None:
    flex, eager = flex_pair(variant)
    ids = random_ids(2, 7)
    mask = padding_mask([7, 4], 7, "left")
    real = mask.bool()
    try:
        actual = flex(ids, attention_mask=mask).logits
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"flex attention does not run on this CPU: {error}")
    torch.testing.assert_close(actual[real], eager(ids, attention_mask=mask).logits[real], **CLOSE)
    torch.testing.assert_close(flex(ids).logits, eager(ids).logits, **CLOSE)


@every_variant
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention(uncompiled: None, variant: str) -> None:
    assert_flex_agrees(variant)


@pytest.mark.slow
@every_variant
def test_compiled_flex_attention(variant: str) -> None:
    assert_flex_agrees(variant)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_weights_on_request_under_flex_attention(uncompiled: None) -> None:
    flex, eager = flex_pair("gate_headwise")
    ids = random_ids(2, 7)
    mask = padding_mask([7, 4], 7, "left")
    actual = flex(ids, attention_mask=mask, output_attentions=True)
    expected = eager(ids, attention_mask=mask, output_attentions=True)
    real = mask.bool()
    torch.testing.assert_close(actual.logits[real], expected.logits[real], **CLOSE)
    for layer in range(2):
        torch.testing.assert_close(
            actual.attentions[layer].transpose(1, 2)[real],
            expected.attentions[layer].transpose(1, 2)[real],
            **CLOSE,
        )


@pytest.mark.gpu
@needs_cuda
@every_variant
@sdpa_and_eager
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05), (torch.float16, 0.01)]
)
def test_cuda_is_the_cpu(variant: str, implementation: str, dtype: torch.dtype, tolerance: float) -> None:
    """fp32 to rounding; half precision against fp32 of the same weights on the CPU, relative to the spread."""
    model = tiny_model(tiny_config(variant, head_dim=8, qkv_bias=True)).to(dtype)
    full = with_implementation(copy.deepcopy(model).float(), "eager")
    model = with_implementation(model, implementation).cuda()
    ids = random_ids(2, 9)
    mask = padding_mask([9, 5], 9, "left")
    real = mask.bool()
    with torch.no_grad():
        expected = full(ids, attention_mask=mask, output_attentions=True)
        actual = model(ids.cuda(), attention_mask=mask.cuda(), output_attentions=True)
        plain = model(ids.cuda(), attention_mask=mask.cuda())
    assert actual.logits.device.type == "cuda"
    scale = expected.logits[real].std()
    for logits in (actual.logits, plain.logits):
        error = (logits.float().cpu() - expected.logits)[real]
        assert error.square().mean().sqrt() < tolerance * scale
    for weights, exact in zip(actual.attentions, expected.attentions, strict=True):
        assert (weights.float().cpu() - exact).transpose(1, 2)[real].abs().max() < 2 * tolerance
    if dtype is torch.float32:
        prompt = ids[:1]
        options = GREEDY | {"attention_mask": torch.ones_like(prompt)}
        on_cpu = full.generate(prompt, **options)
        on_cuda = model.generate(prompt.cuda(), **(GREEDY | {"attention_mask": torch.ones_like(prompt).cuda()}))
        assert on_cpu.tolist() == on_cuda.tolist()


@pytest.mark.gpu
@needs_cuda
@every_variant
def test_flex_attention_on_cuda(variant: str) -> None:
    flex, eager = (model.cuda() for model in flex_pair(variant))
    ids = random_ids(2, 7).cuda()
    mask = padding_mask([7, 4], 7, "left").cuda()
    real = mask.bool()
    actual = flex(ids, attention_mask=mask).logits[real]
    torch.testing.assert_close(actual, eager(ids, attention_mask=mask).logits[real], rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@needs_cuda
@needs_flash
@every_variant
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_flash_attention(variant: str, side: str | None) -> None:
    """Logits, and the weights on request, as eager attention gives them in the same bf16."""
    model = tiny_model(tiny_config(variant, head_dim=8)).to("cuda", torch.bfloat16)
    ids = random_ids(2, 7).cuda()
    mask = None if side is None else padding_mask([7, 4], 7, side).cuda()
    real = torch.ones(2, 7, dtype=torch.bool, device="cuda") if mask is None else mask.bool()
    with torch.no_grad():
        eager = with_implementation(model, "eager")(ids, attention_mask=mask, output_attentions=True)
        flash = with_implementation(model, "flash_attention_2")
        plain = flash(ids, attention_mask=mask).logits
        asked = flash(ids, attention_mask=mask, output_attentions=True)
    scale = eager.logits[real].float().std()
    for logits in (plain, asked.logits):
        assert (logits - eager.logits)[real].float().square().mean().sqrt() < 0.05 * scale
    for actual, expected in zip(asked.attentions, eager.attentions, strict=True):
        torch.testing.assert_close(actual.transpose(1, 2)[real], expected.transpose(1, 2)[real])
