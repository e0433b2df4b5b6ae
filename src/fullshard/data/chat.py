"""Chat data: its common formats as one form, its tokens, and the tokens that are learned.

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}]}
    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}        ShareGPT
    {"instruction": ..., "input": ..., "output": ...}                                 Alpaca
    {"prompt": ..., "completion": ...}                  texts, or lists of messages
    {"question": ..., "answer": ...}

The keys of a record determine its format, so one file may mix formats.

    user: 2 + 2?   assistant: 4 <eos>   user: sure?   assistant: yes <eos>
    ..............            ^^^^^^^                            ^^^^^^^^^   learned

Some templates mark the assistant's text (`{% generation %}`). For other templates the
conversation is rendered up to the start and up to the end of each answer; the difference is the
answer.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import random
import re
import resource
import signal
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fullshard.config.regular_files import read_regular
from fullshard.config.schema import ModelConfig, SftConfig
from fullshard.data.records import FileKind, Record, Span, files_at, quoted, read_records, text_of
from fullshard.engine.hugging_face import start_of
from fullshard.errors import ConfigError, DataError, untrusted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

ASSISTANT = "assistant"
_ROLES = {"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT}
_ROLES |= {"observation": "tool", "function_response": "tool", "ipython": "tool"}
_PAIRS = (("instruction", "output"), ("question", "answer"), ("query", "response"))
_PAIRS += (("prompt", "response"),)
_TEXTS = {"completion", *(column for pair in _PAIRS for column in pair)}
_SYSTEM = ("system", "system_prompt")  # columns of the first message
_WITH_INPUT = ("instruction", "query")  # columns that a column `input` continues
_FOR_TEMPLATES = ("functions", "documents", "chat_template_kwargs")  # columns of other tools
_PARTS = ("context", "history")  # columns of other parts of a prompt, which no format here has
# Keys by which other tools exclude a message, a part of it, or a record from training.
_WEIGHTS = ("weight", "loss", "train", "training", "train_detail", "training_detail")
_WEIGHTS += ("loss_mask", "loss_weight", "sample_weight", "mask")
# Columns that are read, or checked.
_READ = {"messages", "conversations", "prompt", "input", "tools", "label", *_TEXTS, *_SYSTEM}
_KNOWN = ("system", "developer", "user", ASSISTANT, "tool", "function")  # roles
SHORTEST, LONGEST = 20, 160  # characters of a built-in answer: one sentence
SEED = 0
_FORMS = "messages, conversations, prompt and completion, instruction and output, question, answer"


@dataclass(frozen=True)
class Example:
    """A conversation.

    Attributes:
        messages: Messages with `role`, `content` and further keys for the template.
        num_prompt: Number of messages at the start that are never learned.
        is_completion: Whether the record was a prompt and its completion.
        place: Its record, whose text is file and line, for errors.
        tools: Functions that may be called, for the template.
        is_plain: Prompt and completion are texts that follow each other, without a template.
    """

    messages: tuple[Message, ...]
    num_prompt: int
    is_completion: bool
    place: object
    tools: Any = None
    is_plain: bool = False


def is_chat(path: Path) -> bool:
    """Whether the first record is chat data; plain text has no records."""
    files = files_at(path)
    if files.kind is FileKind.TEXT:
        return False
    first = next((one for span in files.spans() for one in read_records(span)), None)
    return first is not None and _reader(first.value) is not None


def read_examples(spans: Iterable[Span]) -> Iterator[Example]:
    """The examples of parts of files.

    Raises:
        DataError: A record has an unknown format; names its place.
    """
    for record in (one for span in spans for one in read_records(span)):
        reader = _reader(record.value)
        if reader is None:
            got = [
                key if held is not None else f"{key} (null)" for key, held in record.value.items()
            ]
            raise DataError(
                f"data.path: expected columns among {_FORMS}; got {quoted(got)} at "
                f"{record}. Rename them, or use `fullshard train` for plain text."
            )
        for column in _FOR_TEMPLATES:
            if record.value.get(column):
                raise DataError(
                    "data.path: expected 'tools' as the only column for the chat template beside "
                    f"the texts, got '{column}' at {record}. Rename or remove it."
                )
        off = "label: False" if record.value.get("label") is False else _weighed(record.value)
        if off:  # KTO's label of an answer that is not wanted
            raise DataError(
                f"data.path: expected records that are all trained, got {off} at {record}. Remove "
                "the record, or rename the column if it is not for training."
            )
        yield reader(record)


def unread(example: Example) -> list[str]:
    """Columns of an example's record that are not read."""
    columns = example.place.value if isinstance(example.place, Record) else {}
    filled = (name for name, held in columns.items() if held not in (None, ""))
    return sorted({*filled} - _READ - {*_WEIGHTS})


def _reader(value: Mapping[str, Any]) -> Any:
    """The reader of a record with these keys; None if no format has them."""
    there = {key for key, held in value.items() if held is not None}
    column = next((name for name in ("messages", "conversations") if name in there), None)
    if column is not None:
        return lambda record: _turns(record, column)
    if {"prompt", "completion"} <= there:
        return _prompt_completion
    pair = next((pair for pair in _PAIRS if {*pair} <= there), None)
    return pair and (lambda record: _exchange(record, *pair))


def _turns(record: Record, column: str) -> Example:
    messages, system = _messages(record, column), _system(record)
    _check_weights(messages, record, column)
    _refuse_others(record, messages, column)
    if messages[0]["role"] != "system":
        messages = (*system, *messages)
    elif system and system[0]["content"] != messages[0]["content"]:
        raise DataError(
            f"data.path: expected one system message at {record}, got another one in a column. "
            "Keep one of them."
        )
    return Example(messages, 0, False, record, _tools(record))


def _refuse_others(record: Record, messages: Sequence[Message], *columns: str) -> None:
    """Raises DataError if columns of another format have a text that the messages lack."""
    texts = {str(message["content"]).strip() for message in messages}
    longest = max(texts, key=len)
    for other, held in record.value.items():
        if other in columns or not held:
            continue
        found = [held] if other in _TEXTS and isinstance(held, str) else []
        if other == "conversations":
            found = [str(message["content"]) for message in _messages(record, other)]
        found = [text for one in found if (text := one.strip()) not in {"", *texts}]
        if any(not longest or longest not in text for text in found):
            raise DataError(
                f"data.path: expected one conversation at {record}, got '{columns[0]}' and a text "
                f"in '{other}' that is in none of its messages. Keep one of them."
            )


def _system(record: Record) -> tuple[Message, ...]:
    """The message of a column of `_SYSTEM`, if one has text."""
    content = next(filter(None, (_optional(record, column) for column in _SYSTEM)), "")
    return ({"role": "system", "content": content},) if content else ()


def _optional(record: Record, column: str) -> str:
    return "" if record.value.get(column) is None else text_of(record, column)


def _messages(record: Record, column: str) -> tuple[Message, ...]:
    value = record.value[column]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(
            f"data.path: expected a list of messages at {record}, {column}. Correct the record."
        )
    found: list[Message] = []
    for number, message in enumerate(cast("Sequence[Any]", value)):
        is_share_gpt = isinstance(message, Mapping) and "from" in message and "role" not in message
        role, content = ("from", "value") if is_share_gpt else ("role", "content")
        has_both = isinstance(message, Mapping) and {role, content} <= message.keys()
        if not has_both or not isinstance(message[role], str):
            raise DataError(
                f"data.path: expected '{role}' and '{content}' in a message at {record}, "
                f"{column}[{number}], the first as text. Correct the record."
            )
        rest = {k: v for k, v in message.items() if k not in (role, content) and v is not None}
        name = message[role].lower()
        name = _ROLES.get(name, name)
        said = message[content]
        if name != "tool" or said is None:  # a tool may return any value
            said = _said(said, record, column, number)
        found.append({**rest, "role": name, "content": said})
    return tuple(found)


def _check_weights(messages: Iterable[Message], record: Record, column: str) -> None:
    """Raises DataError if an answer is not to be trained, or another message is."""
    for number, message in enumerate(messages):
        is_answer = message["role"] == ASSISTANT
        trained = next((f"{key}: True" for key in _WEIGHTS if message.get(key) is True), "")
        if off := _weighed(message) if is_answer else trained:
            expected = "answers that are all trained" if is_answer else "only trained answers"
            raise DataError(
                f"data.path: expected {expected}, got {off} at {record}, "
                f"{column}[{number}]. Use 'prompt' and 'completion', which are lists of messages: "
                "only the completion is trained."
            )


def _weighed(value: Mapping[str, Any]) -> str:
    """The first key that gives an answer or a record another weight than 1."""
    off = (f"{key}: {value[key]}" for key in _WEIGHTS if value.get(key, 1) not in (1, None))
    return next(off, "")[:80]


def _said(value: object, record: Record, column: str, number: int) -> str:
    """The text of a message; templates would write other values as Python does."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    parts: list[Any] = value if isinstance(value, list) else ["" if value is None else value]
    texts: list[Any] = [
        part.get("text") if isinstance(part, Mapping) and _is_text(part) else part for part in parts
    ]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"data.path: expected text, or parts with 'text', in the message at {record}, "
            f"{column}[{number}]; got {str(value)[:80]!r}. Correct the record."
        )
    return "".join(texts)


def _is_text(part: Mapping[str, Any]) -> bool:
    """Whether a part of a message is text, and no image with a caption."""
    return (part.get("type") or "text") in ("text", "input_text", "output_text")


def _prompt_completion(record: Record) -> Example:
    _refuse_parts(record, (*_SYSTEM, "input", *_PARTS))
    if all(isinstance(record.value[column], str) for column in ("prompt", "completion")):
        return replace(_exchange(record, "prompt", "completion"), is_plain=True)
    before, after = _messages(record, "prompt"), _messages(record, "completion")
    _check_weights(after, record, "completion")
    _refuse_others(record, (*before, *after), "prompt", "completion")
    return Example((*before, *after), len(before), True, record, _tools(record))


def _tools(record: Record) -> list[Any] | None:
    """The functions of a record, a list or one, also as JSON; None if it has none."""
    tools = record.value.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise DataError(
                f"data.path: expected JSON in 'tools' at {record}; got {tools[:80]!r}. "
                "Correct the record, or rename the column."
            ) from error
    return ([tools] if isinstance(tools, Mapping) else tools) or None


def _exchange(record: Record, question: str, answer: str) -> Example:
    _refuse_parts(record, _PARTS if question in _WITH_INPUT else ("input", *_PARTS))
    asked = "\n\n".join(filter(None, (text_of(record, question), _optional(record, "input"))))
    before = (*_system(record), {"role": "user", "content": asked})
    said = {"role": ASSISTANT, "content": text_of(record, answer)}
    _refuse_others(record, (*before, said), question, answer)
    return Example((*before, said), len(before), is_completion=True, place=record)


def _refuse_parts(record: Record, columns: Sequence[str]) -> None:
    """Raises DataError if a part of a prompt is in a column that the record's format lacks."""
    if column := next((one for one in columns if record.value.get(one)), None):
        raise DataError(
            f"data.path: expected the whole prompt in one column, got a part in '{column}' at "
            f"{record}. Write it as 'messages', or rename the column if it is not for the model."
        )


# ---- tokens --------------------------------------------------------------------------------------

# For tokenizers without a template. Its only special token is the end of a text. The space before
# an answer belongs to the answer, because byte-level tokenizers join it with the word.
PLAIN = """\
{% if tools %}{{ raise_exception('the built-in template has no form for tools') }}{% endif %}\
{% for key in ('tool_calls', 'function_call', 'reasoning_content', 'reasoning', 'thinking')
   if messages | selectattr(key, 'defined') | selectattr(key) | list %}\
{{ raise_exception('the built-in template has no form for ' ~ key) }}\
{% endfor %}\
{% for message in messages %}\
{% if message['role'] == 'assistant' %}\
Answer:{% generation %} {{ message['content'] }}{{ eos_token }}{% endgeneration %}
{% else %}\
{{ {'user': 'Question'}.get(message['role'], message['role'] | capitalize) }}: \
{{ message['content'] }}
{% endif %}\
{% endfor %}\
{% if add_generation_prompt %}Answer:{% endif %}"""
TEMPLATE_LIMIT_S = 10.0  # per conversation; usually milliseconds
TEMPLATE_LIMIT_BYTES = 1 << 30
_PROBE = "5830742961830475"  # text that templates leave as it is
_CALLS = ("tool_calls", "function_call")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_THOUGHT = ("</think>", "<channel|>")  # after which many templates let the answer begin
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Encoded:
    """Tokens of an example, and whether the loss counts each of them."""

    ids: list[int]
    learned: list[bool]


def set_template(tokenizer: PreTrainedTokenizerBase, path: Path | None, model: ModelConfig) -> None:
    """Set a tokenizer's chat template: from a path, or its own, or the built-in one.

    Args:
        tokenizer: Tokenizer to change.
        path: A Jinja file, or a folder with a tokenizer; None: the tokenizer's own or the built-in.
        model: Model section; decides whether the code of a tokenizer's folder may run.

    Raises:
        ConfigError: The path has no template.
    """
    if path is None:
        found: object = tokenizer.chat_template or PLAIN
        if not isinstance(found, str | dict):
            raise ConfigError(
                "model.name_or_path: expected a tokenizer whose chat_template is text, got "
                f"{type(found).__name__}. Correct tokenizer_config.json, or set "
                "sft.chat_template_path."
            )
        tokenizer.chat_template = found
        return
    files = (path / "chat_template.jinja",) if path.is_dir() else (path,)
    if files[0].is_file():
        cure = "Convert it, or use another file."
        with untrusted(f"sft.chat_template_path: '{files[0]}'", "UTF-8 text", ConfigError, cure):
            tokenizer.chat_template = read_regular(files[0]).decode("utf-8-sig")
        return
    from fullshard.data.tokenize import load_tokenizer

    other = load_tokenizer(model, "sft.chat_template_path", path) if path.is_dir() else None
    if other is None or other.chat_template is None:
        raise ConfigError(
            "sft.chat_template_path: expected a Jinja file or a folder with a chat template, got "
            f"'{path}'. Set the file, or leave it out."
        )
    tokenizer.chat_template = other.chat_template


def encode(example: Example, tokenizer: PreTrainedTokenizerBase, sft: SftConfig) -> Encoded:
    """An example's tokens, and which of them are learned.

    Raises:
        DataError: The template refuses it, or its answers cannot be found in the rendered text.
    """
    if example.is_plain:
        return _encode_plain(example, tokenizer, sft)
    only = sft.completion_only_loss if example.is_completion else sft.assistant_only_loss
    if only is False:
        text = _text(tokenizer, example)
        ends = ["".join(str(one["content"]).split()[-1:]).casefold() for one in example.messages]
        if any(ends) and not any(end and end in text.casefold() for end in ends):
            raise DataError(
                f"data.path: expected the texts of {example.place} in the output of the chat "
                "template; it has none. Set sft.chat_template_path."
            )
        ids = _ids(text, tokenizer)
        return Encoded(ids, [True] * len(ids))
    if not example.is_completion:
        _check_roles(example, _template(tokenizer, example))
    prompt = example.messages[: example.num_prompt]
    has_marks = _MARKS.search(_template(tokenizer, example))
    if has_marks and not any(message["role"] == ASSISTANT for message in prompt):
        return _encode_marked(example, tokenizer)
    text = _text(tokenizer, example)
    return _encode_spans(text, list(_answers(example, tokenizer, text)), tokenizer)


def _check_roles(example: Example, template: str) -> None:
    """Raises DataError if a role is unknown, also to the template: its answers are not trained."""
    for role in (str(message["role"]) for message in example.messages):
        if role not in _KNOWN and f"'{role}'" not in template and f'"{role}"' not in template:
            raise DataError(
                f"data.path: expected a role among {', '.join(_KNOWN)}, or one that the chat "
                f"template names, got '{role}' at {example.place}. Rename it "
                f"('{ASSISTANT}' is trained), or set sft.assistant_only_loss=false."
            )


def prompt_of(example: Example, tokenizer: PreTrainedTokenizerBase) -> str:
    """An example up to its last answer."""
    if example.is_plain:
        return str(example.messages[0]["content"])
    last = max((i for i, m in enumerate(example.messages) if m["role"] == ASSISTANT), default=0)
    return _render(tokenizer, example, last or None, add_generation_prompt=True)


def _template(tokenizer: PreTrainedTokenizerBase, example: Example) -> str:
    """The template that transformers uses for an example."""
    template: Any = tokenizer.chat_template
    if isinstance(template, dict):
        use = "tool_use" if example.tools and "tool_use" in template else "default"
        return template.get(use, "")
    return template or ""


def prompt_ids(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of an example up to its last answer, with the start tokens that are trained."""
    text = prompt_of(example, tokenizer)
    start = start_of(tokenizer) if example.is_plain else ()
    return [*start, *_ids(text, tokenizer)]


def _encode_plain(example: Example, tokenizer: PreTrainedTokenizerBase, sft: SftConfig) -> Encoded:
    prompt = prompt_ids(example, tokenizer)
    end = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    completion = [*_ids(str(example.messages[1]["content"]), tokenizer), *end]
    first = sft.completion_only_loss is False
    return Encoded(prompt + completion, [first] * len(prompt) + [True] * len(completion))


def _encode_marked(example: Example, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    if tokenizer.chat_template != PLAIN:
        _text(tokenizer, example)  # within the limit of memory
    marks = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    found = _render(tokenizer, example, **marks)
    return Encoded(list(found["input_ids"]), [bool(one) for one in found["assistant_masks"]])


def _answers(
    example: Example, tokenizer: PreTrainedTokenizerBase, text: str
) -> Iterator[tuple[int, int]]:
    """Start and end of each answer in the rendered conversation."""
    cursor = 0
    for index, message in enumerate(example.messages):
        is_answer = example.is_completion or message["role"] == ASSISTANT
        if index < example.num_prompt or not is_answer:
            continue
        content = str(message["content"])
        before = index and _render(tokenizer, example, index, add_generation_prompt=True)
        upto = _render(tokenizer, example, index + 1)
        if before and text.startswith(before) and text.startswith(upto) and len(upto) > len(before):
            span = len(before), len(upto)
        else:  # the template renders a turn differently when another one follows
            span = _replaced(example, index, tokenizer, text, upto)
        # A template may change case and leave out reasoning, but not the end of an answer.
        end = "".join(content.split()[-1:]).casefold()
        # A tool call may replace the content.
        is_there = "tool_calls" in message or end in text[slice(*span)].casefold()
        if span[0] < cursor or not is_there:
            raise DataError(
                f"data.path: expected the answer of message {index} in the chat template's output "
                f"for {example.place}; it is missing. Set sft.chat_template_path to a template "
                "with {% generation %} marks."
            )
        cursor = span[1]
        yield span


def _replaced(
    example: Example, index: int, tokenizer: PreTrainedTokenizerBase, text: str, upto: str
) -> tuple[int, int]:
    """Start and end of the text that changes with a message, and of what ends its turn.

    Text that is not in `upto` would belong to a later message, such as the result of a call.
    """
    messages = list(example.messages)
    rest = {k: v for k, v in messages[index].items() if k not in (*_CALLS, *_REASONING)}
    messages[index] = {**rest, "content": _PROBE}
    try:
        probed = replace(example, messages=tuple(messages))
        begin, _, after = _render(tokenizer, probed).partition(_PROBE)
        _, _, end = _render(tokenizer, probed, index + 1).partition(_PROBE)
    except DataError:
        return -1, -1
    start, stop = len(begin), len(text) - len(after)
    is_found = start <= stop and text.startswith(begin) and text.endswith(after)
    is_found = is_found and text[start:stop] in upto
    return (start, stop + len(end) * after.startswith(end)) if is_found else (-1, -1)


def _text(tokenizer: PreTrainedTokenizerBase, example: Example) -> str:
    """The chat template's text of an example.

    Raises:
        DataError: It leaves out tools, calls, or the reasoning of the last message.
    """
    text = _render(tokenizer, example)
    for key, less in _without_parts(example):
        try:
            is_used = _render(tokenizer, less) != text
        except DataError:  # the rest needs it
            continue
        if not is_used:
            raise DataError(
                f"data.path: expected a chat template that writes '{key}', which {example.place} "
                "has, got one that leaves it out. Set sft.chat_template_path, or remove it."
            )
    return text


def _without_parts(example: Example) -> Iterator[tuple[str, Example]]:
    """Each part that a template must write, and the example without it."""
    if example.tools:
        yield "tools", replace(example, tools=None)
    for key in (*_CALLS, *_REASONING):
        # Templates leave out the reasoning of earlier messages.
        first = 0 if key in _CALLS else len(example.messages) - 1
        if any(message.get(key) for message in example.messages[first:]):
            rest = ({k: v for k, v in m.items() if k != key} for m in example.messages[first:])
            yield key, replace(example, messages=(*example.messages[:first], *rest))
    *before, last = example.messages
    for mark in _THOUGHT:
        thought, _, answer = str(last["content"]).rpartition(mark)
        if len(thought.split()) > 1:  # more than a mark: a template may write no empty thought
            yield mark, replace(example, messages=(*before, {**last, "content": answer}))


def _encode_spans(
    text: str, spans: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase
) -> Encoded:
    if not tokenizer.is_fast:
        raise ConfigError(
            "data.tokenizer: expected a fast tokenizer, which knows the position of its tokens in "
            "a text; got a slow one. Use the tokenizer.json of the same model."
        )
    found: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    learned = [
        any(start < stop and begin < end for begin, stop in spans)
        for start, end in found["offset_mapping"]
    ]
    return Encoded(list(found["input_ids"]), learned)


def _render(
    tokenizer: PreTrainedTokenizerBase, example: Example, stop: int | None = None, **options: Any
) -> Any:
    """The chat template's text of the first messages, unless `options` asks for more.

    Raises:
        DataError: The template refuses the conversation, or needs too much time or memory.
    """
    settings, chat = {"tokenize": False, **options}, cast("Any", list(example.messages[:stop]))
    try:
        with _limits(memory=not settings["tokenize"]):
            return tokenizer.apply_chat_template(chat, tools=example.tools, **settings)
    except Exception as error:  # templates may raise any error
        raise DataError(
            "data.path: expected a conversation that the chat template accepts, got one at "
            f"{example.place} that it refuses ({error}). Correct the record, or set "
            "sft.chat_template_path."
        ) from error


@contextmanager
def _limits(*, memory: bool) -> Iterator[None]:
    """Stop a template that needs too much time or memory; works only in the main thread.

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
        least = (
            f"{TEMPLATE_LIMIT_BYTES >> 20} MiB"
            if soft == resource.RLIM_INFINITY
            else "ulimit -v leaves"
        )
        raise MemoryError(f"it needs more than {least}") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return cast("list[int]", tokenizer(text, add_special_tokens=False)["input_ids"])


# ---- the built-in data ---------------------------------------------------------------------------


def question_answers() -> str:
    """JSONL of thousands of conversations ("What does textwrap.dedent do?", first sentence of its
    docstring), shuffled, from Python's standard library. It is parsed and not imported, because
    importing some modules has side effects.
    """
    found = sorted(set(_questions()))
    random.Random(SEED).shuffle(found)
    roles = ("user", ASSISTANT)
    lines = (
        {"messages": [{"role": r, "content": c} for r, c in zip(roles, pair, strict=True)]}
        for pair in found
    )
    return "".join(json.dumps(line) + "\n" for line in lines)


def _questions() -> Iterator[tuple[str, str]]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.glob("*.py")):
        if file.name.startswith("_"):
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        yield from _questions_of(tree.body, file.stem)


def _questions_of(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str]]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        name = f"{prefix}.{node.name}"
        text = inspect.cleandoc(ast.get_docstring(node) or "")
        answer = " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".") + "."
        if SHORTEST <= len(answer) <= LONGEST:
            what = "is" if isinstance(node, ast.ClassDef) else "does"
            yield f"What {what} {name}{'' if what == 'is' else ' do'}?", answer
        if isinstance(node, ast.ClassDef):
            yield from _questions_of(node.body, name)
