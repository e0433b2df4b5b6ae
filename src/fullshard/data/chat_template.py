"""Conversations as tokens, and the tokens that are learned.

    user: 2 + 2?   assistant: 4 <eos>   user: sure?   assistant: yes <eos>
    ..............            ^^^^^^^                            ^^^^^^^^^   learned

Some templates mark what the assistant generates (`{% generation %}`). For other templates the
conversation is rendered up to the start and up to the end of each answer; the difference is the
answer.
"""

from __future__ import annotations

import re
import resource
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fullshard.config.schema import ModelConfig
from fullshard.data.chat import ASSISTANT, Example, Message, Pair, Turns
from fullshard.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# For tokenizers without a template. Its only special token is the end of a text. The space before
# an answer belongs to the answer, because byte-level tokenizers join it with the word.
PLAIN = """\
{% if tools or messages | selectattr('tool_calls', 'defined') | selectattr('tool_calls') | list %}\
{{ raise_exception('the built-in template has no form for tools') }}\
{% endif %}\
{% for message in messages %}\
{% if message['role'] == 'assistant' %}\
Answer:{% generation %} {{ message['content'] }}{{ eos_token }}{% endgeneration %}
{% else %}\
{{ {'user': 'Question'}.get(message['role'], message['role'] | capitalize) }}: \
{{ message['content'] }}
{% endif %}\
{% endfor %}\
{% if add_generation_prompt %}Answer:{% endif %}"""
TEMPLATE_LIMIT_S = 10.0  # per conversation; ordinary ones take milliseconds
TEMPLATE_LIMIT_BYTES = 1 << 30
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Learned:
    """The tokens that the loss counts.

    Attributes:
        completions_only: Learn only completions, not prompts.
        assistant_only: Learn only the assistant's turns.
    """

    completions_only: bool = True
    assistant_only: bool = True


@dataclass(frozen=True)
class Encoded:
    """Tokens of an example, and whether the loss counts each of them."""

    ids: list[int]
    learned: list[bool]


def set_template(tokenizer: PreTrainedTokenizerBase, path: Path | None, model: ModelConfig) -> None:
    """Sets a tokenizer's chat template: from a path, else its own, else the built-in one.

    Args:
        tokenizer: Tokenizer to change.
        path: A Jinja file, or a folder with a tokenizer; None: the tokenizer's own or the built-in.
        model: Model section; decides whether the code of a tokenizer's folder may run.

    Raises:
        ConfigError: The path has no template.
    """
    if path is None:
        tokenizer.chat_template = tokenizer.chat_template or PLAIN
        return
    files = (path / "chat_template.jinja",) if path.is_dir() else (path,)
    if files[0].is_file():
        tokenizer.chat_template = files[0].read_text(encoding="utf-8")
        return
    from fullshard.data.tokenizer import load_tokenizer

    other = load_tokenizer(model, "sft.chat_template_path", path) if path.is_dir() else None
    if other is None or other.chat_template is None:
        raise ConfigError(
            f"sft.chat_template_path: expected a Jinja file or a folder with a chat template, got "
            f"'{path}'. Name the file, or leave it out."
        )
    tokenizer.chat_template = other.chat_template


def encode(example: Example, tokenizer: PreTrainedTokenizerBase, learned: Learned) -> Encoded:
    """An example's tokens.

    Raises:
        DataError: The template refuses it, or its answers cannot be found in the rendered text.
    """
    if isinstance(example, Pair):
        return _encode_pair(example, tokenizer, learned)
    only = learned.completions_only if example.is_completion else learned.assistant_only
    if not only:
        text = _render(tokenizer, example)
        ends = ["".join(str(one["content"]).split()[-1:]).casefold() for one in example.messages]
        if any(ends) and not any(end and end in text.casefold() for end in ends):
            raise DataError(
                f"data.path: expected the texts of {example.place} in what the chat template makes "
                "of it; none is there. Give sft.chat_template_path."
            )
        ids = _ids(text, tokenizer)
        return Encoded(ids, [True] * len(ids))
    if _MARKS.search(_template(tokenizer, example)) and example.num_prompt <= 1:
        return _encode_marked(example, tokenizer)
    text = _render(tokenizer, example)
    return _encode_spans(text, list(_answers(example, tokenizer, text)), tokenizer)


def prompt_of(example: Example, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """An example up to its last answer, and that answer."""
    if isinstance(example, Pair):
        return example.prompt, example.completion
    last = max((i for i, m in enumerate(example.messages) if m["role"] == ASSISTANT), default=0)
    prompt = _render(tokenizer, example, last or None, add_generation_prompt=True)
    return prompt, str(example.messages[last]["content"])


def texts_of(example: Example) -> Iterator[str]:
    """All texts of an example, for training a tokenizer."""
    if isinstance(example, Pair):
        return iter((example.prompt, example.completion))
    return (str(message["content"]) for message in example.messages)


def _template(tokenizer: PreTrainedTokenizerBase, example: Turns) -> str:
    """The template that transformers takes for an example."""
    template: Any = tokenizer.chat_template
    if isinstance(template, dict):
        use = "tool_use" if example.tools and "tool_use" in template else "default"
        return template.get(use, "")
    return template or ""


def _encode_pair(pair: Pair, tokenizer: PreTrainedTokenizerBase, learned: Learned) -> Encoded:
    prompt = cast("list[int]", tokenizer(pair.prompt)["input_ids"])
    end = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    if end and prompt[-1:] == end and len(prompt) > 1:
        prompt = prompt[:-1]  # some tokenizers end every text
    completion = [*_ids(pair.completion, tokenizer), *end]
    first = not learned.completions_only
    return Encoded(prompt + completion, [first] * len(prompt) + [True] * len(completion))


def _encode_marked(example: Turns, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    _render(tokenizer, example)  # within the limit of memory
    marks = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    found = _applied(tokenizer, example, example.messages, marks)
    return Encoded(list(found["input_ids"]), [bool(one) for one in found["assistant_masks"]])


def _answers(
    example: Turns, tokenizer: PreTrainedTokenizerBase, text: str
) -> Iterator[tuple[int, int]]:
    """Start and end of each answer in the rendered conversation."""
    cursor = 0
    for index, message in enumerate(example.messages):
        is_answer = example.is_completion or message["role"] == ASSISTANT
        if index < example.num_prompt or not is_answer:
            continue
        before = _render(tokenizer, example, index, add_generation_prompt=True)
        upto = _render(tokenizer, example, index + 1)
        content = str(message["content"])
        if text.startswith(before) and text.startswith(upto) and len(upto) > len(before):
            span = len(before), len(upto)
        else:  # the template renders a turn differently when another one follows
            begin = text.find(content, cursor)
            span = begin, begin + len(content)
        # A template may change case and leave out what was thought, but not the end of an answer.
        end = "".join(content.split()[-1:]).casefold()
        # A call of a tool may stand in place of the content.
        is_there = "tool_calls" in message or end in text[slice(*span)].casefold()
        if span[0] < 0 or not is_there:
            raise DataError(
                f"data.path: expected the answer of message {index} in what the chat template "
                f"makes of {example.place}; it is not there. Give a template with "
                "{% generation %} marks: sft.chat_template_path."
            )
        cursor = span[1]
        yield span


def _encode_spans(
    text: str, spans: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase
) -> Encoded:
    if not tokenizer.is_fast:
        raise ConfigError(
            "data.tokenizer: expected a fast tokenizer, which knows where its tokens stand in a "
            "text; got a slow one. Use the tokenizer.json of the same model."
        )
    found: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    learned = [
        any(begin <= start < stop for begin, stop in spans) for start, _ in found["offset_mapping"]
    ]
    return Encoded(list(found["input_ids"]), learned)


def _render(
    tokenizer: PreTrainedTokenizerBase,
    example: Turns,
    stop: int | None = None,
    *,
    add_generation_prompt: bool = False,
) -> str:
    settings = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
    return _applied(tokenizer, example, example.messages[:stop], settings)


def _applied(
    tokenizer: PreTrainedTokenizerBase,
    example: Turns,
    messages: Sequence[Message],
    settings: dict[str, Any],
) -> Any:
    """What the chat template makes of messages of a conversation.

    Raises:
        DataError: The template refuses the conversation, or takes too much time or memory.
    """
    try:
        with _limits(memory=not settings["tokenize"]):
            chat = cast("Any", list(messages))
            return tokenizer.apply_chat_template(chat, tools=example.tools, **settings)
    except Exception as error:  # templates raise what they like
        raise DataError(
            f"data.path: expected a conversation that the chat template takes, got one at "
            f"{example.place} that it refuses ({error}). Correct the record, or give "
            "sft.chat_template_path."
        ) from error


@contextmanager
def _limits(*, memory: bool) -> Iterator[None]:
    """Stops a template that takes too much time or memory; works only in the main thread.

    Args:
        memory: Whether to limit memory: a tokenizer would abort the process at the limit.

    Raises:
        TimeoutError: Inside the block, after TEMPLATE_LIMIT_S.
        MemoryError: The process would grow by more than TEMPLATE_LIMIT_BYTES.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_alarm(_number: int, _frame: object) -> None:
        raise TimeoutError(f"it did not end within {TEMPLATE_LIMIT_S:.0f} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, on_alarm)
    timer = signal.setitimer(signal.ITIMER_REAL, TEMPLATE_LIMIT_S)
    try:
        if memory and soft == resource.RLIM_INFINITY:  # a limit of the user stays
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + TEMPLATE_LIMIT_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        yield
    except MemoryError:
        raise MemoryError(f"it needs more than {TEMPLATE_LIMIT_BYTES >> 20} MiB") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return cast("list[int]", tokenizer(text, add_special_tokens=False)["input_ids"])
