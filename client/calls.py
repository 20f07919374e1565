"""The calls of a server, each once. `client.py` makes an asynchronous client and a blocking one of them."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping
from contextlib import aclosing, contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar
from urllib.parse import quote

from client.answers import (
    BASE,
    Answer,
    GeneratedToken,
    Generation,
    Received,
    ReceivedDelta,
    events,
    messages_of,
)
from client.http import (
    NoAnswer,
    Reply,
    ServerRefused,
    Transport,
    called,
    converted,
    parsed,
    unexpected,
)
from client.names import check_new_name, key_id_of, parse_reference, path_of, tenant_path_of
from client.publishing import ArtifactFile, Publishing, local_file, publish
from client.replies import (
    CreatedKeyReply,
    DeletedReply,
    KeyReply,
    LimitsReply,
    MeReply,
    ModelReply,
    RevokedKeyReply,
    SharedVariant,
    StatsReply,
    StatusReply,
    TenantsReply,
    TextReply,
    TokensReply,
    UploadReply,
    VariantReply,
    VersionReply,
)
from client.waiting import ServerWait
from deltastore.console import byte_progress
from deltastore.errors import PeraxisError, UsageError

if TYPE_CHECKING:
    import httpx

# Longest silence between two pieces of an answer, in seconds; a variant may have to be loaded before the first.
SILENCE_S = 300.0
CHAT, GENERATE = "/v1/chat/completions", "/generate"
BAD_REQUEST, NOT_FOUND = 400, 404
Visibility = Literal["private", "public"]
Messages = list[Mapping[str, Any]]

T = TypeVar("T")
R = TypeVar("R", bound=Received[Any])
D = TypeVar("D")
log = logging.getLogger(__name__)


class AsyncStream(Generic[R, D]):
    """An answer that comes in pieces: iterate it, once. As an async context manager it ends with its block.

    The call is made when the first piece is asked for. An answer that is left before its end is generated no further.

    Attributes:
        answer: All that has come so far.
    """

    def __init__(self, pieces: AsyncGenerator[D], answer: R) -> None:
        self._pieces = pieces
        self.answer = answer

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> D:
        """Return the next piece.

        Raises:
            NoAnswer, ServerRefused: The call failed, or the answer broke off.
            UnexpectedReply: It is no answer of a Peraxis server.
        """
        return await anext(self._pieces)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Leave the answer; what has come stays in `answer`."""
        await self._pieces.aclose()


class Calls:
    """The calls of one server.

    Every call raises NoAnswer if the connection fails, ServerRefused if the server answers with an error (its subclass
    AuthenticationFailed if that is about the key), UnexpectedReply if the answer is no Peraxis server's, and UsageError
    for an argument that no server takes.

    Args:
        transport: The way to the server.
        wait_s: Seconds that calls which generate or push wait for their server; None as `ServerWait` has it.
        tell: Called with lines that tell of waits and of attempts that failed.
    """

    def __init__(
        self, transport: Transport, wait_s: int | None = None, tell: Callable[[str], object] = log.warning
    ) -> None:
        self.address = transport.address
        self._transport = transport
        self._tell = tell
        self._waiting = ServerWait(self.address.url, wait_s, tell=tell)
        self._num_waits = 0
        self._lock = Lock()

    async def generate(
        self, /, prompt: str | Messages, variant: str | None = None, **options: Any
    ) -> Generation:
        """Generate from a prompt, whose text the model is given as it is, or from a conversation.

        Args:
            prompt: A text, or messages, each with ``role`` and ``content``.
            variant: ``NAME``, ``NAME@VERSION``, or None for the base.
            options: Fields of `POST /generate`, such as ``max_new_tokens``, ``temperature``, ``n`` or ``logprobs``; one
                that is left out is the variant's own.
        """
        generation = Generation(variant)
        generation.fill(await self._begun(GENERATE, *_generate_call(prompt, variant, options)))
        return generation

    def stream_generate(
        self, /, prompt: str | Messages, variant: str | None = None, **options: Any
    ) -> AsyncStream[Generation, GeneratedToken]:
        """Generate as `generate` does, token by token."""
        generation = Generation(variant)
        params, body, model = _generate_call(prompt, variant, {**options, "stream": True})
        return AsyncStream(self._streamed(GENERATE, params, body, model, generation), generation)

    async def chat(
        self,
        /,
        model: str,
        messages: str | Messages,
        *,
        system: str | None = None,
        **options: Any,
    ) -> Answer:
        """Ask a variant for the assistant's next message, by its chat template.

        Args:
            model: ``NAME``, ``NAME@VERSION`` or ``base``.
            messages: A conversation in OpenAI's form, or the user's one message as a text.
            system: A system message before it.
            options: Fields of `POST /v1/chat/completions`, such as ``max_tokens``, ``temperature``, ``seed`` or
                ``tools``; one that is left out is the variant's own.
        """
        answer = Answer(model)
        body = {"model": model, "messages": messages_of(messages, system), **options}
        answer.fill(await self._begun(CHAT, {}, body, model))
        return answer

    def stream_chat(
        self,
        /,
        model: str,
        messages: str | Messages,
        *,
        system: str | None = None,
        **options: Any,
    ) -> AsyncStream[Answer, ReceivedDelta]:
        """Ask as `chat` does; each piece has the text that it adds to the answer and to the thoughts before it.

        A call that found no server, or one that takes no calls, is made again. An answer that has begun is not asked
        for again.
        """
        answer = Answer(model)
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": model, "messages": messages_of(messages, system), **options, **streamed}
        return AsyncStream(self._streamed(CHAT, {}, body, model, answer), answer)

    async def tokenize(
        self, /, prompt: str | Messages, model: str | None = None, **options: Any
    ) -> TokensReply:
        """Return the token ids of a prompt or a conversation, as a request for tokens would have them.

        Args:
            prompt: A text, or messages.
            model: A variant, for its own tokenizer and template, or None for the base.
            options: Fields of `POST /tokenize`, such as ``add_special_tokens`` or ``return_token_strs``.
        """
        body = {**_prompt(prompt), **({} if model is None else {"model": model}), **options}
        return parsed((await self._called("POST", "/tokenize", json=body)).content, TokensReply)

    async def detokenize(self, tokens: Collection[int], model: str | None = None) -> str:
        """Return the text of token ids, special tokens included."""
        body = {"tokens": [*tokens], **({} if model is None else {"model": model})}
        return parsed((await self._called("POST", "/detokenize", json=body)).content, TextReply).prompt

    async def push(
        self,
        source: str | Path,
        name: str,
        *,
        activate: bool = True,
        visibility: Visibility | None = None,
        progress: bool = False,
    ) -> UploadReply:
        """Publish an artifact as the next version of a variant.

        The file is streamed. A broken connection is tried again, from the file's beginning; an artifact that the
        variant has already is not sent again.

        Args:
            source: The file, or ``hf://ORG/REPO[@REV][:FILE]`` of the Hugging Face hub.
            name: The variant.
            activate: Make the new version the active one.
            visibility: Whether other tenants may use it; None leaves it as it is, and a new variant is private.
            progress: Show progress on stderr or in the notebook.

        Raises:
            ArtifactError: The file is no artifact, has changed meanwhile, or the hub does not give it.
        """
        # Refuse a name that cannot be one before the file is fetched or hashed.
        check_new_name(name)
        file = await self._transport.work(lambda: local_file(source, progress))
        with byte_progress(file.stat().st_size, f"digest of {file.name}", progress) as bar:
            artifact = await self._transport.work(lambda: ArtifactFile.read(file, bar.update))
        publishing = Publishing(artifact, name, activate, visibility)
        with self._waits():
            return await publish(self._transport, publishing, progress, self._waiting, self._tell)

    async def models(self) -> list[ModelReply]:
        """List the base and each variant that this tenant may use."""
        return await self._entries("/v1/models", "data", ModelReply)

    async def variants(self) -> list[VariantReply]:
        """List the tenant's variants by name, each with its active version and the newest ones."""
        return await self._entries("/variants", "variants", VariantReply)

    async def shared_variants(self, own: Collection[str]) -> list[SharedVariant]:
        """List the variants that the caller may use beside its own; none where the server is called without a key.

        Args:
            own: The names of the tenant's variants, which hide public ones of the same name.
        """
        # A server that is called without a key has one tenant.
        if self.address.key is None:
            return []
        models = await self.models()
        return [SharedVariant(each.id, each.owned_by) for each in models if each.id not in {BASE, *own}]

    async def variant(self, name: str) -> VariantReply:
        """Show one of the tenant's variants with all its versions and their reports."""
        path = path_of(name)
        try:
            document = await self._whole_list(path, "versions")
        except ServerRefused as error:
            raise await self._not_owned(name, error) from error
        return converted(document, VariantReply)

    async def versions(self, name: str) -> tuple[VersionReply, ...]:
        """List all versions of one of the tenant's variants, the oldest first."""
        return (await self.variant(name)).versions

    async def promote(self, name: str, version: int) -> VariantReply:
        """Make a version the active one. Running requests keep theirs."""
        return await self._changed(name, {"active": version})

    async def rollback(self, name: str) -> VariantReply:
        """Make the version active again that was active before; a second rollback undoes the first.

        Raises:
            PeraxisError: There is none, or the server does not know it.
        """
        reply = await self._called("GET", path_of(name), params={"limit": "1"})
        return await self.promote(name, previous_version(parsed(reply.content, VariantReply)))

    async def set_visibility(self, name: str, visibility: Visibility) -> VariantReply:
        """Make a variant ``public``, so that every tenant may use it, or ``private`` again."""
        return await self._changed(name, {"visibility": visibility})

    async def delete(self, reference: str) -> DeletedReply:
        """Delete a variant with all its versions, or with ``NAME@VERSION`` one that is not active.

        A version's number is never assigned again.
        """
        name, params = parse_reference(reference)
        return parsed((await self._called("DELETE", path_of(name), params=params)).content, DeletedReply)

    async def load(self, reference: str) -> StatusReply:
        """Load ``NAME``'s active version or ``NAME@VERSION`` into a slot before a request needs it."""
        return await self._acted("load", reference)

    async def unload(self, reference: str) -> StatusReply:
        """Free a version's slot as soon as no request uses it."""
        return await self._acted("unload", reference)

    async def pin(self, reference: str) -> StatusReply:
        """Load a version into a slot and never evict it."""
        return await self._acted("pin", reference)

    async def unpin(self, reference: str) -> StatusReply:
        """Allow the eviction of a pinned version again."""
        return await self._acted("unpin", reference)

    async def keys(self, tenant: str | None = None) -> list[KeyReply]:
        """List the keys, or only a tenant's, without their text; for administrators."""
        return await self._entries("/keys", "keys", KeyReply, {} if tenant is None else {"tenant": tenant})

    async def create_key(
        self, tenant: str, roles: Collection[str], expires_in_s: int | None = None
    ) -> CreatedKeyReply:
        """Make a key; its text is shown this once.

        Args:
            tenant: The tenant that gets it.
            roles: Any of ``inference``, ``publish``, ``metrics`` and ``admin``.
            expires_in_s: Seconds until it expires; None for never.
        """
        body = {"tenant": tenant, "roles": [*roles], "expires_in_s": expires_in_s}
        return parsed((await self._called("POST", "/keys", json=body)).content, CreatedKeyReply)

    async def revoke_key(self, key_id: str) -> RevokedKeyReply:
        """Revoke the key with an id. Every server on the registry refuses it within a second."""
        # A whole key that was pasted must not reach a URL, where logs would keep it.
        path = f"/keys/{key_id_of(key_id)}"
        return parsed((await self._called("DELETE", path)).content, RevokedKeyReply)

    async def tenants(self) -> TenantsReply:
        """List every tenant that has a key, a variant or limits of its own; for administrators."""
        return converted(await self._whole_list("/tenants", "tenants"), TenantsReply)

    async def set_limits(self, tenant: str, /, **limits: int | None) -> LimitsReply:
        """Set limits of a tenant, such as ``max_pinned``; None is unlimited, and those that are not given stay."""
        path = tenant_path_of(tenant)
        if not limits:
            raise UsageError("give a limit to set, such as `requests_per_minute`")
        # The call replaces all limits.
        before = (await self.tenants()).limits_of(tenant)
        return parsed((await self._called("PUT", path, json={**before, **limits})).content, LimitsReply)

    async def me(self) -> MeReply:
        """Show the caller's tenant, roles, key, limits and usage."""
        return parsed((await self._called("GET", "/me")).content, MeReply)

    async def acting_tenant(self, *, only_admins: bool = False) -> str | None:
        """Return the tenant that calls act for; None if the server does not tell it.

        Args:
            only_admins: Return it only to those who may act for several.
        """
        if self.address.tenant or self.address.key is None:
            return self.address.tenant
        try:
            me = await self.me()
        except PeraxisError:
            # It only completes what another call has answered.
            return None
        return me.tenant if me.is_admin or not only_admins else None

    async def stats(self) -> StatsReply:
        """Show queues, slots, the deltas in memory, uploads and versions of the server; for administrators."""
        return parsed((await self._called("GET", "/stats")).content, StatsReply)

    async def check_alive(self) -> None:
        """Raise if the server does not answer; while it starts, it does."""
        await self._called("GET", "/health")

    async def check_ready(self) -> None:
        """Raise if requests for tokens are not admitted now."""
        await self._called("GET", "/ready")

    async def _called(self, method: str, path: str, **options: Any) -> httpx.Response:
        return await called(self._transport, method, path, **options)

    async def _acted(self, action: str, reference: str) -> StatusReply:
        name, params = parse_reference(reference)
        reply = await self._called("POST", f"{path_of(name)}/{action}", params=params)
        return parsed(reply.content, StatusReply)

    async def _changed(self, name: str, change: Mapping[str, Any]) -> VariantReply:
        return parsed((await self._called("PATCH", path_of(name), json=change)).content, VariantReply)

    async def _not_owned(self, name: str, error: ServerRefused) -> ServerRefused:
        """Return the error of a variant that was not found; it names the owner if the variant is another tenant's."""
        if error.status != NOT_FOUND or self.address.key is None or name == BASE:
            return error
        try:
            reply = await self._called("GET", f"/v1/models/{quote(name, safe='')}")
        except ServerRefused:
            return error
        found = parsed(reply.content, ModelReply)
        message = (
            f"variant {name!r} is public and belongs to tenant {found.owned_by!r}, and only its owner sees its "
            f"versions: use it, as in `peraxis chat {name}`"
        )
        return ServerRefused(message, error.status, error.code)

    async def _entries(
        self, path: str, key: str, kind: type[T], params: Mapping[str, str] | None = None
    ) -> list[T]:
        """Return the entries of all pages of a list."""
        document = await self._whole_list(path, key, params)
        return [converted(entry, kind) for entry in document[key]]

    async def _whole_list(
        self, path: str, key: str, params: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Ask for all pages of a list; return one document, the first page's with the entries of all.

        Args:
            path: The route.
            key: The name of the list in a page.
            params: Of each call.
        """
        whole: dict[str, Any] | None = None
        after: dict[str, str] = {}
        while True:
            reply = await self._called("GET", path, params={**(params or {}), **after})
            page, document = parsed(reply.content, _Page), parsed(reply.content, dict[str, Any])
            if not isinstance(document.get(key), list):
                raise unexpected(f"it has no list {key!r}")
            # They are of the page.
            document.pop("has_more", None)
            document.pop("last_id", None)
            if whole is None:
                whole = document
            else:
                whole[key] += document[key]
            if not page.has_more:
                return whole
            if page.last_id is None or page.last_id == after.get("after"):
                raise unexpected("the next page of the list begins where this one began")
            after = {"after": page.last_id}

    async def _streamed(
        self,
        path: str,
        params: Mapping[str, str],
        body: Mapping[str, Any],
        model: str,
        answer: Received[D],
    ) -> AsyncGenerator[D]:
        """Make a call that streams, fill `answer`, and yield its pieces as they come."""
        reply = await self._begun(path, params, body, model, answer)
        answer.begin(reply)
        async with aclosing(self._transport.pieces(reply)) as pieces:
            async for name, data in events(pieces):
                if not answer.is_whole and (piece := answer.event(name, data)) is not None:
                    yield piece
        if not answer.is_whole:
            raise answer.broken_off()

    async def _begun(
        self,
        path: str,
        params: Mapping[str, str],
        body: Mapping[str, Any],
        model: str,
        answer: Received[Any] | None = None,
    ) -> httpx.Response:
        """Make a call that generates until the server takes it; return its answer.

        Args:
            path: The route.
            params: Its parameters.
            body: Its body.
            model: The model's name in errors.
            answer: With one, the answer's body has not been read.
        """
        options = {"params": params, "json": body, "read_s": SILENCE_S, "is_streamed": answer is not None}
        with self._waits():
            while True:
                if answer is not None:
                    answer.sent()
                try:
                    reply = await self._called("POST", path, **options)
                    self._waiting.answered()
                    return reply
                except ServerRefused as error:
                    if error.status == BAD_REQUEST:
                        # The server's messages of wrong requests do not name the model.
                        raise ServerRefused(f"{model}: {error}", error.status, error.code) from error
                    pause_s = self._waiting.next_pause_s(error)
                except NoAnswer as error:
                    pause_s = self._waiting.next_pause_s(error)
                await self._transport.sleep(pause_s)

    @contextmanager
    def _waits(self) -> Iterator[None]:
        """Share one wait among the blocks that run at a time; a later call begins one of its own."""
        with self._lock:
            self._num_waits += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_waits -= 1
                if self._num_waits == 0:
                    self._waiting.restart()


class _Page(Reply, frozen=True):
    """The fields of every page."""

    has_more: bool = False
    last_id: str | None = None


def previous_version(variant: VariantReply) -> int:
    """Return the version that was active before the active one.

    Raises:
        PeraxisError: There is none, or the server does not know it.
    """
    if variant.active is None:
        raise PeraxisError(
            f"variant {variant.name!r} has no active version: promote one, as in `peraxis promote NAME VERSION`"
        )
    if variant.previous is None:
        raise PeraxisError(
            f"variant {variant.name!r}: no version is known that was active before {variant.active} and still exists: "
            "`peraxis show` lists its versions, and `peraxis promote` chooses one"
        )
    return variant.previous


def _prompt(prompt: str | Messages) -> dict[str, Any]:
    return {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}


def _generate_call(
    prompt: str | Messages, variant: str | None, options: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Any], str]:
    """Return the parameters and the body of `POST /generate`, and the model as errors name it."""
    params = {} if variant in (None, BASE) else {"variant": str(variant)}
    return params, {**_prompt(prompt), **options}, variant or BASE
