"""Text of fine-tuning records: templates are rendered as by transformers, and only answers are learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.fine_tuning import CHATML, tokenizer_folder

from megatron.bcd.data.sft.text import ChatTemplate, Record, Renderer, parse_record, tokenize_record
from megatron.bcd.tokenizer import HuggingFaceTokenizer

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set messages = messages[1:] %}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}{% else %}"
    "{% generation %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)
BARE = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
FORGETFUL = (  # as templates that drop the reasoning of earlier answers
    "{% for message in messages %}{% if message['role'] == 'assistant' and not loop.last %}"
    "{{ message['content'].split('=')[-1] }}{% else %}{{ message['content'] }}{% endif %}{{ eos_token }}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "llama2": LLAMA2, "bare": BARE, "forgetful": FORGETFUL}
REASONING = CHATML.replace("assistant\n'", "assistant\n<think>\n'")
TALK = [
    {"role": "user", "content": "What is 1+1?"},
    {"role": "assistant", "content": "1+1=2"},
    {"role": "user", "content": " And <twice>? "},
    {"role": "assistant", "content": "it=4"},
]


def learned_texts(
    tokenizer: HuggingFaceTokenizer, record: Record, prompt_format: str = "auto"
) -> list[tuple[str, list[str]]]:
    """Return the text of each sample and its learned pieces."""
    results = []
    for tokens in tokenize_record(record, Renderer(tokenizer, prompt_format), tokenizer):
        pieces, piece = [], []
        for token, is_learned in zip([*tokens.ids.tolist(), 0], [*tokens.learned.tolist(), False], strict=True):
            if is_learned:
                piece.append(token)
            elif piece:
                pieces.append(tokenizer.engine.decode(piece, skip_special_tokens=False))
                piece = []
        results.append((tokenizer.engine.decode(tokens.ids.tolist(), skip_special_tokens=False), pieces))
    return results


@pytest.mark.parametrize("name", ["chatml", "llama2", "bare"])
@pytest.mark.parametrize("where", ["chat_template.jinja", "text", "list"])
def test_templates_are_rendered_as_transformers_does(tmp_path: Path, name: str, where: str) -> None:
    """Blocks that are trimmed otherwise, a special token or a function that templates use and is missing."""
    folder = tokenizer_folder(tmp_path / "model", TEMPLATES[name], where=where)
    template = ChatTemplate(HuggingFaceTokenizer(tokenizer_model=folder))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for messages, for_answer in ((TALK, False), (TALK[:1], True), (TALK[:3], True)):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=for_answer)
        assert template.render(messages, for_answer=for_answer) == expected


EXPECTED = {
    "chatml": [["1+1=2<|im_end|>", "it=4<|im_end|>"]],
    "llama2": [[" 1+1=2 </s>", " it=4 </s>"]],
    "bare": [["assistant: 1+1=2\n", "assistant: it=4\n</s>"]],
    "forgetful": [["1+1=2</s>"], ["it=4</s>"]],
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_learned(tmp_path: Path, name: str) -> None:
    """A question that is learned, an end token that is not, an answer as the model never sees it when it answers."""
    tokenizer = HuggingFaceTokenizer(tokenizer_model=tokenizer_folder(tmp_path, TEMPLATES[name]))
    samples = learned_texts(tokenizer, parse_record({"messages": TALK}))
    assert [pieces for _, pieces in samples] == EXPECTED[name]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(TALK, tokenize=False)
    assert samples[-1][0].removesuffix("</s>").rstrip() == theirs.removesuffix("</s>").rstrip()


@pytest.mark.parametrize("content", ["<think>\n1+1\n</think>\n\n2", "<think>\n", "2", "", "assistant"])
def test_an_answer_that_the_prompt_begins(tmp_path: Path, content: str) -> None:
    """A record that is refused because its first words are in the prompt, or in the name of its role."""
    tokenizer = HuggingFaceTokenizer(tokenizer_model=tokenizer_folder(tmp_path, REASONING))
    ((text, learned),) = learned_texts(tokenizer, parse_record({"prompt": "p", "completion": content}))
    assert text == f"<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\n{content.strip()}<|im_end|>"
    beginning = "<think>\n" if content.startswith("<think>\n1") else "<think>" if content == "<think>\n" else ""
    assert learned == [content.strip().removeprefix(beginning) + "<|im_end|>"]


def test_prompts(tmp_path: Path) -> None:
    """Alpaca's text with and without input; the token before a text; a template that is not used, or is used anyway."""
    plain = HuggingFaceTokenizer(tokenizer_model=tokenizer_folder(tmp_path / "plain", None, bos=True))
    chat = HuggingFaceTokenizer(tokenizer_model=tokenizer_folder(tmp_path / "chat", CHATML, bos=True))
    with_input = parse_record({"instruction": "Add.", "input": "1, 2", "output": "3"})
    ((text, learned),) = learned_texts(plain, with_input)
    assert text == (
        "<s>Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1, 2\n\n"
        "### Response:3</s>"
    )
    assert learned == ["3</s>"]
    ((text, _),) = learned_texts(chat, parse_record({"instruction": "Hi.", "output": ""}), "text")
    assert text.endswith("request.\n\n### Instruction:\nHi.\n\n### Response:</s>") and "Input" not in text
    ((text, learned),) = learned_texts(chat, with_input)
    assert text == "<|im_start|>user\nAdd.\n\n1, 2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>"
    assert learned == ["3<|im_end|>"]
    ((text, learned),) = learned_texts(chat, parse_record({"prompt": "p", "completion": ""}))
    assert learned == ["<|im_end|>"] and text.endswith("assistant\n<|im_end|>")
    assert learned_texts(plain, parse_record({"prompt": "p", "completion": "c"})) == [("<s>pc</s>", ["c</s>"])]


@pytest.mark.parametrize(
    ("template", "prompt_format", "record", "named"),
    [
        (None, "auto", {"messages": TALK}, "no chat template"),
        (None, "chat", {"prompt": "p", "completion": "c"}, "--sft-prompt-format chat"),
        (CHATML, "text", {"messages": TALK}, "--sft-prompt-format text"),
        (LLAMA2, "auto", {"messages": TALK[1:]}, "roles must alternate"),
        ("{{ messages[0].content.x.y }}", "auto", {"messages": TALK}, "refused"),
        ("{% for %}", "auto", {"messages": TALK}, "refused"),
        ("{{ messages[0]['content'] }}", "auto", {"messages": TALK}, "leaves out"),
        ("{{ ''.__class__.__mro__ }}", "auto", {"messages": TALK}, "refused"),
    ],
)
def test_what_has_no_text(
    tmp_path: Path, template: str | None, prompt_format: str, record: dict[str, Any], named: str
) -> None:
    """A template's error as a traceback, a record that loses its answer, a template that gets out of the sandbox."""
    tokenizer = HuggingFaceTokenizer(tokenizer_model=tokenizer_folder(tmp_path, template))
    with pytest.raises(ValueError, match=named):
        tokenize_record(parse_record(record), Renderer(tokenizer, prompt_format), tokenizer)


def test_the_template_sees_no_date(tmp_path: Path) -> None:
    """Text, and with it everything that is kept of it, that changes from day to day."""
    source = "{{ strftime_now('%Y') if strftime_now is defined else 'no date' }}"
    template = ChatTemplate(HuggingFaceTokenizer(tokenizer_model=tokenizer_folder(tmp_path, source)))
    assert template.render([{"role": "user", "content": "a"}]) == "no date"
