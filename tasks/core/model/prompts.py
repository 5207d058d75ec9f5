"""Prompts: the one function that renders them, for SFT, GRPO and evaluation."""

from typing import Any

from configs.errors import ModelError, first_line


def render_prompt(tokenizer: Any, messages: list[dict[str, str]], chat_template_kwargs: dict[str, Any]) -> str:
    """The text of a prompt, up to where the answer begins: the same for SFT, GRPO and evaluation.

    The result is tokenized as it is. A begin-of-text token that the template writes and the tokenizer adds once more is taken out here.
    Raises ModelError where the template refuses the messages.
    """
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **chat_template_kwargs
        )
    except (TemplateError, TypeError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ModelError(
            f"the chat template refuses messages of {roles} ({first_line(error)}): change model.chat_template or data.system_prompt"
        ) from error
    bos = tokenizer.bos_token
    if bos and text.startswith(bos) and tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id:
        return text[len(bos) :]
    return text
