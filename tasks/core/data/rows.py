"""From a record of any source to a row: its columns as the configuration maps them, the prompt, the gold answer and a demonstration."""

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import xxhash
from jinja2 import StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from configs.errors import DataError
from configs.schema import DataSection
from tasks.core.data import encoding
from tasks.core.scoring import answers

_CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")
_SURROGATE = re.compile("[\ud800-\udfff]")
ROLES = ("system", "user", "assistant")


def messages(section: DataSection, question: str, before: Sequence[dict[str, str]] = ()) -> list[dict[str, str]]:
    """The chat that asks a question: the system message where there is one, the turns before, then the question with the instruction on a line of its own."""
    system = (
        [{"role": "system", "content": section.system_prompt}]
        if section.system_prompt and not (before and before[0]["role"] == "system")
        else []
    )
    return [
        *system,
        *before,
        {"role": "user", "content": f"{question}\n{section.instruction}" if section.instruction else question},
    ]


class Unusable(DataError):
    """A row that a check finds while it is read, and that cannot be kept."""

    def __init__(self, check: str, where: str, why: str):
        super().__init__(f"{where} {why}")
        self.check, self.where, self.why = check, where, why


@dataclass(frozen=True)
class Row:
    """A question with its gold answer (as `answers.normal_gold` writes it) and a demonstration."""

    id: str
    where: str  # for messages, such as "train.jsonl line 12"
    question: str
    gold: str
    prompt: list[dict[str, str]]
    completion: str
    asked: str  # what makes two questions the same: the question, or all turns of a conversation
    stated: str | None = None  # the answer that the demonstration states, where that is not the gold one
    columns: dict[str, Any] = field(default_factory=dict)  # the category and `data.columns`

    @property
    def key(self) -> bytes:
        """Digest of what was asked but for case, space, and how accents are encoded."""
        return xxhash.xxh3_128_digest(" ".join(unicodedata.normalize("NFC", self.asked).split()).casefold().encode())

    def plain(self) -> dict[str, Any]:
        """As it is in grpo.jsonl and the held-out files."""
        return {"id": self.id, "prompt": self.prompt, "question": self.question, "gold": self.gold, **self.columns}


class Reader:
    """Makes rows of records. `found(check, where, why, outcome)` is told of damage that is repaired or kept."""

    def __init__(self, section: DataSection, found: Callable[[str, str, str, str], None]):
        self.section, self.found = section, found
        self.kinds: dict[str, tuple[str, str]] = {}
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
        self.template = (
            environment.from_string(section.prompt_template) if section.prompt_template is not None else None
        )

    def row(self, id_: str, where: str, record: Any) -> Row:
        """Raises Unusable for a record that makes no row, DataError for a template that cannot be rendered."""
        s = self.section
        if not isinstance(record, dict):
            raise Unusable(
                "unreadable",
                where,
                f"holds {type(record).__name__} and must be an object with columns: correct the line or take it out",
            )
        turns, answer = (
            self._conversation(record, where) if s.messages_column else self._question_and_answer(record, where)
        )
        question = turns[-1]["content"]
        gold, completion, stated = self._gold(record, answer, where)
        columns = self._columns(record, where)
        return Row(
            id_,
            where,
            question,
            gold,
            self._prompt(turns, record, where),
            completion,
            "\n".join(t["content"] for t in turns),
            stated,
            columns,
        )

    def _question_and_answer(self, record: dict, where: str) -> tuple[list[dict[str, str]], str | None]:
        s = self.section
        question = self._text(record, "question_column", s.question_column, where)
        bare = s.gold_column is not None and (s.answer_column == s.gold_column or s.answer_column not in record)
        return [{"role": "user", "content": question}], None if bare else self._text(
            record, "answer_column", s.answer_column, where
        )

    def _conversation(self, record: dict, where: str) -> tuple[list[dict[str, str]], str | None]:
        """The turns up to the last question, and the worked answer: the last message, where that is the assistant's."""
        s = self.section
        value = _value(record, "messages_column", s.messages_column, where)
        shape = f"in column {s.messages_column} (data.messages_column)"
        if not isinstance(value, list) or not all(
            isinstance(m, dict) and m.get("role") in ROLES and isinstance(m.get("content"), str) for m in value
        ):
            raise Unusable(
                "unreadable",
                where,
                f"has no messages {shape}: each must have a role ({', '.join(ROLES)}) and a content that is text",
            )
        turns = [
            {"role": m["role"], "content": self._whole(m["content"], s.messages_column, "messages_column", where)}
            for m in value
        ]
        answer = turns.pop()["content"] if turns and turns[-1]["role"] == "assistant" else None
        if answer is None and s.gold_column is None:
            raise Unusable(
                "missing",
                where,
                f"has no answer {shape}: the last message must be the assistant's, unless data.gold_column is given",
            )
        if not turns or turns[-1]["role"] != "user":
            raise Unusable(
                "missing", where, f"has no question {shape}: the last message before the answer must be the user's"
            )
        return turns, answer

    def _gold(self, record: dict, answer: str | None, where: str) -> tuple[str, str, str | None]:
        """The gold answer, the demonstration, and what that states where it is something else."""
        s = self.section
        work, mark, last = (answer or "").rpartition("####")
        if s.gold_column is not None:
            given, own = self._scalar(record, "gold_column", s.gold_column, where), answers.extract_answer(answer or "")
        elif mark:
            # Of two #### the last counts; another form in the work above it is a second opinion.
            given, own = last, answers.extract_answer(work.replace("####", " "))
        else:
            given = own = answers.extract_answer(answer or "")
            if given is None:
                raise Unusable(
                    "unreadable", where, f"has no #### in {s.messages_column or s.answer_column}: an answer must end in `#### N`, where N is the gold answer, "
                    "or state it as `Final Answer: N`, or data.gold_column must name its column"
                )  # fmt: skip
        gold = answers.normal_gold(given)
        if gold is None:
            raise Unusable(
                "unreadable", where, f"has the gold answer {given.strip()[:60]!r}, which no answer could be compared with: "
                r"write a number, a ratio, yes or no, a choice such as B, LaTeX, or \text{words} after the last ####"
            )  # fmt: skip
        stated = own if own is not None and not answers.same_answer(own, gold) else None
        if answer is None:
            return gold, f"Final Answer: {gold}", None
        if mark and (s.gold_column is None or stated is None):
            return gold, f"{_CALCULATOR_MARK.sub('', work).strip()}\nFinal Answer: {gold}".lstrip(), stated
        return gold, answer if own is not None else f"{answer}\nFinal Answer: {gold}", stated

    def _columns(self, record: dict, where: str) -> dict[str, Any]:
        """The category, as text, and the further columns, each of one type in all rows."""
        s, found = self.section, {}
        category = record.get(s.category_column)
        if s.category_column != DataSection().category_column:  # one that was named must be there
            category = _value(record, "category_column", s.category_column, where)
        if category is not None and not isinstance(category, str | int):
            why = (
                f"has {type(category).__name__} in column {s.category_column} (data.category_column) and must have text"
            )
            raise Unusable("unreadable", where, f"{why}: put it in quotes, or name another column")
        if category not in (None, ""):
            found["category"] = self._encodable(str(category), s.category_column, "category_column", where)
        for name in s.columns:
            value = found[name] = _value(record, "columns", name, where)
            if not _is_json(value):
                raise DataError(
                    f"{where} has {type(value).__name__} in column {name} (data.columns), which JSON cannot hold: make it text or a number"
                )
            self._encodable(value, name, "columns", where)
            kind = "a number" if type(value) in (int, float) else type(value).__name__
            first, there = self.kinds.setdefault(name, (kind, where)) if value is not None else (kind, where)
            if kind != first:
                raise DataError(
                    f"{where} has {kind} in column {name} (data.columns) and {there} has {first}: give it one type"
                )
        return found

    def _prompt(self, turns: list[dict[str, str]], record: dict, where: str) -> list[dict[str, str]]:
        """The chat that asks: the system message where there is one, then the turns, the last with the template or instruction."""
        s, question = self.section, turns[-1]["content"]
        if self.template is not None:
            try:
                text = self.template.render({**record, "question": question}).strip()
            except Exception as error:  # whatever the user's template does
                has = ", ".join(sorted(map(str, record)))
                why = f"({type(error).__name__}: {' '.join(str(error).split())})"
                raise DataError(
                    f"{where} does not fit data.prompt_template {why}: it has question and the columns {has}"
                ) from error
            self._encodable(text, "of those in the template", "prompt_template", where)
            if not text:
                raise DataError(
                    f"{where} gives an empty prompt with data.prompt_template: write {{{{ question }}}} into it"
                )
            question = text
        return messages(s, question, turns[:-1])

    def _text(self, record: dict, name: str, column: str, where: str) -> str:
        value = _value(record, name, column, where)
        if value is not None and not isinstance(value, str):
            raise Unusable(
                "unreadable",
                where,
                f"has {type(value).__name__} in column {column} (data.{name}) and must have text: put it in quotes",
            )
        return self._whole(value or "", column, name, where)

    def _scalar(self, record: dict, name: str, column: str, where: str) -> str:
        """Text, or a number or truth value as text."""
        value = _value(record, name, column, where)
        plain = (
            str(value).lower()
            if isinstance(value, bool)
            else str(value)
            if isinstance(value, int | float | Decimal)
            else value
        )
        return self._text({column: plain}, name, column, where)

    def _whole(self, text: str, column: str, name: str, where: str) -> str:
        """A text, stripped, with its damage repaired where the configuration wants that."""
        self._encodable(text, column, name, where)
        if (damage := encoding.damage(text)) is not None:
            policy, why = self.section.checks.encoding, f"has {damage} in column {column}: {text.strip()[:60]!r}"
            text = encoding.repaired(text) if policy == "fix" else text
            if policy in ("drop", "fail") or (policy == "fix" and encoding.LOST in text):
                raise Unusable("encoding", where, f"{why}; correct the line, or set data.checks.encoding to warn")
            self.found("encoding", where, why, "fixed" if policy == "fix" else "kept")
        if not text.strip():
            raise Unusable(
                "missing", where, f"has nothing in column {column} (data.{name}): fill it in or take the line out"
            )
        return text.strip()

    @staticmethod
    def _encodable(value: Any, column: str, name: str, where: str) -> Any:
        """The value, whose texts UTF-8 can hold: JSON can write half a surrogate pair, and nothing else takes it."""
        if _SURROGATE.search(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)):
            why = f"has half a surrogate pair in column {column} (data.{name}), which is no text: correct the line or take it out"
            raise Unusable("unreadable", where, why)
        return value


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _value(record: dict, name: str, column: str, where: str) -> Any:
    if column not in record:
        has = ", ".join(sorted(map(str, record))) or "none"
        raise Unusable(
            "missing",
            where,
            f"has no column {column} (data.{name}), it has {has}: add the column or change data.{name}",
        )
    return record[column]
