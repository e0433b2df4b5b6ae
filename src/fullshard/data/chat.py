"""Chat data in its common formats, converted to one form.

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}]}
    {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}        ShareGPT
    {"instruction": ..., "input": ..., "output": ...}                                 Alpaca
    {"prompt": ..., "completion": ...}                  texts, or lists of messages
    {"question": ..., "answer": ...}

The keys of a record determine its format, so one file may mix formats.
"""

from __future__ import annotations

import ast
import inspect
import json
import random
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fullshard.data.records import Kind, Record, Span, files_at, read_records
from fullshard.errors import DataError

Message = Mapping[str, Any]

ASSISTANT = "assistant"
_ROLES = {"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT}
_ROLES |= {"observation": "tool", "function_response": "tool", "ipython": "tool"}
_PAIRS = (("question", "answer"), ("query", "response"), ("prompt", "response"))
SHORTEST, LONGEST = 20, 160  # characters of a built-in answer: one sentence
SEED = 0
_FORMS = "messages, conversations, prompt and completion, instruction and output, question, answer"


@dataclass(frozen=True)
class Turns:
    """A conversation, to be rendered by a chat template.

    Attributes:
        messages: Messages with `role`, `content` and further keys for the template.
        num_prompt: Number of messages at the start that are never learned.
        is_completion: Whether the record was a prompt and its completion.
        place: Its record, whose text is file and line, for errors.
        tools: Functions that may be called, for the template.
    """

    messages: tuple[Message, ...]
    num_prompt: int
    is_completion: bool
    place: object
    tools: Any = None


@dataclass(frozen=True)
class Pair:
    """A prompt and its completion, as plain text."""

    prompt: str
    completion: str
    place: object


Example = Turns | Pair


def is_chat(path: Path) -> bool:
    """Whether the first record is chat data; plain text has no records."""
    files = files_at(path)
    if files.kind is Kind.TEXT:
        return False
    first = next((one for span in files.spans() for one in read_records(span)), None)
    return first is not None and isinstance(first.value, dict) and _reader(first.value) is not None


def read_examples(spans: Iterable[Span]) -> Iterator[Example]:
    """The examples of parts of files.

    Raises:
        DataError: A record has an unknown format; names its place.
    """
    for record in (one for span in spans for one in read_records(span)):
        if not isinstance(record.value, dict):
            raise DataError(
                f"data.path: expected a JSON object, got {type(record.value).__name__} at "
                f'{record}. Write {{"messages": [...]}}.'
            )
        reader = _reader(record.value)
        if reader is None:
            columns = ", ".join(f"'{name}'" for name in record.value) or "none"
            raise DataError(
                f"data.path: expected columns among {_FORMS}; got {columns} at {record}. "
                "Rename them; plain text is what `fullshard train` takes."
            )
        yield reader(record)


def _reader(value: Mapping[str, Any]) -> Any:
    """The reader of a record with these keys; None if no format has them."""
    there = {key for key, held in value.items() if held is not None}
    if "messages" in there:
        return lambda record: _turns(record, "messages", "role", "content")
    if "conversations" in there:
        return _share_gpt
    if {"prompt", "completion"} <= there:
        return _prompt_completion
    if {"instruction", "output"} <= there:
        return _alpaca
    for question, answer in _PAIRS:
        if {question, answer} <= there:
            return lambda record: _exchange(record, _text(record, question), _text(record, answer))
    return None


def _share_gpt(record: Record) -> Turns:
    turns = record.value["conversations"]
    has_roles = isinstance(turns, list) and turns and "role" in cast("Any", turns[0])
    keys = ("role", "content") if has_roles else ("from", "value")
    return _turns(record, "conversations", *keys)


def _turns(record: Record, column: str, role: str, content: str) -> Turns:
    messages = _messages(record, column, role, content)
    system = record.value.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": system}, *messages)
    return Turns(messages, 0, False, record, _tools(record))


def _messages(
    record: Record, column: str, role: str = "role", content: str = "content"
) -> tuple[Message, ...]:
    value = record.value[column]
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(
            f"data.path: expected a list of messages at {record}, {column}. Correct the record."
        )
    found: list[Message] = []
    for number, message in enumerate(cast("Sequence[Any]", value)):
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
        if name != "tool" or said is None:  # what a tool returns may be any value
            said = _said(said, record, column, number)
        found.append({**rest, "role": name, "content": said})
    return tuple(found)


def _said(value: object, record: Record, column: str, number: int) -> str:
    """The text of a message; templates would write other values as Python does."""
    if isinstance(value, int | float):
        return str(value)
    parts: list[Any] = value if isinstance(value, list) else ["" if value is None else value]
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"data.path: expected text, or parts with 'text', in the message at {record}, "
            f"{column}[{number}]; got {str(value)[:80]!r}. Correct the record."
        )
    return "".join(texts)


def _prompt_completion(record: Record) -> Example:
    prompt, completion = record.value["prompt"], record.value["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Pair(prompt, completion, record)
    before, after = _messages(record, "prompt"), _messages(record, "completion")
    return Turns((*before, *after), len(before), True, record, _tools(record))


def _tools(record: Record) -> list[Any] | None:
    """The functions of a record, a list or one, also as JSON; None if it has none."""
    told = record.value.get("tools")
    if isinstance(told, str):
        try:
            told = json.loads(told) if told.strip() else None
        except ValueError as error:
            raise DataError(
                f"data.path: expected JSON in 'tools' at {record}; got {told[:80]!r}. "
                "Correct the record, or rename the column."
            ) from error
    return ([told] if isinstance(told, Mapping) else told) or None


def _alpaca(record: Record) -> Turns:
    asked = "\n\n".join(
        part
        for part in (_text(record, "instruction"), record.value.get("input") or "")
        if isinstance(part, str) and part
    )
    return _exchange(record, asked, _text(record, "output"))


def _exchange(record: Record, asked: str, answer: str) -> Turns:
    messages = ({"role": "user", "content": asked}, {"role": ASSISTANT, "content": answer})
    return Turns(messages, 1, is_completion=True, place=record)


def _text(record: Record, column: str) -> str:
    value = record.value[column]
    if not isinstance(value, str):
        raise DataError(
            f"data.path: expected text in '{column}', got {type(value).__name__} at "
            f"{record}. Correct the record."
        )
    return value


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
