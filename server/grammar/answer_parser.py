"""Splits answers into reasoning, content and tool calls as their text comes; whole replies add up a stream's parts.

A part is returned once, when it is certain: text of reasoning and content as soon as no markup can begin in it, a free
call when it has ended. A call that does not end, or is none, is content. Text is read once, in time that grows with its
length, so that it is parsed on the event loop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Iterable
from functools import partial
from typing import Any, TypeVar

from msgspec import DecodeError, Raw, Struct
from msgspec.json import decode

from server.grammar.field_values import ArgumentTypes, typed
from server.grammar.grammar import CALL_BEGIN, CALL_MIDDLE, COMPACT_CALL, Requested
from server.text.answer_form import CHANNEL, MESSAGE, MESSAGE_ENDS, START, AnswerForm, is_analysis


class ToolCall(Struct, frozen=True):
    """One call of a function; `arguments` is JSON, incomplete if an output that must be a call was cut off."""

    name: str
    arguments: str


class CallDelta(Struct, frozen=True):
    """An addition to the call with number `index`; its first one has the name."""

    index: int
    name: str | None
    arguments: str


class Parts(Struct, frozen=True):
    """Additions to an answer's parts."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


def joined(deltas: Iterable[CallDelta]) -> tuple[ToolCall, ...]:
    """Return the calls that deltas add up to."""
    names: list[str] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if delta.name is not None:
            names.append(delta.name)
            arguments.append([])
        arguments[delta.index].append(delta.arguments)
    return tuple(ToolCall(name, "".join(parts)) for name, parts in zip(names, arguments, strict=True))


# Characters of JSON outside of strings.
OUTSIDE_STRINGS = frozenset('{}[]:,"+-.0123456789eEtrufalsn \t\r\n')


class Nesting:
    """Finds the bracket that closes JSON in text that comes in pieces.

    Args:
        depth: brackets that are open before the text.
    """

    def __init__(self, depth: int = 0) -> None:
        self.is_broken = False  # the text is no JSON
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def end_in(self, text: str) -> int | None:
        """Return the position of the bracket that closes the outermost one, or of the first character that cannot be.

        None if there is none in this text.
        """
        for position, character in enumerate(text):
            if self._in_string:
                self.is_broken = character < " "
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
            else:
                self.is_broken = character not in OUTSIDE_STRINGS
            if self.is_broken or not self._depth:
                return position
        return None


class CallSplitter:
    """Splits the text of calls in their compact form, as it comes.

    Args:
        called: the only function, whose arguments are all of the text; None for a JSON array of calls.
    """

    def __init__(self, called: str | None) -> None:
        self._called = called
        self._index = 0
        self._head = ""  # text before the arguments of the next call
        self._arguments: Nesting | None = None

    def push(self, text: str) -> list[CallDelta]:
        """Add text. Return what it adds to calls, at most one delta per call and kind."""
        if self._called is not None:
            name, self._called = self._called or None, ""
            return [CallDelta(0, name, text)] if text or name else []
        deltas: list[CallDelta] = []
        while text:
            read = self._read_head if self._arguments is None else self._read_arguments
            text = read(text, deltas)
        return deltas

    def _read_head(self, text: str, deltas: list[CallDelta]) -> str:
        """Read up to the arguments of the next call; return the text behind."""
        self._head += text
        before, middle, behind = self._head.partition(CALL_MIDDLE)
        if not middle:
            return ""
        deltas.append(CallDelta(self._index, before.partition(CALL_BEGIN)[2].strip('"'), ""))
        self._head, self._arguments = "", Nesting(depth=1)
        return behind

    def _read_arguments(self, text: str, deltas: list[CallDelta]) -> str:
        """Read up to the end of the arguments, which the call's bracket follows; return the text behind."""
        assert self._arguments is not None
        end = self._arguments.end_in(text)
        if arguments := text[:end]:
            deltas.append(CallDelta(self._index, None, arguments))
        if end is None:
            return ""
        self._arguments, self._index = None, self._index + 1
        return text[end + 1 :]


class _Trimmed:
    """Text without the white space beside markup at its ends."""

    def __init__(self) -> None:
        self.has_text = False
        self._held: list[str] = []  # white space that text may follow
        self._is_beside_markup = False

    def add(self, text: str) -> str:
        """Return the text that can be shown."""
        shown = text.rstrip()
        if not shown:
            self._held.append(text)
            return ""
        held, self._held = "".join(self._held), [text[len(shown) :]]
        if self._is_beside_markup and not self.has_text:
            held, shown = "", shown.lstrip()
        self.has_text, self._is_beside_markup = True, False
        return held + shown

    def add_markup(self) -> None:
        self._is_beside_markup = True

    def end(self) -> str:
        """Return the white space at the end that belongs to the text."""
        return "" if self._is_beside_markup else "".join(self._held)


# Text before the arguments of a call that may be its name, and a name.
MAX_HEAD_CHARS = 1024
# Characters that are read at a time.
PIECE_CHARS = 1024
CALLED = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
# A call in Python, as Llama's templates ask for it; without backtracking.
PYTHON_CALL = re.compile(
    r'\s*+([A-Za-z0-9_-]{1,64}+)\.call\(\s*+((?:\w++\s*+=\s*+"(?:[^"\\]|\\.)*+"\s*+,?+\s*+)*+)\)\s*+',
    re.DOTALL,
)
PYTHON_ARGUMENT = re.compile(r'(\w++)\s*+=\s*+("(?:[^"\\]|\\.)*+")', re.DOTALL)
WORD_ENDS = re.compile(r"\s+|(?<=>)(?=\w)")
RECIPIENT = re.compile(r"\bto=(functions\.)?([A-Za-z0-9_.-]{1,128})")
T = TypeVar("T")
# The machine stops at each yield for more text.
Steps = Generator[None, None, T]
Take = Callable[[str], None]


class NoCall(Exception):
    """The text that was taken for a call is none, or does not end."""


class _Done(Exception):
    """The only call that may be has ended."""


class AnswerParser:
    """Parses one answer as its text comes.

    Args:
        form: how the answer is written.
        requested: the tools, and where their calls must stand.
        types: of the tools' parameters, which several answers may share; None reads them for this one.
    """

    def __init__(self, form: AnswerForm, requested: Requested, types: ArgumentTypes | None = None) -> None:
        self.is_done = False  # the only call that may be has ended; text behind it is left out
        self.num_held = 0  # characters of a call that has not ended
        self._form = form
        self._requested = requested
        self._syntax = (form.calls or COMPACT_CALL) if requested.tools else None
        self._content, self._reasoning = _Trimmed(), _Trimmed()
        self._reasoning.add_markup()
        self._num_calls = 0
        self._types = types or ArgumentTypes(requested.tools)
        self._new = ""  # text that was not taken
        self._is_last = False
        self._raw: list[str] = []  # text of a call that has not ended
        self._shown: list[str] = []
        self._thought: list[str] = []
        self._called: list[CallDelta] = []
        self._steps = self._answer()
        next(self._steps)

    def push(self, text: str, is_last: bool = False) -> Parts:
        """Add text. Return the parts that have become certain.

        Args:
            is_last: no text follows.
        """
        # In pieces, so that none is copied for each of many markers.
        for begin in range(0, max(len(text), 1), PIECE_CHARS):
            if not self.is_done:
                self._new += text[begin : begin + PIECE_CHARS]
                self._is_last = is_last and begin + PIECE_CHARS >= len(text)
                next(self._steps, None)
        if is_last and not self.is_done:
            self._shown.append(self._content.end())
        parts = Parts("".join(self._shown), "".join(self._thought), tuple(self._called))
        self._shown, self._thought, self._called = [], [], []
        return parts

    def _answer(self) -> Steps[None]:
        yield
        try:
            if self._form.has_channels and self._requested.form in ("free", "message"):
                yield from self._channels()
                return
            if self._form.is_reasoning:
                yield from self._reason()
            yield from self._free() if self._requested.form == "free" else self._forced()
        except _Done:
            self.is_done = True

    def _reason(self) -> Steps[None]:
        """Read reasoning up to its end."""
        assert self._form.reasoning is not None
        self._content.add_markup()
        yield from self._until((self._form.reasoning[1],), self._think)

    def _forced(self) -> Steps[None]:
        """Read calls that a grammar holds to their compact form, behind reasoning that may come first."""
        if self._form.reasoning is not None and (yield from self._expect(self._form.reasoning[0], _drop)):
            yield from self._reason()
        yield from self._peek(_drop)
        yield from self._split(CallSplitter(self._requested.called))

    def _split(self, splitter: CallSplitter) -> Steps[None]:
        """Read calls, or their arguments, up to the end of the text; each piece is returned as it comes."""
        while True:
            text, self._new = self._new, ""
            if text:
                self._called += splitter.push(text)
            if self._is_last:
                return
            yield

    def _free(self) -> Steps[None]:
        """Read content and calls; reasoning and calls without a tag stand before content."""
        opening = "" if self._form.reasoning is None else self._form.reasoning[0]
        syntax = self._syntax
        tags: dict[str, Callable[[], Steps[None]]] = {}
        if syntax is not None:
            tags = dict.fromkeys(syntax.more_tags, self._tagged)
            if syntax.tag:
                read = {"json": self._json, "named": self._named, "fields": self._fields}[syntax.kind]
                first, *others = _words(syntax.tag)
                tags[first] = read
                if syntax.kind == "fields":
                    # Models leave the first word out.
                    later = ((word, number) for number, word in enumerate(others, 1) if word[0] in "<[")
                    tags |= {word: partial(self._fields, number) for word, number in later}
        while True:
            if not self._content.has_text:
                if opening and (yield from self._expect(opening, self._show)):
                    yield from self._reason()
                    continue
                is_bare = syntax is not None and not syntax.tag
                if is_bare and (yield from self._peek(self._show)) in ("{", "["):
                    yield from self._call("", partial(self._json, True))
                    continue
            if self._requested.grammar is None:
                tag = yield from self._until(tags, self._show)
            else:
                # It holds all of the answer, whose text may have markup, or calls alone.
                tag = yield from self._first_of(tags)
            if tag is None:
                return
            yield from self._call(tag, tags[tag])

    def _call(self, tag: str, read: Callable[[], Steps[None]]) -> Steps[None]:
        """Read calls behind a tag; if the text is none, it is content."""
        self._release()
        self._take(tag)
        try:
            yield from read()
        except NoCall:
            self._show("".join(self._raw))
        self._release()

    def _json(self, must_be_known: bool = False) -> Steps[None]:
        """Read an object that is a call, or a list of such."""
        assert self._syntax is not None
        yield from self._rest_of(self._syntax.tag)
        is_list = (yield from self._peek(self._take)) == "["
        if is_list:
            self._take_first()
        while True:
            if (yield from self._peek(self._take)) != "{":
                raise NoCall
            self._add_json((yield from self._object()), must_be_known)
            if not is_list:
                break
            follows = yield from self._peek(self._take)
            if follows not in (",", "]"):
                raise NoCall
            self._take_first()
            if follows == "]":
                break
        yield from self._end([*self._syntax.closing.split(), *([] if self._syntax.tag else [";"])])

    def _add_json(self, text: str, must_be_known: bool) -> None:
        assert self._syntax is not None
        try:
            document = decode(text, type=dict[str, Raw])
            if (inner := document.get("function")) is not None and bytes(inner)[:1] == b"{":
                document = decode(inner, type=dict[str, Raw])
            name = decode(document.get(self._syntax.name_key) or document["name"], type=str)
            keys = (self._syntax.arguments_key, "arguments", "parameters")
            arguments = next(document[key] for key in keys if key in document)
        except (DecodeError, UnicodeEncodeError, RecursionError, KeyError, StopIteration):
            raise NoCall from None
        if must_be_known and name not in self._requested.names:
            raise NoCall
        self._add(name, object_text(bytes(arguments)))

    def _named(self) -> Steps[None]:
        """Read a name and arguments in JSON, and further ones in their section."""
        assert self._syntax is not None
        yield from self._rest_of(self._syntax.begin)
        while True:
            head: list[str] = []
            if (yield from self._until("{", self._limited(head))) is None:
                raise NoCall
            self._new = "{" + self._new
            name = "".join(head)
            # Models leave ids out.
            for words in (self._syntax.middle.split(), self._syntax.id_end.split()):
                name = name.partition(words[0])[0] if words else name
            if CALLED.fullmatch(name.strip()) is None:
                raise NoCall
            text = yield from self._object()
            self._add(name.strip(), object_text(text))
            yield from self._end(self._syntax.closing.split())
            if not (yield from self._is_another()):
                return

    def _fields(self, number: int = 0) -> Steps[None]:
        """Read a name and fields with the arguments, and further ones in their section.

        Args:
            number: of the tag's word that was read.
        """
        assert self._syntax is not None
        yield from self._rest_of(self._syntax.begin, number)
        closing = self._syntax.closing.split()
        while True:
            name, arguments = yield from self._name_and_fields(closing[0])
            try:
                text = json.dumps(arguments)
            except RecursionError:
                raise NoCall from None
            self._add(name, text)
            yield from self._end(closing[1:])
            if not (yield from self._is_another()):
                return

    def _name_and_fields(self, closing: str) -> Steps[tuple[str, dict[str, Any]]]:
        """Read a name and fields, up to the word behind them."""
        assert self._syntax is not None
        key_end, value_end = self._syntax.field[1:]
        field = self._syntax.field[0].strip()
        head: list[str] = []
        following = self._syntax.middle.split()[:1] or [closing, field]
        marker = yield from self._required(following, self._limited(head))
        name = "".join(head).strip()
        if CALLED.fullmatch(name) is None:
            raise NoCall
        arguments: dict[str, Any] = {}
        types = self._types.of(name)
        if marker not in (closing, field):
            marker = yield from self._one_of((closing, field))
        while marker == field:
            key: list[str] = []
            value: list[str] = []
            yield from self._required(key_end.split()[:1], self._limited(key))
            for word in key_end.split()[1:]:
                yield from self._one_of((word,))
            yield from self._required((value_end.strip(),), self._collecting(value))
            argument = "".join(key).strip()
            arguments[argument] = typed("".join(value), types.get(argument, frozenset()))
            marker = yield from self._one_of((closing, field))
        return name, arguments

    def _is_another(self) -> Steps[bool]:
        """Take the beginning of a further call in the same section, or drop the section's end."""
        assert self._syntax is not None
        words = _words(self._syntax.again)
        if not words or not (yield from self._expect(words[0], self._show)):
            yield from self._end(self._syntax.section_end.split())
            return False
        self._take(words[0])
        yield from self._rest_of(self._syntax.again)
        return True

    def _tagged(self) -> Steps[None]:
        """Read JSON behind a tag, or a call in Python, which ends with the answer."""
        if (yield from self._peek(self._take)) in ("{", "["):
            yield from self._json()
            return
        text: list[str] = []
        yield from self._until((), self._collecting(text))
        found = PYTHON_CALL.fullmatch("".join(text))
        if found is None or found[1] not in self._requested.names:
            raise NoCall
        arguments = ", ".join(
            f"{json.dumps(key)}: {value}" for key, value in PYTHON_ARGUMENT.findall(found[2])
        )
        self._add(found[1], object_text(f"{{{arguments}}}"))

    def _channels(self) -> Steps[None]:
        """Read harmony's messages, the first of which the prompt has begun; an answer without a header is content."""
        if self._form.is_reasoning or self._form.is_content:
            yield from self._body(self._form.is_reasoning)
        else:
            for marker in ("to=", CHANNEL, MESSAGE):
                if (yield from self._expect(marker, self._show)):
                    self._new = marker + self._new
                    yield from self._message()
                    break
            else:
                yield from self._body(is_thought=False)
        while (yield from self._until((START,), _drop)) is not None:
            yield from self._message()

    def _message(self) -> Steps[None]:
        """Read a message from its header to its end."""
        head: list[str] = []
        try:
            marker = yield from self._until((MESSAGE,), self._limited(head))
        except NoCall:
            self._show("".join(self._raw))
            marker = MESSAGE
        self._release()
        if marker is None:
            return
        header = "".join(head)
        called = self._recipient(header)
        if called is not None and self._requested.form == "message":
            yield from self._split(CallSplitter(called))
            return
        if called is not None:
            yield from self._call("", partial(self._channel_call, called))
        is_thought = is_analysis(header)
        if called is None and (self._reasoning if is_thought else self._content).has_text:
            (self._think if is_thought else self._show)("\n")
        yield from self._body(is_thought and called is None)

    def _recipient(self, header: str) -> str | None:
        """Return the function that a message calls; harmony's own tools and the caller of a function are none."""
        found = RECIPIENT.search(header) if self._requested.tools else None
        return found[2] if found and (found[1] or found[2] in self._requested.names) else None

    def _body(self, is_thought: bool) -> Steps[None]:
        """Read up to the end of a message; the beginning of the next one is left."""
        # No message follows an answer that a grammar holds, and its text may have markup.
        ends = MESSAGE_ENDS if is_thought or self._requested.grammar is None else ()
        marker = yield from self._until(ends, self._think if is_thought else self._show)
        self._content.add_markup()
        if marker == START:
            self._new = START + self._new

    def _channel_call(self, name: str) -> Steps[None]:
        if (yield from self._peek(self._take)) != "{":
            raise NoCall
        self._add(name, object_text((yield from self._object())))

    def _until(self, markers: Collection[str], take: Take) -> Steps[str | None]:
        """Take text up to one of some markers and return that, or None at the end of the text."""
        while True:
            places = [(at, marker) for marker in markers if (at := self._new.find(marker)) >= 0]
            if places:
                at, marker = min(places)
                before, self._new = self._new[:at], self._new[at:]
                take(before)
                self._new = self._new[len(marker) :]
                return marker
            num_held = 0 if self._is_last else max((_overlap(self._new, each) for each in markers), default=0)
            cut = len(self._new) - num_held
            before, self._new = self._new[:cut], self._new[cut:]
            take(before)
            if self._is_last:
                return None
            yield

    def _peek(self, take: Take) -> Steps[str]:
        """Take white space and return the character behind it; empty at the end of the text."""
        while True:
            text = self._new.lstrip()
            take(self._new[: len(self._new) - len(text)])
            self._new = text
            if text or self._is_last:
                return text[:1]
            yield

    def _expect(self, literal: str, take: Take) -> Steps[bool]:
        """Take white space and drop a literal if it follows; return whether it does."""
        while True:
            yield from self._peek(take)
            if self._new.startswith(literal):
                self._new = self._new[len(literal) :]
                return True
            if self._is_last or not literal.startswith(self._new):
                return False
            yield

    def _first_of(self, tags: Iterable[str]) -> Steps[str | None]:
        """Show white space and drop a tag if one follows; otherwise show all text."""
        for tag in tags:
            if (yield from self._expect(tag, self._show)):
                return tag
        return (yield from self._until((), self._show))

    def _one_of(self, literals: Iterable[str]) -> Steps[str]:
        """Take white space and one of some literals, which must follow."""
        for literal in literals:
            if (yield from self._expect(literal, self._take)):
                self._take(literal)
                return literal
        raise NoCall

    def _rest_of(self, tag: str, number: int = 0) -> Steps[None]:
        """Take the words of a tag behind one of them."""
        for word in _words(tag)[number + 1 :]:
            yield from self._one_of((word,))

    def _required(self, markers: Collection[str], take: Take) -> Steps[str]:
        """Take text up to one of some markers, which must come, and the marker."""
        marker = yield from self._until(markers, take)
        if marker is None:
            raise NoCall
        self._take(marker)
        return marker

    def _end(self, words: Iterable[str]) -> Steps[None]:
        """Drop what follows a call that has ended, as far as it is there."""
        for word in words:
            if not (yield from self._expect(word, self._show)):
                if self._is_last and word.startswith(self._new):
                    self._new = ""
                return

    def _object(self) -> Steps[str]:
        """Take a JSON object, up to its bracket."""
        nesting, parts = Nesting(), list[str]()
        while True:
            end = nesting.end_in(self._new)
            cut = len(self._new) if end is None else end + (not nesting.is_broken)
            part, self._new = self._new[:cut], self._new[cut:]
            parts.append(part)
            self._take(part)
            if nesting.is_broken or (self._is_last and end is None):
                raise NoCall
            if end is not None:
                return "".join(parts)
            yield

    def _add(self, name: str, arguments: str) -> None:
        """Return a call that has ended."""
        self._called.append(CallDelta(self._num_calls, name, arguments))
        self._num_calls += 1
        self._release()
        self._content.add_markup()
        if self._requested.is_single:
            raise _Done

    def _show(self, text: str) -> None:
        self._shown.append(self._content.add(text))

    def _think(self, text: str) -> None:
        self._thought.append(self._reasoning.add(text))

    def _take(self, text: str) -> None:
        self._raw.append(text)
        self.num_held += len(text)

    def _release(self) -> None:
        self._raw, self.num_held = [], 0

    def _take_first(self) -> None:
        self._take(self._new[0])
        self._new = self._new[1:]

    def _collecting(self, parts: list[str]) -> Take:
        def take(text: str) -> None:
            parts.append(text)
            self._take(text)

        return take

    def _limited(self, parts: list[str]) -> Take:
        """Return a taker of text that must be short."""

        room = MAX_HEAD_CHARS
        collect = self._collecting(parts)

        def take(text: str) -> None:
            nonlocal room
            if not text:
                return
            collect(text[:room])
            if len(text) > room:
                self._new = text[room:] + self._new
                raise NoCall
            room -= len(text)

        return take


def _drop(text: str) -> None:
    """Take text that belongs to no part."""


def _words(tag: str) -> list[str]:
    """Return the words of a tag; tokenizers may add a space behind a special token, too."""
    return [word for word in WORD_ENDS.split(tag) if word]


def _overlap(text: str, marker: str) -> int:
    """Return how much of a marker may begin at the end of a text."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)


def object_text(json_text: str | bytes) -> str:
    """Return the text of a JSON object, which may stand in a JSON string; raises NoCall for anything else."""
    try:
        value = decode(json_text)
        if isinstance(value, str):
            json_text, value = value, decode(value)
    except (DecodeError, UnicodeEncodeError, RecursionError):
        raise NoCall from None
    if not isinstance(value, dict):
        raise NoCall
    return json_text if isinstance(json_text, str) else json_text.decode()
