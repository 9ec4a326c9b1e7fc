"""Prompts as an instruct model has them: a user's turn in its chat template."""

from __future__ import annotations

from typing import Any

from gattn_viz.errors import GattnVizError, first_line


def user_turn(text: str, tokenizer: Any) -> str:
    """The text that a chat template makes of one user turn, up to where the assistant's would begin.

    All that the template adds is in it, such as a BOS or a system turn: nothing else is to be put in front.

    Raises:
        GattnVizError: the tokenizer has no chat template, or it does not take a user turn.
    """
    if not tokenizer.chat_template:
        raise GattnVizError(
            "chat was asked for, but this tokenizer has no chat template; expected one, as instruct models have: "
            "leave out --chat, or choose an instruct model"
        )
    turns = [{"role": "user", "content": text}]
    try:
        rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        other = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"another {text}"}], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template may raise anything
        raise GattnVizError(
            f"the chat template of this tokenizer does not take a user turn ({type(error).__name__}: "
            f"{first_line(error)}); expected one that does: leave out --chat"
        ) from error
    if rendered == other:
        raise GattnVizError(
            "the chat template of this tokenizer leaves the user's text out; expected one that has it: leave out "
            "--chat"
        )
    return rendered


def opening(text: str, tokenizer: Any) -> str:
    """What the template puts before the user's text; all of it if it changes the text."""
    return user_turn(text, tokenizer).partition(text.strip())[0]
