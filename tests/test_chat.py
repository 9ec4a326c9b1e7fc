"""Prompts in a chat template, written out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from gattn_viz.chat import opening, user_turn
from gattn_viz.errors import GattnVizError
from gattn_viz.prompts import Prompt, encode
from tests.conftest import tiny_tokenizer

TURNS = "{% for turn in messages %}[{{ turn.role }}]{{ turn.content | trim }}{% endfor %}"
TEMPLATE = "be kind " + TURNS + "{% if add_generation_prompt %}[assistant]{% endif %}"


def with_template(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """`tiny_tokenizer`, which puts its BOS `<s>` in front of every text."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_a_user_turn_up_to_the_assistant_s() -> None:
    assert user_turn(" the cat ", with_template()) == "be kind [user]the cat[assistant]"
    assert opening(" the cat ", with_template()) == "be kind [user]"


@pytest.mark.parametrize(
    ("writes", "bos", "begins"),
    [
        (True, "auto", "<s>be"),
        (True, "always", "<s>be"),  # never a second one
        (True, "never", "<s>be"),  # the template's own stays
        (False, "auto", "be"),  # though the tokenizer would put one in front of a plain text
        (False, "always", "<s>be"),
        (False, "never", "be"),
    ],
)
def test_the_template_alone_writes_a_bos(writes: bool, bos: Any, begins: str) -> None:
    tokenizer = with_template(("{{ bos_token }}" if writes else "") + TEMPLATE)
    encoded = encode(Prompt("a", "the cat"), tokenizer, bos=bos, chat=True)
    assert tokenizer.decode(encoded.ids) == f"{begins} kind [user]the cat[assistant]"
    assert encoded.chat
    assert encoded.bos_added == begins.startswith("<s>")
    assert encoded.prompt.text == "the cat"


def test_max_tokens_counts_the_template_too() -> None:
    tokenizer = with_template()
    whole = encode(Prompt("a", "the cat"), tokenizer, chat=True)
    cut = encode(Prompt("a", "the cat"), tokenizer, chat=True, max_tokens=9)
    assert cut.ids == whole.ids[:9]
    assert cut.is_cut
    assert not whole.is_cut


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "this tokenizer has no chat template; expected one, as instruct models have: leave out --chat"),
        ("{{ raise_exception('no users') }}", "does not take a user turn (TemplateError: no users); expected one"),
        ("{% for m in messages %}<user>{% endfor %}", "leaves the user's text out; expected one that has it"),
        ("{% if %}", "does not take a user turn (TemplateSyntaxError: "),
    ],
)
def test_templates_that_cannot_be_used(template: str | None, message: str) -> None:
    with pytest.raises(GattnVizError) as caught:
        encode(Prompt("a", "the cat"), with_template(template), chat=True)
    assert message in str(caught.value)
