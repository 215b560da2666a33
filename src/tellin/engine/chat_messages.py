"""Messages of a conversation: checked, their pictures taken out, their contents made presentable.

Chat templates read a message's content as a text, or as a list of parts; which it is is found out
by trying (`ContentFormats`). A template that reads texts is given the model's placeholder where a
picture belongs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tellin.engine.mm_inputs import ImageItem, ImageUrl
from tellin.exceptions import InvalidParameterError, InvalidTypeError, RequestError
from tellin.exceptions import UnsupportedFeatureError as Unsupported

_TEXT_KINDS = ("text", "input_text", "output_text", "refusal")
_IMAGE_KINDS = ("image_url", "input_image", "image_pil", "image")
_IMAGE = {"type": "image"}
_MAX_TEMPLATES = 64


def has_image_parts(conversations: Any) -> bool:
    """Whether any message has a picture, as far as can be said of what is not checked yet."""
    for messages in conversations if isinstance(conversations, list | tuple) else ():
        for message in messages if isinstance(messages, list | tuple) else ():
            content = message.get("content") if isinstance(message, Mapping) else None
            if isinstance(content, list | tuple) and any(
                isinstance(part, Mapping) and part.get("type") in _IMAGE_KINDS for part in content
            ):
                return True
    return False


@dataclass(frozen=True)
class Conversation:
    """Checked messages.

    ``parts`` has, of every message, its content: a text, or a list of texts and None for pictures,
    which are in ``images`` in that order.
    """

    messages: list[dict[str, Any]]
    parts: list[str | list[str | None]]
    images: list[ImageItem]

    def with_contents(self, content_format: str, placeholder: str) -> list[dict[str, Any]]:
        """Copies of the messages, with contents as a template of this format reads them."""
        write = _as_parts if content_format == "openai" else _as_text
        return [
            {**message, "content": write(content, placeholder)}
            for message, content in zip(self.messages, self.parts, strict=True)
        ]


def _as_parts(content: str | list[str | None], placeholder: str) -> list[dict[str, Any]]:
    parts = [content] if isinstance(content, str) else content
    return [dict(_IMAGE) if part is None else {"type": "text", "text": part} for part in parts]


def _as_text(content: str | list[str | None], placeholder: str) -> str:
    """Texts on lines of their own, after the pictures, unless they say where these belong."""
    if isinstance(content, str):
        return content
    text = "\n".join(part for part in content if part is not None)
    missing = content.count(None)
    if missing and placeholder:
        missing -= text.count(placeholder)
    return "\n".join([*[placeholder] * missing, *([text] if text or not missing else [])])


def check_messages(messages: Any) -> Conversation:
    """Take a conversation apart.

    Raises:
        InvalidParameterError, InvalidTypeError: a message is malformed.
        UnsupportedFeatureError: a message has a part that is neither text nor a picture.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidParameterError(
            f"a conversation must be a non-empty list of messages, got {messages!r:.80}",
            parameter="messages",
        )
    conversation = Conversation([], [], [])
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidTypeError(
                f"{where} must be a dict with a 'role', got {message!r:.80}",
                parameter="messages",
                value=message,
            )
        conversation.messages.append(dict(message))
        conversation.parts.append(_content(message.get("content"), where, conversation.images))
    return conversation


def _content(content: Any, where: str, images: list[ImageItem]) -> str | list[str | None]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise InvalidTypeError(
            f"{where}.content must be a string, a list of parts or null, "
            f"got {type(content).__name__}",
            parameter="messages",
        )
    return [_part(part, where, images) for part in content]


def _part(part: Any, where: str, images: list[ImageItem]) -> str | None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _IMAGE_KINDS:
        images.append(_image(part, kind, f"{where}.content"))
        return None
    if kind not in _TEXT_KINDS and not isinstance(part, str):
        raise Unsupported(
            f"{where}.content has a part of type {kind!r}; known are 'text' and, for models that "
            f"see images, {', '.join(map(repr, _IMAGE_KINDS))}"
        )
    text = part if isinstance(part, str) else part.get("text", part.get("refusal"))
    if not isinstance(text, str):
        raise InvalidTypeError(
            f"{where}.content has a text part without text", parameter="messages"
        )
    return text


def _image(part: Mapping[str, Any], kind: str, where: str) -> ImageItem:
    """The picture of a part, in any of the forms that are in use."""
    uuid = part.get("uuid")
    if uuid is not None and (not isinstance(uuid, str) or not uuid):
        raise InvalidTypeError(
            f"{where} has a part whose uuid is no non-empty string", parameter="messages"
        )
    data = part.get("image" if kind == "image" else kind)
    if kind == "input_image":
        if part.get("file_id") is not None:
            raise Unsupported(f"{where} refers to a stored file; send the image's data")
        data = part.get("image_url")
    if kind in ("image_url", "input_image"):
        url = data.get("url") if isinstance(data, Mapping) else data
        if isinstance(url, str):
            return ImageItem(ImageUrl(url), uuid)
        data = None
    if data is None and uuid is None:
        raise InvalidTypeError(
            f"{where} has a part of type {kind!r} without an image; write "
            "{'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,...'}}",
            parameter="messages",
        )
    return ImageItem(data, uuid)


Render = Callable[[Sequence[Mapping[str, Any]]], str]


class ContentFormats:
    """Which form of contents a template reads, found out by rendering two short conversations.

    Args:
        placeholder: what a template that reads parts must write for a picture; None = the model
            sees none.
    """

    def __init__(self, placeholder: str | None) -> None:
        self._placeholder = placeholder
        self._known: dict[str | None, str] = {}
        self._lock = threading.Lock()

    def find(self, template: str | None, render: Render) -> str:
        """``string`` or ``openai`` (parts). A model that sees images prefers parts."""
        with self._lock:
            known = self._known.get(template)
        if known is not None:
            return known
        reads_text = self._try(render, "probe")
        if reads_text and self._placeholder is None:
            found = "string"
        else:
            parts: list[dict[str, Any]] = [{"type": "text", "text": "probe"}]
            if self._placeholder is not None:
                parts.insert(0, dict(_IMAGE))
            found = "openai" if self._try(render, parts) else "string"
        with self._lock:
            if len(self._known) >= _MAX_TEMPLATES:
                self._known.clear()
            self._known[template] = found
        return found

    def _try(self, render: Render, content: str | list[dict[str, Any]]) -> bool:
        """Whether what it makes of the content has its text, and the placeholder for a picture."""
        try:
            text = render([{"role": "user", "content": content}])
        except RequestError:
            return False
        if "probe" not in text or "'type'" in text or '"type"' in text:
            return False  # or it has written the list down as it is
        wants_image = not isinstance(content, str) and self._placeholder is not None
        return not wants_image or text.count(self._placeholder or "") == 1
