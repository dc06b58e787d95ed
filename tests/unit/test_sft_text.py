"""Text of fine-tuning records: templates are rendered as by transformers, and only answers are learned."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.fine_tuning import CHATML, tokenizer_folder

from megatron.bcd.data.sft.records import Record, parse_record
from megatron.bcd.data.sft.text import Renderer, tokenize_record
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
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
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
    """Templates are rendered as transformers renders them."""
    folder = tokenizer_folder(tmp_path / "model", TEMPLATES[name], where=where)
    renderer = Renderer(HuggingFaceTokenizer(tokenizer_model=folder), "auto")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for messages, for_answer in ((TALK, False), (TALK[:1], True), (TALK[:3], True)):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=for_answer)
        assert renderer.render(messages, {}, for_answer=for_answer)[0] == expected


EXPECTED = {
    "chatml": [["1+1=2<|im_end|>", "it=4<|im_end|>"]],
    "llama2": [[" 1+1=2 </s>", " it=4 </s>"]],
    "bare": [["assistant: 1+1=2\n", "assistant: it=4\n</s>"]],
    "forgetful": [["1+1=2</s>"], ["it=4</s>"]],
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_learned(tmp_path: Path, name: str) -> None:
    """Answers are learned with their end tokens, questions are not, and the text is that of transformers."""
    tokenizer = HuggingFaceTokenizer(tokenizer_model=tokenizer_folder(tmp_path, TEMPLATES[name]))
    samples = learned_texts(tokenizer, parse_record({"messages": TALK}))
    assert [pieces for _, pieces in samples] == EXPECTED[name]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(TALK, tokenize=False)
    assert samples[-1][0].removesuffix("</s>").rstrip() == theirs.removesuffix("</s>").rstrip()


@pytest.mark.parametrize("content", ["<think>\n1+1\n</think>\n\n2", "<think>\n", "2", "assistant"])
def test_an_answer_that_the_prompt_begins(tmp_path: Path, content: str) -> None:
    """Of an answer that the prompt begins, the rest is learned."""
    tokenizer = HuggingFaceTokenizer(tokenizer_model=tokenizer_folder(tmp_path, REASONING))
    ((text, learned),) = learned_texts(tokenizer, parse_record({"prompt": "p", "completion": content}))
    assert text == f"<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\n{content.strip()}<|im_end|>"
    beginning = "<think>\n" if content.startswith("<think>\n1") else "<think>" if content == "<think>\n" else ""
    assert learned == [content.strip().removeprefix(beginning) + "<|im_end|>"]


def test_prompts(tmp_path: Path) -> None:
    """A prompt is Alpaca's text after the begin token, or the chat template's where there is one and text is not asked
    for."""
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
    ((text, _),) = learned_texts(chat, parse_record({"instruction": "Hi.", "output": "Yo."}), "text")
    assert text.endswith("request.\n\n### Instruction:\nHi.\n\n### Response:Yo.</s>") and "Input" not in text
    ((text, learned),) = learned_texts(chat, with_input)
    assert text == "<|im_start|>user\nAdd.\n\n1, 2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>"
    assert learned == ["3<|im_end|>"]
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
        (MARKED.replace("== 'assistant'", "== 'model'"), "auto", {"messages": TALK}, "generation marks"),
        (None, "auto", {"prompt": "\ud800", "completion": "c"}, "can't be tokenized .*surrogates"),
    ],
)
def test_what_has_no_text(
    tmp_path: Path, template: str | None, prompt_format: str, record: dict[str, Any], named: str
) -> None:
    """A record without a text or without a learned part, and a template that fails or leaves the sandbox, are refused
    with the reason."""
    tokenizer = HuggingFaceTokenizer(tokenizer_model=tokenizer_folder(tmp_path, template))
    with pytest.raises(ValueError, match=named):
        tokenize_record(parse_record(record), Renderer(tokenizer, prompt_format), tokenizer)


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
TOOL_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    {"role": "assistant", "content": "It is sunny."},
]


def transformers_text(folder: Path, record: dict[str, Any], **more: Any) -> Any:
    """Return what transformers makes of an OpenAI record, with arguments as objects."""
    record = json.loads(json.dumps(record).replace('"{\\"city\\": \\"Rome\\"}"', '{"city": "Rome"}'))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(record["messages"], tools=record.get("tools"), **more)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "gemma4", "lfm2_v2", "qwen3_training"])
def test_tools_in_published_templates(tmp_path: Path, name: str) -> None:
    """A conversation with tools has transformers' text; of it the calls and the answers are learned."""
    template = resources.files("trl").joinpath("chat_templates", f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = HuggingFaceTokenizer(tokenizer_model=tokenizer_folder(tmp_path, template, bos=True))
    record = {"messages": TOOL_TALK, "tools": TOOLS}
    samples = learned_texts(tokenizer, parse_record(record))
    assert samples[-1][0].rstrip() == transformers_text(tmp_path, record, tokenize=False).rstrip()
    call, answer = (piece for _, pieces in samples for piece in pieces)
    assert "weather" in call and "Rome" in call and "It is sunny." in answer
    assert "Weather?" not in call and "sun<" not in answer


@pytest.mark.parametrize("name", ["marked", "llama2", "qwen3_training", "gptoss_like"])
def test_generation_marks_are_transformers_masks(tmp_path: Path, name: str) -> None:
    """With generation marks, tokens and mask are those of `return_assistant_tokens_mask`."""
    published = {"marked": MARKED, "llama2": LLAMA2, "gptoss_like": MARKED.replace("'<|im_end|>\n'", "eos_token")}
    template = published.get(name) or resources.files("trl").joinpath(f"chat_templates/{name}.jinja").read_text()
    tokenizer = HuggingFaceTokenizer(tokenizer_model=tokenizer_folder(tmp_path, template))
    (tokens,) = tokenize_record(parse_record({"messages": TALK}), Renderer(tokenizer, "auto"), tokenizer)
    theirs = transformers_text(tmp_path, {"messages": TALK}, return_dict=True, return_assistant_tokens_mask=True)
    assert tokens.ids.tolist() == theirs["input_ids"]
    assert tokens.learned.astype(int).tolist() == theirs["assistant_masks"]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
def test_weight_0(tmp_path: Path, template: str) -> None:
    """An answer of weight 0, or one in the prompt, is text but not learned."""
    tokenizer = HuggingFaceTokenizer(tokenizer_model=tokenizer_folder(tmp_path, template))
    end = "<|im_end|>" * (template == CHATML)
    messages = [TALK[0], TALK[1] | {"weight": 0}, TALK[2], TALK[3] | {"weight": 1}]
    for record in ({"messages": messages}, {"prompt": TALK[:3], "completion": TALK[3:]}):
        ((text, learned),) = learned_texts(tokenizer, parse_record(record))
        assert learned == ["it=4" + end] and "1+1=2" in text


REASONED = CHATML.replace(
    "message['content'] | trim", "('<think>' + message.reasoning_content + '</think>' "
    "if message.reasoning_content else '') + message['content']"
)  # fmt: skip
LAST_REASONED = REASONED.replace("if message.reasoning_content", "if message.reasoning_content and loop.last")


@pytest.mark.parametrize("template", [REASONED, LAST_REASONED], ids=["all", "last"])
def test_reasoning_is_learned(tmp_path: Path, template: str) -> None:
    """`reasoning_content` is learned, also where the template shows that of the last answer only."""
    tokenizer = HuggingFaceTokenizer(tokenizer_model=tokenizer_folder(tmp_path, template))
    reasoned = [TALK[1] | {"reasoning_content": "easy"}, TALK[3] | {"reasoning_content": "hard"}]
    samples = learned_texts(tokenizer, parse_record({"messages": [TALK[0], reasoned[0], TALK[2], reasoned[1]]}))
    assert [piece for _, pieces in samples for piece in pieces] == [
        "<think>easy</think>1+1=2<|im_end|>",
        "<think>hard</think>it=4<|im_end|>",
    ]


def test_variables_of_a_template(tmp_path: Path) -> None:
    """Documents and a template's own variables reach the template."""
    template = "{% if not short %}{{ documents[0].text }}{% endif %}" + CHATML
    tokenizer = HuggingFaceTokenizer(tokenizer_model=tokenizer_folder(tmp_path, template))
    record = {"messages": TALK, "documents": [{"title": "t", "text": "Facts."}]}
    ((text, _),) = learned_texts(tokenizer, parse_record(record))
    assert text.startswith("Facts.<|im_start|>")
    ((text, _),) = learned_texts(tokenizer, parse_record(record | {"chat_template_kwargs": {"short": True}} | {
        "documents": None
    }))  # fmt: skip
    assert text.startswith("<|im_start|>")


@pytest.mark.parametrize(
    ("record", "prompt_format", "named"),
    [
        ({"messages": TALK, "tools": TOOLS}, "auto", "has 'tools', which"),
        ({"messages": TALK, "documents": [{"text": "t"}], "id": 1}, "auto", "has 'documents', 'id', which"),
        ({"messages": TOOL_TALK}, "auto", "'tool_calls'"),
        ({"messages": [TALK[0], TALK[1] | {"reasoning_content": "r"}]}, "auto", "'reasoning_content'"),
        ({"messages": [{"role": "system", "content": "secret"}, *TALK]}, "without system", "has 'system', which"),
        ({"messages": [TALK[0] | {"name": "Ann"}, TALK[1]]}, "auto", "has 'name', which"),
        ({"messages": TALK, "add_generation_prompt": True}, "auto", "'add_generation_prompt'"),
        ({"instruction": "a", "output": "b", "text": "c"}, "text", "has 'text', which .*--sft-ignore-keys"),
        ({"instruction": "a", "output": "b", "system": "c"}, "text", "--sft-prompt-format text"),
    ],
)
def test_a_key_that_would_be_lost(tmp_path: Path, record: dict[str, Any], prompt_format: str, named: str) -> None:
    """A key that neither the template nor the loader uses is refused by name."""
    template = CHATML.replace("message['content']", "(message['content'] or '')")
    if prompt_format == "without system":
        template, prompt_format = template.replace("in messages", "in messages if message['role'] != 'system'"), "auto"
    tokenizer = HuggingFaceTokenizer(tokenizer_model=tokenizer_folder(tmp_path, template))
    with pytest.raises(ValueError, match=named):
        learned_texts(tokenizer, parse_record(record), prompt_format)


def test_the_template_sees_no_date(tmp_path: Path) -> None:
    """A template sees no date, so the text is the same every day."""
    source = "{{ strftime_now('%Y') if strftime_now is defined else 'no date' }}"
    renderer = Renderer(HuggingFaceTokenizer(tokenizer_model=tokenizer_folder(tmp_path, source)), "auto")
    assert renderer.render([{"role": "user", "content": "a"}], {})[0] == "no date"
